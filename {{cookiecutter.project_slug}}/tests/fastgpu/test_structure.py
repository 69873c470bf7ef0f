"""Rules that keep the project small and its modules apart."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

from fastgpu.process import config

MODULES = sorted((ROOT / "fastgpu").glob("*.py"))
SOURCES = [
    ROOT / "train.py",
    ROOT / "diagnose.py",
    ROOT / "convert.py",
    *MODULES,
    *sorted((ROOT / "workloads").glob("*.py")),
]

FLOORS = [  # a module imports only from floors below its own
    {"launch", "rows", "order", "clock", "monitor", "codecs", "durable", "augment", "bottleneck", "plot"},
    {"apex", "ranking", "diagnosis"},
    {"config", "dist", "layout", "arrays", "pictures", "auto", "checkpoint", "runs", "optim", "echo", "report"},
    {"store", "prefetch", "dataset", "writer", "survey", "published", "movielens", "interactions", "log"},
    {"feed", "synthetic", "sources", "preflight"},
    {"evaluate", "ceilings", "tune"},
]


def imports(path: Path) -> set[str]:
    """Names of the project's modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastgpu."):
            found.add((node.module or "").removeprefix("fastgpu."))
    return found


def test_modules_import_only_from_lower_floors():
    floor = {module: number for number, modules in enumerate(FLOORS) for module in modules}
    for path in MODULES:
        if path.stem == "__init__":
            continue
        for imported in imports(path):
            assert floor[imported] < floor[path.stem], f"{path.stem} imports {imported}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_environment_is_read_in_one_place_and_nothing_is_unpickled(path):
    text = path.read_text()
    if path.stem != "launch":
        assert not re.search(r"environ|getenv", text)
    if path.stem != "published":  # whose unpickler knows arrays only
        assert not re.search(r"\b(import|from) +(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)\b", text)
    assert not re.search(r"pickle\.loads?\(|weights_only=False|yaml\.load\((?!text, _Loader)|{[%{]", text)


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "workloads").glob("*.py"))], ids=lambda path: path.stem)
def test_only_the_scripts_see_the_config(path):
    if path.stem != "config":
        assert "config" not in imports(path)


def test_the_story_is_short():
    assert 90 <= len((ROOT / "train.py").read_text().splitlines()) <= 150


def test_public_names_are_explained():
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in SECTIONS:
                assert ast.get_docstring(node), f"{path.stem}.{node.name}"
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "train":
                assert ast.get_docstring(node), f"{path.stem}.{node.name}"


SECTIONS = {name for name, kind in vars(config).items() if isinstance(kind, type) and issubclass(kind, config.Section)}


def test_config_and_launch_import_no_torch():
    code = "import sys; from fastgpu.config import load_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
