"""What the template asks, refuses and bakes."""

import itertools
import re
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from cookiecutter.exceptions import FailedHookException
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import PROJECT, ROOT
from support.projects import bake_project, expected_files, files_below, load_hook, parse_files, resolve
from support.ranks import printed_by
from tools import make_interactions
from tools.address import with_address
from tools.facts import FOLDER, QUESTIONS, tracked
from tools.pins import compile_pins


@pytest.mark.parametrize(
    ("name", "slug"),
    [("  Müller's “x” ", "muller_s_x"), ("!!! ... ???", "project_one"), ("1 " * 60, "project_1" + "_1" * 20)],
)
def test_answers_suggested_slug_is_accepted(name, slug):
    assert resolve({"project_name": name})["project_slug"] == slug
    assert load_hook("pre", project_name=name)["mistakes"]() == []


def test_answers_packages_of_the_environment_are_no_slugs():
    """By the names of what pip installs, and of the modules that it brings."""
    project = tomllib.loads(re.sub(r"{%.*?%}", "", (PROJECT / "pyproject.toml").read_text()))["project"]
    needed = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    pinned = re.findall(r"(?m)^([\w.-]+)==", (PROJECT / "constraints.txt").read_text())
    names = {canonicalize_name(re.match(r"[\w.-]+", each)[0]).replace("-", "_") for each in (*needed, *pinned)}
    packages, imported = (set(load_hook("pre")[name].split()) for name in ("DEPENDENCIES", "IMPORTED"))
    assert packages == names | {"fastgpu_engine", "pip", "setuptools", "wheel"}

    modules = {
        module.lower()
        for module, owners in metadata.packages_distributions().items()
        if names & {canonicalize_name(owner).replace("-", "_") for owner in owners}
    }
    own = {path.stem for path in PROJECT.glob("[a-z]*") if path.suffix == ".py" or any(path.glob("*.py"))}
    found = {name for name in modules | own if re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name)}
    assert found - {"example"} <= packages | imported  # nvidia-ml-py has an example.py


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("project_slug", "1st", "a letter first"),
        ("project_slug", "a" * 51, "at most 50"),
        ("project_slug", "match", "a word of the Python language"),
        ("project_slug", "nvidia_ml_py", "add a word, such as nvidia_ml_py_project"),
        ("project_slug", "torchvision", "a package that the project needs"),
        ("project_slug", "fastgpu_engine", "a package that the project needs"),
        ("project_slug", "pip", "a package that the project needs"),
        ("project_slug", "setuptools", "a package that the project needs"),
        ("project_slug", "jinja2", "a package that the project needs"),
        ("project_slug", "cv2", "a package that the project needs"),
        ("project_slug", "json", "a package that the project needs"),
        ("project_slug", "train", "a package that the project needs"),
        ("project_name", "two\nlines", "without control characters"),
        ("description", "two\nlines", "without control characters"),
        ("author", "   ", "write a word or two"),
    ],
)
def test_answers_that_break_are_refused(name, answer, reason):
    (mistake,) = load_hook("pre", **{"project_slug": "cats", name: answer})["mistakes"]()
    assert mistake.startswith(f"{name} is ")
    assert reason in mistake


def test_answers_mistakes_come_all_at_once(template, tmp_path, capfd):
    with pytest.raises(FailedHookException):
        bake_project(tmp_path, template, project_slug="../evil", project_name="", author="a\nb")
    said = capfd.readouterr().err
    assert all(f"error: {name}" in said for name in ("project_slug", "project_name", "author"))
    assert not list((tmp_path / "out").iterdir())
    assert not list(tmp_path.rglob("evil"))


def test_answers_by_default_bake_a_clean_project(template, tmp_path, capfd):
    """Also from a folder in which the project was run and built."""
    dirty = shutil.copytree(template, tmp_path / "dirty")
    leftovers = "fastgpu/__pycache__/x.pyc stray.pyc .mypy_cache/x.json runs/a/metrics.jsonl build/lib/x.py"
    leftovers += " x.egg-info/PKG-INFO .hypothesis/x .coverage data/.DS_Store .venv/template.html"
    for name in leftovers.split():
        path = dirty / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{% broken {{")
    project = bake_project(tmp_path, dirty)
    assert project.name == "my_training_project"
    assert parse_files(project)["project"]["name"] == "my-training-project"
    assert files_below(project) == expected_files()
    assert "cd my_training_project" in capfd.readouterr().out


@pytest.mark.parametrize(("programs", "n_steps"), [("git", 6), ("git nvidia-smi", 5), ("nvidia-smi", 4)])
def test_next_steps_fit_the_machine(baked, tmp_path, monkeypatch, programs, n_steps):
    """The first commit is offered outside of repositories, and torch for CPUs where there is no GPU."""
    for name in programs.split():
        (tmp_path / name).write_text("#!/bin/sh\nexit 128\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(baked("images"))
    _, first, *steps = load_hook("post", project_slug="cats")["next_steps"]().strip().splitlines()
    assert first == "  cd cats"
    assert len(steps) == n_steps - 1
    readme = Path("README.md").read_text()
    shown = [line.strip() for line in steps if "git init" not in line]
    assert [line for line in shown if f"{line} " not in readme and f"{line}\n" not in readme] == []
    assert [name for name in ("git init", "--index-url") if name in "".join(steps)] == (
        ["git init"] * ("git" in programs.split()) + ["--index-url"] * ("nvidia" not in programs)
    )


def test_answers_that_are_odd_still_bake(template, tmp_path):
    text = (
        "-leading dash, quotes \" and ' and \"\"\" and ''', back\\slash \\n \\, Ünïcödé 日本語 😀 # hash : colon "
        "{{ cookiecutter.project_slug }} {% if x %} {brace} [b] & amp; <b> ${HOME} $(touch hacked) `touch hacked` "
        "'''; import os; os.mkdir('hacked'); '''"
    )
    project = bake_project(tmp_path, template, project_name=text, project_slug="odd", author=text, description=text)
    meta = tomllib.loads((project / "pyproject.toml").read_text())  # and are kept as they were given
    assert meta["project"]["authors"][0]["name"] == meta["project"]["description"] == " ".join(text.split())
    assert (project / "README.md").read_text().startswith(f"# {text}\n\n{text}\n\n")
    assert text in (project / "LICENSE").read_text()
    assert not list(tmp_path.rglob("hacked"))


def test_hooks_need_only_python():
    for path in (ROOT / "hooks").glob("*.py"):
        imported = re.findall(r"(?m)^(?:import|from) (\w+)", path.read_text())
        assert set(imported) <= sys.stdlib_module_names


def test_owner_is_named_in_one_place():
    """`make fix` copies the address from there into two files that no program can ask, once the owner is known."""
    address = QUESTIONS["__template"]
    texts = {name: (ROOT / name).read_bytes().decode(errors="ignore") for name in tracked()}
    owner_and_name = address.partition("://")[2].partition("/")[2]
    places = {name for name, text in texts.items() if owner_and_name in text}
    assert places - {"CITATION.cff", "pyproject.toml"} == {"cookiecutter.json"}
    for name, line in (("CITATION.cff", "repository-code: {}"), ("pyproject.toml", 'Template = "{}"')):
        assert with_address(name, texts[name], address) == texts[name]
        other = with_address(name, texts[name], "https://example.com/us/copy")
        assert line.format("https://example.com/us/copy") in other.splitlines()
        assert with_address(name, other, address) == texts[name]


def test_version_is_the_newest_in_the_changelog():
    source = (PROJECT / "fastgpu/__init__.py").read_text()
    (version,) = re.findall(r'(?m)^TEMPLATE_VERSION = "(\d+\.\d+\.\d+)"$', source)
    first, second = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())[:2]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert first == "Unreleased"
    assert second == f"{version} - {cited['date-released']}"
    assert cited["version"] == version


def test_release_has_the_section_of_the_changelog(tmp_path):
    """The program of the workflow that cuts it out."""
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["wheel"]["steps"]
    (line,) = re.findall(r"(?m)^awk .*$", steps[-1]["run"])
    sections = (
        "# Changelog\n\n## Unreleased\n\n## 1.10.0 - 2026-01-02\n\n### Fixed\n- b\n\n## 1.1.0 - 2026-01-01\n- a\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(sections)
    for version, text in {"1.1.0": "- a", "1.10.0": "### Fixed\n- b"}.items():
        printed_by(["bash", "-euc", line], tmp_path, GITHUB_REF_NAME=f"v{version}")
        assert (tmp_path / "notes.md").read_text().strip() == text


def test_digits_are_complete_and_attributed():
    with h5py.File(PROJECT / "data/digits.h5") as file:
        assert sum(len(file[split]["images"]) for split in ("train", "val")) == 1797
        assert "CC BY 4.0" in file.attrs["source"]


def test_interactions_are_made_by_the_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "interactions.h5"), "--compression", "gzip"])
    make_interactions.main()
    assert "val: popularity_ndcg_at_100 0.194, oracle_ndcg_at_100 0.399" in capsys.readouterr().out
    for name, field in (("train", "items"), ("val", "items"), ("val", "held_out")):
        file = f"interactions-{name}.h5"
        with h5py.File(tmp_path / file) as made, h5py.File(PROJECT / "data" / file) as included:
            for member in included[field]:
                np.testing.assert_array_equal(made[field][member], included[field][member])


def test_constraints_pin_all_that_an_install_brings():
    """Also the packages of packages, by their metadata; torch's CUDA libraries, timm and wandb are exempt."""
    lines = [line for line in (PROJECT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads(re.sub(r"{%.*?%}", "", (PROJECT / "pyproject.toml").read_text()))
    extras = project["project"]["optional-dependencies"]
    pinned_extras = [each for name, needed in extras.items() if name not in ("timm", "wandb") for each in needed]
    todo = [*project["project"]["dependencies"], *pinned_extras]
    assert project["build-system"]["requires"] == [f"setuptools=={pins['setuptools']}"]
    assert project["dependency-groups"]["dev"] == extras["dev"]
    seen: set[str] = set()
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        known_extras = requirement.extras or {""}
        is_needed = not requirement.marker or any(requirement.marker.evaluate({"extra": each}) for each in known_extras)
        if name in seen or not is_needed or re.match("nvidia-(?!ml-py)|triton|cuda", name):
            continue
        seen.add(name)
        assert name in pins, f"{name} is not in constraints.txt"
        todo += metadata.requires(name) or []
    assert len(seen) > 40


@pytest.mark.slow
@pytest.mark.nightly
def test_constraints_are_made_by_the_tool(tmp_path):
    """From the index: versions that fit stay."""
    path = PROJECT / "constraints.txt"
    pins = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert compile_pins(tmp_path, path, upgrade=False) == pins


def test_pre_commit_has_the_linter_of_the_gate():
    """And is the same for the template and its projects."""
    (version,) = re.findall(r"(?m)^ruff==(\S+)", (PROJECT / "constraints.txt").read_text())
    ours, theirs = ((folder / ".pre-commit-config.yaml").read_text() for folder in (ROOT, PROJECT))
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in yaml.safe_load(theirs)["repos"]}
    assert ours == theirs
    assert revisions["ruff-pre-commit"] == f"v{version}"
    assert {"pre-commit-hooks", "nbstripout"} <= revisions.keys()
