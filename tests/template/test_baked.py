"""Projects as users have them: of one workload, changed by their owners, without tools, clean, and updated by cruft."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
import yaml
from cookiecutter.environment import StrictEnvironment
from template import FOLDER, LEAF_ROOMS, PROJECT, WORKLOAD_ANSWERS

from support import ROOT
from support.projects import convert_commands, expected_files, files_below, parse_files, resolve, run_in
from support.ranks import printed_by, run_to_end, run_train
from support.runs import metrics_of

WORDS_OF_THE_OTHER = {
    "recsys": r"cifar|celeba|\bdigits\b|\bPIL\b|pillow|image_files|mixup|cutout",
    "images": r"recsys|recommender|movielens|mult-?(vae|dae)|autoencoder|\bndcg|interactions",
}
"""{workload: what only the files of the other one speak of}"""
SPEAK_OF_BOTH = {"constraints.txt", "convert.py", "tests/conftest.py"}
"""convert.py is one command line, of which it shows the commands whose rooms are there. The tests make rows up."""


def run_pytest(project: Path, *arguments: str) -> None:
    """Run the fast tests of a project."""
    run_in(project, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments)


BAKES = [
    *({"workload": answer, "launch": "both"} for answer in WORKLOAD_ANSWERS),
    {"workload": "images", "tools": "none", "launch": "none", "license": "BSD-3-Clause"},
    {"workload": "recsys", "tools": "none", "launch": "slurm", "license": "Apache-2.0"},
    {"workload": "both", "tools": "none", "launch": "both", "license": "proprietary"},
    {"workload": "own", "tools": "all", "launch": "kubernetes"},
    {"workload": "own", "tools": "none", "launch": "none"},
]
GATED = {"workload": "images", "launch": "both"}
"""The one that passes its own gate not only at night."""
LICENSES = {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License", "Apache-2.0": "Apache License"}
LICENSES |= {"proprietary": "All rights reserved"}


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
def test_bake_links_to_its_template(tmp_path, given, address):
    """Or, made from a folder, to none."""
    project = shutil.copytree(PROJECT, tmp_path / "cats", ignore=shutil.ignore_patterns("data", ".*_cache"))
    hook = (ROOT / "hooks/post_gen_project.py").read_text()
    variables = resolve({"project_slug": "cats", "tools": "all"}) | {"_template": given}
    (tmp_path / "hook.py").write_text(StrictEnvironment(context={}).from_string(hook).render(cookiecutter=variables))
    printed_by([sys.executable, tmp_path / "hook.py"], project)
    pages = [path.read_text() for path in (project / "docs").rglob("*.md")]
    links = {link for text in pages for link in re.findall(r"\[(?:the template|템플릿)\]\(([^)]*)\)", text)}
    assert links == ({address} if address else set())
    assert ("[project.urls]" in (project / "pyproject.toml").read_text()) == bool(address)
    texts = "".join([*pages, (project / "pyproject.toml").read_text()])
    assert "org/fastgpu-template" not in texts
    assert "secret" not in texts
    assert f"cookiecutter --no-input {address or 'path/to/fastgpu-template'} &&" in texts


@pytest.mark.parametrize("answers", BAKES, ids=lambda answers: "-".join(answers.values()))
def test_bake_has_what_was_asked_for(baked, answers):
    project = baked(**answers)
    workload = answers["workload"]
    license = answers.get("license", "MIT")
    assert files_below(project) == expected_files(**answers)
    for name, is_wanted in {  # `expected_files` asks the hook itself
        "convert.py": answers.get("tools") != "none",
        "launch/slurm.sh": answers["launch"] in ("slurm", "both"),
        "launch/kubernetes.yaml": answers["launch"] in ("kubernetes", "both"),
        "workloads/images.py": workload in ("images", "both"),
        "workloads/recsys.py": workload in ("recsys", "both"),
    }.items():
        assert (project / name).exists() == is_wanted
    assert all(any(path.iterdir()) for path in project.rglob("*") if path.is_dir())
    meta = parse_files(project)["project"]
    assert any(name.startswith("pillow") for name in meta["dependencies"]) == (workload in ("images", "both"))
    assert meta["license"] == license.replace("proprietary", "LicenseRef-Proprietary")
    text = (project / "LICENSE").read_text()
    assert [name for name in LICENSES.values() if name in text] == [LICENSES[license]]
    shipped = yaml.safe_load((project / "config.yaml").read_text())
    assert shipped["workload"] == {"recsys": "recsys", "own": "minimal"}.get(workload, "images")
    for page in project.rglob("*.md"):
        text = page.read_text()
        assert "\n\n\n" not in re.sub(r"(?ms)^```.*?^```$", "block", text), page
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page
        paths = re.findall(r"`((?:launch|configs|docs|fastgpu|tests)/[\w./-]+\.\w+)`(?! of the template)", text)
        paths = [path for path in paths if path not in ("configs/mine.yaml", "fastgpu/theirs.py")]
        assert [path for path in paths if not (project / path).exists()] == [], page
        if answers.get("tools") == "none":
            assert not re.search(r"\b(convert|diagnose|predict)\.py|python report\.py", text), page
    texts = {name: path.read_text() for name in files_below(project) if not is_binary(path := project / name)}
    assert [name for name, text in texts.items() if "org/fastgpu-template" in text] == []
    (extras,) = re.findall(r'(?m)^pip install -c constraints.txt -e "\.\[(.*)\]"$', texts["README.md"])
    assert set(extras.split(",")) <= meta["optional-dependencies"].keys()
    if answers.get("tools") == "none":
        assert not meta["optional-dependencies"].keys() & {"convert", "export"}
        assert [name for name, text in texts.items() if "dev,convert" in text] == []
        recipes = [text for name, text in texts.items() if name.startswith("configs/") and "convert.py" in text]
        assert all("This project has no convert.py." in text for text in recipes)
    if workload in WORDS_OF_THE_OTHER:
        pattern = re.compile(WORDS_OF_THE_OTHER[workload], re.IGNORECASE)
        texts = [name for name in files_below(project) - SPEAK_OF_BOTH if Path(name).suffix not in (".h5", ".png")]
        assert {name: found for name in texts if (found := pattern.findall((project / name).read_text()))} == {}


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
@pytest.mark.nightly
def test_bake_installed_is_imported_from_any_folder(own_copy, tmp_path):
    project = own_copy("own")
    (project / "mine.py").write_text("import workloads.minimal\n")
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # behind its own
    printed_by([tmp_path / "venv/bin/pip", "install", "-q", "--no-deps", "-e", project], tmp_path)
    code = "import fastgpu.feed, mine; print(fastgpu.__file__)"
    assert str(project) in printed_by([tmp_path / "venv/bin/python", "-c", code], tmp_path)


@pytest.mark.slow
def test_bake_wheel_has_all_rooms(own_copy, tmp_path):
    """`pip install .` installs every file of the engine and of the workloads, and each room is imported from there."""
    project = own_copy("both")
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheel"), ".")
    run_in(project, *build)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    folders = ("fastgpu", "workloads")
    found = {name for name in files_below(tmp_path / "site") if name.startswith(folders)}
    assert found == {name for name in expected_files("both", "both") if name.startswith(folders)}
    rooms = sorted(path.parent for path in (tmp_path / "site/fastgpu").rglob("__init__.py"))
    names = [".".join(path.relative_to(tmp_path / "site").parts) for path in rooms]
    code = f"import {', '.join(names)}, workloads.images; print(fastgpu.feed.__file__)"
    printed = printed_by([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert printed.startswith(str(tmp_path / "site"))


COMMANDS_OF = {"images": {"images", "pixels"}, "recsys": {"events"}}
COMMANDS_OF |= {"both": COMMANDS_OF["images"] | COMMANDS_OF["recsys"], "own": set()}
SHARED_COMMANDS = {"arrays", "repack", "dataset", "info", "check"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers",
    [pytest.param(each, marks=() if each == GATED else pytest.mark.nightly) for each in BAKES],
    ids=lambda answers: "-".join(answers.values()),
)
def test_bake_passes_its_own_gate(own_copy, answers):
    """As its README says, but for the download: what is installed here already satisfies it."""
    project = own_copy(**answers)
    workload = answers["workload"]
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        run_in(project, "-m", *command)
    (install,) = re.findall(r"(?m)^pip (install .*)$", (project / "README.md").read_text())
    run_in(project, "-m", "pip", *shlex.split(install), "-q", "--dry-run")
    if (project / "convert.py").exists():  # it needs no library of another workload
        assert convert_commands(project) == SHARED_COMMANDS | COMMANDS_OF[workload]
        paths = [path.relative_to(project).with_suffix("") for path in (project / "fastgpu/convert").rglob("[a-z]*.py")]
        code = f"import sys, {', '.join('.'.join(path.parts) for path in paths)}; print('PIL' in sys.modules)"
        assert run_in(project, "-c", code) == f"{workload in ('images', 'both')}\n"
    assert "epoch 1/1" in run_in(project, "train.py", "train.epochs=1")
    run_pytest(project)
    if workload in WORDS_OF_THE_OTHER:
        change(project, workload)
        run_pytest(project)


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
    """As docs/code.md says. That no room and no tool imports another tool, test_style.py shows."""
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
    edit(inside / "README.md", 2, "theirs")
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
    assert [*lines[::2][:2], lines[-1]] == ["# Cat finder", "theirs", "mine"]
    assert (project / "data/digits.h5").read_bytes() == bytes(range(256))
    updated = {"fastgpu/theirs.py", "README.md", "configs/celeba.yaml", "data/digits.h5"}
    changed = set(re.findall(r"(?m)^.. (\S+)$", run(project, "git", "status", "--porcelain")))
    assert {name for name in changed if not re.search(r"train\.py|config\.yaml|cruft", name)} == updated
    commit(run, project)
    run(project, *cruft, "check")
