"""Projects as users have them: of one workload, with a copy of the engine or the package, changed by their owners,
clean, and updated by cruft."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
import yaml
from packaging.requirements import Requirement

from fastgpu import TEMPLATE_VERSION
from support import ROOT
from support.projects import convert_commands, expected_files, files_below, load_hook, parse_files, read_blocks, run_in
from support.ranks import printed_by, run_to_end, run_train
from support.runs import metrics_of
from tools.facts import FOLDER, LEAF_ROOMS, PROJECT, QUESTIONS, project_files

WORDS_OF_THE_OTHER = {
    "recsys": r"cifar|celeba|\bdigits\b|\bPIL\b|pillow|image_files|mixup|cutout",
    "images": r"recsys|recommender|movielens|mult-?(vae|dae)|autoencoder|\bndcg|interactions",
}
"""{workload: what only the files of the other one speak of}"""
SPEAK_OF_BOTH = {"constraints.txt", "tests/conftest.py"}
"""The tests make rows up."""


def run_pytest(project: Path, *arguments: str, python: str | Path = sys.executable) -> None:
    """Run the fast tests of a project."""
    run_in(project, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments, python=python)


BAKES = [
    {"workload": "images", "engine": "copy", "launch": "both", "examples": "no"},
    {"workload": "both", "engine": "copy", "launch": "kubernetes", "examples": "yes", "license": "proprietary"},
    {"workload": "recsys", "engine": "package", "launch": "slurm", "examples": "no", "license": "Apache-2.0"},
    {"workload": "own", "engine": "package", "launch": "none", "examples": "no", "license": "BSD-3-Clause"},
]
GATED = [
    BAKES[0],
    {"workload": "own", "engine": "package", "launch": "none"},
    *(pytest.param(each, marks=pytest.mark.nightly) for each in BAKES[1:3]),
    pytest.param({"workload": "images", "engine": "package"}, marks=pytest.mark.nightly),
    *(pytest.param({"workload": each, "engine": "copy"}, marks=pytest.mark.nightly) for each in ("recsys", "own")),
]
"""Those that pass their own gate; not all of them only at night."""
LICENSES = {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License", "Apache-2.0": "Apache License"}
LICENSES |= {"proprietary": "All rights reserved"}
ASKED = ("workload", "engine", "launch", "examples")
ALL_ANSWERS = [
    dict(zip(ASKED, each, strict=True)) for each in itertools.product(*(QUESTIONS[question] for question in ASKED))
]
PAGES = [name for name in project_files() if name.endswith(".md")]


def is_binary(path: Path) -> bool:
    return path.suffix in (".h5", ".png")


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("gh:me/copy", "https://github.com/me/copy"),
        ("https://name:secret@git.example.com/team/copy.git", "https://git.example.com/team/copy"),
        ("/home/me/copy", ""),
        ("git@example.com:me/copy.git", ""),
        ("https://example.com/copy.zip", ""),
    ],
)
def test_bake_links_to_its_template(given, address):
    """Or, made from a folder, to the address that its owner has written into cookiecutter.json, or to none."""
    for own in (QUESTIONS["__template"], "https://example.com/us/fastgpu-template"):
        known = address or (own if "example" in own else "")
        hook = load_hook("post", workload="both", _template=given, __template=own)
        pages = [hook["edit_page"]((PROJECT / name).read_text(), name) for name in PAGES]
        pyproject = hook["name_url"]((PROJECT / "pyproject.toml").read_text())
        links = {link for text in pages for link in re.findall(r"\[(?:the template|템플릿)\]\(([^)]*)\)", text)}
        assert links == ({known} if known else set())
        assert re.findall(r'(?m)^Template = "(.*)"$', pyproject) == ([known] if known else [])
        texts = "".join([*pages, pyproject])
        assert "secret" not in texts
        assert f"cookiecutter --no-input {known or 'path/to/fastgpu-template'} &&" in texts


COMMIT = "0123456789012345678901234567890123456789"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("gh:me/copy", f"git+https://github.com/me/copy@{COMMIT}"),
        ("https://name:secret@git.example.com/team/copy.git", f"git+https://git.example.com/team/copy.git@{COMMIT}"),
        ("git@example.com:me/copy.git", f"git+ssh://git@example.com/me/copy.git@{COMMIT}"),
        ("ssh://git:secret@example.com:22/copy", f"git+ssh://git@example.com:22/copy@{COMMIT}"),
        ("git+https://example.com/copy", f"git+https://example.com/copy@{COMMIT}"),
        ("file:///home/me/copy.git", f"git+file://localhost/home/me/copy.git@{COMMIT}"),
        ("https://me:secret@example.com/copy.zip", "https://example.com/copy.zip"),
        (str(ROOT), ROOT.as_uri()),
        (ROOT.name, ROOT.as_uri()),
    ],
)
def test_bake_names_the_place_of_the_engine(monkeypatch, given, place):
    monkeypatch.setenv("PWD", str(ROOT.parent))  # of the shell that starts cookiecutter
    hook = load_hook("post", engine="package", workload="images", _template=given, _commit=COMMIT)
    source = (PROJECT / "pyproject.toml").read_text()
    pyproject = tomllib.loads(re.sub(r"{%.*?%}", "", hook["depend_on_engine"](source)))
    assert pyproject["project"]["dependencies"] == [f"fastgpu-engine[images] @ {place}"]
    Requirement(pyproject["project"]["dependencies"][0])
    assert pyproject["tool"]["mypy"]["files"] == ["*.py", "workloads"]


def test_bake_refuses_a_place_that_it_cannot_know(tmp_path, monkeypatch):
    monkeypatch.setenv("PWD", str(tmp_path))
    hook = load_hook("post", engine="package", _template="copy")
    with pytest.raises(SystemExit, match=f"needs the template's path from the root: {tmp_path}/copy is not a template"):
        hook["engine_url"]()


def test_bake_pins_the_tag_of_a_release(tmp_path, run):
    """As cookiecutter clones a template; without a tag, it is the commit."""
    hook = load_hook("post", engine="package", _template="gh:me/copy", _repo_dir=str(tmp_path))
    (tmp_path / "file").touch()
    commit(run, tmp_path)
    assert hook["engine_url"]() == f"git+https://github.com/me/copy@{run(tmp_path, 'git', 'rev-parse', 'HEAD').strip()}"
    run(tmp_path, "git", "tag", "v1.2.3")
    assert hook["engine_url"]() == "git+https://github.com/me/copy@v1.2.3"


def check_links(pages: dict[str, str], files: set[str]) -> None:
    """The links of pages lead to files of the project, and so do the paths that they name. pages: {name: text}."""
    places = files | {str(parent) for name in files for parent in Path(name).parents}
    for page, text in pages.items():
        assert not re.search(r"<!-- (only|end|numbers)", text), page
        assert "\n\n\n" not in re.sub(r"(?ms)^```.*?^```$", "block", text), page
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text)
        assert [link for link in links if os.path.normpath(Path(page).parent / link) not in places] == [], page
        paths = re.findall(r"`((?:launch|configs|docs|fastgpu|tests)/[\w./-]+\.\w+)`(?! of \[?the template)", text)
        paths = [path for path in paths if path not in ("configs/mine.yaml", "fastgpu/theirs.py")]
        assert [path for path in paths if path not in places] == [], page


@pytest.mark.parametrize("answers", ALL_ANSWERS, ids=lambda answers: "-".join(answers.values()))
def test_answers_choose_files_and_pages(answers):
    """What the hook does for each combination of answers, without a bake."""
    hook = load_hook("post", **answers, _template="gh:me/copy", _commit=COMMIT)
    files, workload = expected_files(**answers) | {"config.yaml"}, answers["workload"]
    for name, is_wanted in {  # `expected_files` asks the hook itself
        "fastgpu/feed/loader.py": answers["engine"] == "copy",
        "fastgpu/images/augment.py": answers["engine"] == "copy" and workload in ("images", "both"),
        "launch/slurm.sh": answers["launch"] in ("slurm", "both"),
        "launch/kubernetes.yaml": answers["launch"] in ("kubernetes", "both"),
        "docs/clusters.md": True,
        "docs/examples/gan.diff": answers["examples"] == "yes",
        "workloads/images.py": workload in ("images", "both"),
        "workloads/recsys.py": workload in ("recsys", "both"),
        "convert.py": True,
    }.items():
        assert (name in files) == is_wanted, name
    pages = {name: hook["edit_page"]((PROJECT / name).read_text(), name) for name in PAGES if name in files}
    # Pages name files of the package as they name those of a copy.
    of_package = {name for name in project_files() if name.startswith("fastgpu/")}
    check_links(pages, files | (of_package if answers["engine"] == "package" else set()))


@pytest.mark.parametrize("answers", BAKES, ids=lambda answers: "-".join(answers.values()))
def test_bake_has_what_was_asked_for(baked, answers):
    project = baked(**answers)
    workload = answers["workload"]
    license = answers.get("license", "MIT")
    assert files_below(project) == expected_files(**answers)
    assert all(any(path.iterdir()) for path in project.rglob("*") if path.is_dir())
    meta = parse_files(project)["project"]
    (needed,) = re.findall("(?m)^fastgpu-engine(.*) @ file:", "\n".join(meta["dependencies"])) or [None]
    assert (needed is None) == (answers["engine"] == "copy")
    brings_images = needed == "[images]" or any(name.startswith("pillow") for name in meta["dependencies"])
    assert brings_images == (workload in ("images", "both"))
    assert meta["license"] == license.replace("proprietary", "LicenseRef-Proprietary")
    text = (project / "LICENSE").read_text()
    assert [name for name in LICENSES.values() if name in text] == [LICENSES[license]]
    shipped = yaml.safe_load((project / "config.yaml").read_text())
    assert shipped["workload"] == {"recsys": "recsys", "own": "minimal"}.get(workload, "images")
    texts = {name: path.read_text() for name in files_below(project) if not is_binary(path := project / name)}
    assert [name for name, text in texts.items() if QUESTIONS["__template"] in text] == []
    (extras,) = re.findall(r'(?m)^pip install -c constraints.txt -e "\.\[(.*)\]"$', texts["README.md"])
    assert set(extras.split(",")) <= meta["optional-dependencies"].keys()
    if workload in WORDS_OF_THE_OTHER:
        pattern = re.compile(WORDS_OF_THE_OTHER[workload], re.IGNORECASE)
        own = texts.keys() - SPEAK_OF_BOTH
        assert {name: found for name in own if (found := pattern.findall(texts[name]))} == {}


OWNERS_CONFIG = """
workload: mine
run: {seed: 7}
data: {train: /nowhere/train.h5, val: /nowhere/val.h5, fields: {x: x, y: y}, batch_size: 48, tier: disk, echo: 2}
loader: {num_readers: 2}
model: {hidden_dim: 8}
optim: {lr: 0.01, weight_decay: 0.5}
train: {epochs: 3}
log: {every_steps: 7}
"""


def change(project: Path, workload: str) -> None:
    """Do what owners do: set other values, use other data, write a workload and a recipe, add a line to the program."""
    for name in ("config.yaml", "configs/mine.yaml"):
        (project / name).write_text(OWNERS_CONFIG)
    for name, after, line in (
        ("train.py", r"^import torch\n", "THE_OWNERS_LINE = True"),
        (f"workloads/{workload}.py", r"    class Options\(Section\):\n.*\n\n", "        owners_setting: int = 3"),
    ):
        path = project / name
        text, count = re.subn(after, rf"\g<0>{line}\n", path.read_text(), flags=re.MULTILINE)
        assert count == 1, path
        path.write_text(text)
    # A hasty person writes no docstrings, and reads a setting from the environment.
    minimal = re.sub(r'(?ms)^ *""".*?"""\n', "", (project / "workloads/minimal.py").read_text())
    (project / "workloads/mine.py").write_text(f'import os\n\n{minimal}\nDEBUG = os.environ.get("DEBUG")\n')


def test_bake_ignores_data_and_logs(own_copy):
    project = own_copy("both")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    for name in ("data/photos-train.h5", "mine.h5", "first-123.out"):
        (project / name).touch()
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    listed = subprocess.run(["git", "ls-files"], cwd=project, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in listed if name.endswith((".h5", ".out"))] == [
        "data/digits.h5",
        "data/interactions-train.h5",
        "data/interactions-val.h5",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["copy", "package"])
def test_bake_installs_no_modules(own_copy, tmp_path, engine):
    """So two projects in one environment cannot stand for one another: scripts import what is beside them."""
    project = own_copy("both", engine=engine)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheel"), ".")
    run_in(project, *build)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"cats-0.1.0.dist-info"}


COMMANDS_OF = {"images": {"images", "pixels"}, "recsys": {"events"}}
COMMANDS_OF |= {"both": COMMANDS_OF["images"] | COMMANDS_OF["recsys"], "own": set()}
SHARED_COMMANDS = {"arrays", "repack", "dataset", "info", "check"}


@pytest.mark.slow
@pytest.mark.parametrize("answers", GATED, ids=lambda answers: "-".join(answers.values()))
def test_bake_passes_its_own_gate(own_copy, python_with_engine, answers):
    """As its README says, but for the download: what is installed here already satisfies it."""
    project = own_copy(**answers)
    workload, has_copy = answers["workload"], answers["engine"] == "copy"
    python = sys.executable if has_copy else python_with_engine
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        run_in(project, "-m", *command, python=python)
    (install,) = re.findall(r"(?m)^pip (install .*)$", (project / "README.md").read_text())
    run_in(project, "-m", "pip", *shlex.split(install), "-q", "--dry-run")
    assert convert_commands(project, python) == SHARED_COMMANDS | COMMANDS_OF[workload if has_copy else "both"]
    if has_copy:  # convert.py needs no library of another workload
        paths = [path.relative_to(project).with_suffix("") for path in (project / "fastgpu/convert").rglob("[a-z]*.py")]
        code = f"import sys, {', '.join('.'.join(path.parts) for path in paths)}; print('PIL' in sys.modules)"
        assert run_in(project, "-c", code) == f"{workload in ('images', 'both')}\n"
    assert "epoch 1/1" in run_in(project, "train.py", "train.epochs=1", "run.name=a", python=python)
    data = {"recsys": "data/interactions-val.h5"}.get(workload, "data/digits.h5::/val")
    assert "row," in run_in(
        project.parent, str(project / "predict.py"), f"{project}/runs/a", f"{project}/{data}", python=python
    )
    run_pytest(project, python=python)
    if workload in WORDS_OF_THE_OTHER:
        change(project, workload)
        run_pytest(project, python=python)


@pytest.mark.slow
def test_bake_tests_find_a_leak(own_copy):
    """A few equal rows are no mistake, 6 % are, whatever their labels are."""
    project = own_copy("images")
    test = ("tests/test_data.py", "-k", "most_validation_rows")

    def leak(share: float) -> None:
        with h5py.File(project / "data/digits.h5", "r+") as file:
            n_rows = round(share * len(file["val/images"]))
            file["val/images"][-n_rows:] = file["train/images"][:n_rows]
            file["val/labels"][-n_rows:] = 0

    leak(0.03)
    run_pytest(project, *test)
    leak(0.06)
    done = run_to_end([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *test], project)
    assert done.returncode == 1
    assert "6 % of the validation rows are trained on, such as [334, 335, " in done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_bake_without_tools(own_copy):
    """As docs/code.md says. That no room and no tool imports another tool, test_imports.py shows."""
    project = own_copy("both")
    for tool in LEAF_ROOMS:
        shutil.rmtree(project / "fastgpu" / tool)
        (project / f"{tool}.py").unlink()
    run_in(project, "-m", "mypy")  # finds what is imported late, too
    assert "epoch 1/1" in run_in(project, "train.py", "train.epochs=1", "model.width=4", "run.name=first")
    assert (project / "runs/first/metrics.jsonl").exists()
    run_pytest(project)


@pytest.mark.nightly
@pytest.mark.slow
def test_clean_environment(own_copy):
    """The lines of README.md and those of the project's CI need nothing but Python and the lists of the project."""
    project = own_copy("images")
    text = (project / "README.md").read_text()
    (first,) = re.findall(r"(?ms)^## First run\n\n```bash\n(.*?)^```", text)
    (use,) = re.findall(r"(?ms)^## Use the model\n\n```bash\n(.*?)^```", text)
    (onnx,) = re.findall(r"(?m)^ONNX needs `(.*)`\.$", text)
    gates = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    lines = [line for line in first.splitlines() if "torchrun" not in line]
    lines += [*dict.fromkeys(gate["run"] for gate in gates["include"]), onnx]
    lines += [line for line in use.splitlines() if "new-photos" not in line]
    lines.append("python predict.py runs/NAME --export model.onnx")
    script = "\n".join(lines).replace("runs/NAME", "runs/*").replace("data/photos-test.h5", "data/digits.h5::/val")
    assert [script.count(name) for name in ("train.py", "predict.py", "pytest", "mypy")] == [1, 3, 1, 1]
    # Neither the packages of this environment nor the caches of a user.
    own = {"HOME": str(project), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != here)
    environment = os.environ | {"PATH": path} | own
    pipes = {"capture_output": True, "text": True, "timeout": 3000}
    done = subprocess.run(["bash", "-euc", script], cwd=project, env=environment, check=False, **pipes)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = done.stdout
    assert "epoch 20/20" in printed
    assert float(re.search(r"(?m)^top1_pct +([\d.]+)", printed)[1]) > 98
    assert all((project / name).stat().st_size > 10_000 for name in ("model.pt2", "model.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "score", "promised"),
    [("config.yaml", "val/top1_pct", 98.5), ("configs/recsys.yaml", "val/ndcg_at_100", 0.35)],
)
def test_shipped_scores(tmp_path, config, score, promised):
    """The pages round: 99 % and 0.36."""
    done = run_train("--config", config, f"run.folder={tmp_path}", "run.name=a", "dist.device=cpu", cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert max(point.get(score, 0) for point in metrics_of(tmp_path / "a")) >= promised


Git = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Git:
    """run(folder, *command) is what a program prints, away from the settings of this user."""
    settings = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(tmp_path)}
    settings["COOKIECUTTER_CONFIG"] = str(tmp_path / "cookiecutter.yaml")
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    return lambda folder, *command: printed_by(command, folder, **settings)


def commit(run: Git, folder: Path) -> None:
    run(folder, "git", "init", "-q", "-b", "main")  # once more does no harm
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "as it is")


def edit(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join([*lines, ""]))


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False], ids=["committed", "edited-first"])
def test_update_keeps_what_both_have_changed(template, tmp_path, run, is_known):
    """Lines that both have changed are marked in the file. If git does not know the file as it was baked, the user's
    stay, and those of the template are in a file beside it. All else is updated."""
    source = shutil.copytree(template, tmp_path / "template")
    commit(run, source)
    cruft = (sys.executable, "-m", "cruft")
    answers = '{"project_name": "Cat finder", "workload": "both"}'
    assert "Next:" in run(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
    project = tmp_path / "cat_finder"
    if is_known:
        commit(run, project)

    # The user edits, deletes and adds.
    edit(project / "train.py", 0, "# mine")
    edit(project / "config.yaml", 12, "# mine")
    edit(project / "README.md", -1, "mine")
    (project / ".github/workflows/ci.yml").unlink()
    (project / "workloads/mine.py").touch()
    commit(run, project)

    # The template edits the same line, two lines above the user, and what the user deleted; removes and adds.
    inside = source / FOLDER
    edit(inside / "train.py", 0, "# theirs")
    edit(inside / "config.yaml", 10, "# theirs")
    edit(inside / "README.md", 6, "theirs")
    edit(inside / ".github/workflows/ci.yml", 0, "name: theirs")
    (inside / "configs/celeba.yaml").unlink()
    (inside / "fastgpu/theirs.py").touch()
    (inside / "data/digits.h5").write_bytes(bytes(range(256)))
    commit(run, source)
    assert "Next:" not in run(project, *cruft, "update", "-y")

    text = (project / "train.py").read_text()
    assert ("<<<<<<< ours\n# mine\n=======\n# theirs\n>>>>>>> theirs\n" in text) == is_known
    assert text.startswith("# mine") != is_known
    if is_known:
        lines = (project / "config.yaml").read_text().splitlines()
        assert (lines[10], lines[12]) == ("# theirs", "# mine")
    rejected = set() if is_known else {"train.py.rej", "config.yaml.rej"}
    assert {path.name for path in project.rglob("*.rej")} == rejected
    lines = (project / "README.md").read_text().splitlines()
    assert [lines[0], lines[6], lines[-1]] == ["# Cat finder", "theirs", "mine"]
    assert (project / "data/digits.h5").read_bytes() == bytes(range(256))
    updated = {"fastgpu/theirs.py", "README.md", "configs/celeba.yaml", "data/digits.h5"}
    changed = set(re.findall(r"(?m)^.. (\S+)$", run(project, "git", "status", "--porcelain")))
    assert {name for name in changed if not re.search(r"train\.py|config\.yaml|cruft", name)} == updated
    commit(run, project)
    run(project, *cruft, "check")


@pytest.mark.nightly
@pytest.mark.slow
def test_update_of_the_engine_and_its_ways(template, tmp_path, run):
    """The commands of docs/engine.md: an update of the engine changes no file of a project with the package, which
    becomes one with a copy, and again one with the package. What its owner has changed stays."""
    source = shutil.copytree(template, tmp_path / "template")
    commit(run, source)
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    answers = '{"project_slug": "cats", "workload": "own", "engine": "package"}'
    run(tmp_path, sys.executable, "-m", "cruft", "create", str(source), "--no-input", "--extra-context", answers)
    project = tmp_path / "cats"
    commit(run, project)

    page = project / "docs/engine.md"
    version, update, to_package, to_copy = [block.text for block in read_blocks(page) if block.language == "bash"]
    programs = "".join(f'{name}() {{ "{environment}/bin/python" -m {name} "$@"; }}\n' for name in ("pip", "cruft"))
    offline = "export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1\n"
    prelude = f'{programs}{offline}python() {{ "{environment}/bin/python" "$@"; }}\n'

    def follow(text: str) -> set[str]:
        """Commands of the page. Returns the files that they change."""
        run(project, "bash", "-euc", prelude + text.replace("cruft update", "cruft update -y"))
        changed = set(re.findall(r"(?m)^.. (\S+)$", run(project, "git", "status", "--porcelain")))
        commit(run, project)
        return changed

    def place() -> list[str]:
        code = (
            "import fastgpu, importlib.metadata; print(fastgpu.__file__, importlib.metadata.version('fastgpu-engine'))"
        )
        return run(project, str(environment / "bin/python"), "-c", code).split()

    edit(source / FOLDER / "fastgpu/process/seeds.py", -1, "# theirs")
    commit(run, source)
    assert follow(update) == {".cruft.json"}
    head = run(source, "git", "rev-parse", "--short=10", "HEAD").strip()
    assert place() == [str(site / "fastgpu/__init__.py"), f"{TEMPLATE_VERSION}+g{head}"]
    assert (site / "fastgpu/process/seeds.py").read_text().endswith("# theirs\n")
    assert head in run(project, "bash", "-euc", prelude + version)

    engine = {name for name in expected_files("own") if name.startswith("fastgpu/")}
    assert {name for name in follow(to_copy) if name.startswith("fastgpu/")} == engine
    assert place()[0] == str(project / "fastgpu/__init__.py")
    edit(project / "fastgpu/process/seeds.py", -1, "# mine")
    commit(run, project)
    assert {name for name in follow(to_package) if name.startswith("fastgpu/")} == engine - {"fastgpu/process/seeds.py"}
    assert place()[0] == str(site / "fastgpu/__init__.py")
    assert files_below(project / "fastgpu") == {"process/seeds.py"}
