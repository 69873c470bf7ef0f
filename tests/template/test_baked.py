"""Projects as users have them: pruned to one workload, changed by their owners, without a room that nobody needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from template import ALL_FILES, ROOT, WORKLOAD_ANSWERS, WORKLOADS
from test_template import expected, files, parses

OTHER = {"images": "recsys", "recsys": "images"}
WORDS_OF = {
    "images": r"cifar|celeba|\bdigits\b|\bPIL\b|pillow|image_files|mixup|cutout",
    "recsys": r"recsys|recommender|movielens|mult-?(vae|dae)|autoencoder|\bndcg|interactions",
}
"""What only the files of one workload speak of."""
SPEAK_OF_BOTH = {
    "constraints.txt",
    "convert.py",  # one command line, of which it shows the commands whose rooms are there
}


def run_in(project: Path, command: Iterable[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` or a script of the project; its output is shown if it fails."""
    caches = {"MYPY_CACHE_DIR": str(ROOT / ".cache/mypy-baked"), "RUFF_NO_CACHE": "true"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | caches | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def run_pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the fast tests of a project."""
    return run_in(project, ["-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments])


BAKES = [
    *({"workload": answer, "launch": "both"} for answer in WORKLOAD_ANSWERS),
    {"workload": "images", "tools": "none", "launch": "none"},
    {"workload": "recsys", "tools": "none", "launch": "slurm"},
    {"workload": "both", "tools": "none", "launch": "both"},
    {"workload": "own", "tools": "all", "launch": "kubernetes"},
    {"workload": "own", "tools": "none", "launch": "none"},
]
each_bake = pytest.mark.parametrize("answers", BAKES, ids=lambda answers: "-".join(answers.values()))


# ---------------------------------------------------------------------------------------------- files


@each_bake
def test_a_project_has_what_was_asked_for_and_its_pages_name_nothing_else(baked, answers):
    project = baked(**answers)
    workload = answers["workload"]
    assert files(project) == expected(**answers)
    given = ALL_FILES | answers
    for name, is_wanted in {  # `expected` asks the hook itself
        "convert.py": given["tools"] == "all",
        "launch/slurm.sh": given["launch"] in ("slurm", "both"),
        "launch/kubernetes.yaml": given["launch"] in ("kubernetes", "both"),
        "workloads/images.py": workload in ("images", "both"),
        "workloads/recsys.py": workload in ("recsys", "both"),
    }.items():
        assert (project / name).exists() == is_wanted, name
    assert all(any(path.iterdir()) for path in project.rglob("*") if path.is_dir())
    assert missing_modules(project) == set()
    needed = parses(project)["project"]["dependencies"]
    assert any(name.startswith("pillow") for name in needed) == (workload in ("images", "both"))
    shipped = yaml.safe_load((project / "config.yaml").read_text())
    assert shipped["workload"] == {"recsys": "recsys", "own": "minimal"}.get(workload, "images")
    for page in project.rglob("*.md"):
        text = page.read_text()
        assert "\n\n\n" not in re.sub(r"(?ms)^```.*?^```$", "block", text), page
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page
        if answers.get("tools") == "none":
            assert not re.search(r"\b(convert|diagnose|predict)\.py|python report\.py", text), page


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_project_does_not_speak_of_the_other_workload(baked, workload):
    project = baked(workload)
    pattern = re.compile(WORDS_OF[OTHER[workload]], re.IGNORECASE)
    found = {}
    for name in files(project) - SPEAK_OF_BOTH:
        if Path(name).suffix not in (".h5", ".png"):
            words = {match[0] for match in pattern.finditer((project / name).read_text())}
            if words:
                found[name] = words
    assert found == {}


def missing_modules(project: Path) -> set[str]:
    """Modules of the project that are imported and not there."""
    missing = set()
    for path in project.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fastgpu.", "workloads.")):
                module = (node.module or "").replace(".", "/")
                if not (project / f"{module}.py").exists() and not (project / module).is_dir():
                    missing.add(f"{path.relative_to(project)}: {node.module}")
                for alias in node.names:
                    room = project / module
                    if not room.is_dir() or alias.name in (room / "__init__.py").read_text():
                        continue
                    if not (room / f"{alias.name}.py").exists():
                        missing.add(f"{path.relative_to(project)}: {node.module}.{alias.name}")
    return missing


# ---------------------------------------------------------------------------------------------- as it is

CONVERT_COMMANDS = {"images": {"images", "pixels"}, "recsys": {"events"}}
SHARED_COMMANDS = {"arrays", "repack", "dataset", "info", "check"}


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_convert_has_the_commands_of_the_workload_and_needs_no_library_of_another(baked, workload):
    project = baked(workload)
    shown = run_in(project, ["convert.py", "--help"]).stdout
    listed = set(re.findall(r"(?m)^    (\w+)(?: |$)", shown.split("COMMAND\n")[-1]))
    assert listed == SHARED_COMMANDS | CONVERT_COMMANDS[workload]
    paths = [path.relative_to(project).with_suffix("") for path in (project / "fastgpu/convert").rglob("[a-z]*.py")]
    code = f"import sys, {', '.join('.'.join(path.parts) for path in paths)}; print('PIL' in sys.modules)"
    assert run_in(project, ["-c", code]).stdout == f"{workload == 'images'}\n"


@pytest.mark.slow
@each_bake
def test_a_project_installs_is_clean_trains_and_passes_its_tests(own_copy, answers):
    """As its README says, but for the download: what is installed here already satisfies it."""
    project = own_copy(**answers)
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        run_in(project, ["-m", *command])
    run_in(project, ["-m", "pip", "install", "-q", "--dry-run", "-c", "constraints.txt", "-e", ".[dev,convert]"])
    assert "epoch 1/1" in run_in(project, ["train.py", "train.epochs=1"]).stdout
    run_pytest(project)


# ---------------------------------------------------------------------------------------------- changed by its owner


def replace(path: Path, pattern: str, replacement: str) -> None:
    """Replace the one place where a pattern matches."""
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{path}: {pattern} occurs {count} times"
    path.write_text(text)


def change(project: Path, workload: str) -> None:
    """Do what owners do: set other values, use other data, write a workload and a recipe, add a line to the program."""
    config = project / "config.yaml"
    values = {
        "workload": "mine",
        "seed": "7",
        "train": "/nowhere/train.h5",
        "val": "/nowhere/val.h5",
        "fields": "{x: x, y: y}",
        "batch_size": "48",
        "tier": "disk",
        "echo": "2",
        "num_readers": "2",
        "lr": "1e-2",
        "weight_decay": "0.5",
        "epochs": "3",
        "every_steps": "7",
    }
    if workload == "recsys":
        values["val_fields"] = "{}"
    for key, value in values.items():
        replace(config, rf"^( *{key}:) (?=\S)(?:{{.*?}}|[^#\s]+)", rf"\1 {value}")
    replace(config, r"(?s)^model:.*?(?=^optim:)", "model: {hidden_dim: 8}\n")
    replace(project / "train.py", r"^import torch$", "import torch\n\nTHE_OWNERS_LINE = True")
    options = r"\1        owners_setting: int = 3\n"
    replace(project / "workloads" / f"{workload}.py", r"(    class Options\(Section\):\n.*\n\n)", options)
    shutil.copy(config, project / "configs/mine.yaml")
    minimal = (project / "workloads/minimal.py").read_text()
    (project / "workloads/mine.py").write_text(workload_without_docstrings(minimal))


def workload_without_docstrings(source: str) -> str:
    """The minimal workload as a hasty person writes it: no docstrings, a setting from the environment."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not is_text(line)] or [ast.Pass()]
    return "import os\n\n" + ast.unparse(tree) + '\n\nDEBUG = os.environ.get("DEBUG")\n'


def is_text(line: ast.stmt) -> bool:
    """Whether a statement is only a string, such as a docstring."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_tests_of_a_project_pass_whatever_its_owner_changes(own_copy, workload):
    """The whole fast suite, in a project of one workload."""
    project = own_copy(workload)
    change(project, workload)
    run_pytest(project)


@pytest.mark.slow
def test_each_tool_goes_with_one_folder_and_one_script(own_copy):
    """One by one and together, as docs/code.md says: the tests are collected, and at last the project trains."""
    whole = own_copy("both")
    tools = ["convert", "diagnose", "predict", "report"]
    for deleted in (*([tool] for tool in tools), tools):
        project = shutil.copytree(whole, whole.with_name("-".join(deleted)))
        for tool in deleted:
            shutil.rmtree(project / "fastgpu" / tool)
            (project / f"{tool}.py").unlink()
        assert missing_modules(project) == set()
        run_pytest(project, "--collect-only", "-q")
    assert "epoch 1/1" in run_in(project, ["train.py", "train.epochs=1", "model.width=4", "run.name=first"]).stdout
    assert (project / "runs/first/metrics.jsonl").exists()
    run_pytest(project)
