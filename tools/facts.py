"""Facts about the template that its tools and tests share."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
PROJECT = ROOT / FOLDER
LEAF_ROOMS = ("convert", "diagnose", "predict", "report")
"""Rooms of fastgpu/ that a user may delete together with their script and their tests."""

sys.path.insert(0, str(PROJECT))  # the tools import the project from this folder


def tracked() -> list[str]:
    """The files that a clone of this repository has, including new files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in output.split("\0") if name and (ROOT / name).exists())


def project_files() -> list[str]:
    """The tracked files of the project, relative to its folder."""
    return [name.removeprefix(f"{FOLDER}/") for name in tracked() if name.startswith(f"{FOLDER}/")]


def hook_constant(name: str) -> Any:
    """The value of a constant in hooks/post_gen_project.py, which cannot be imported before it is rendered."""
    for node in ast.parse((ROOT / "hooks/post_gen_project.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise KeyError(name)


KEEP: dict[str, dict[str, list[str]]] = {
    path: questions for questions, paths in hook_constant("KEEP") for path in paths.split()
}
"""{path in a project: {question: answers that keep it}}."""
QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())
WORKLOADS = ("images", "recsys")
WORKLOAD_ANSWERS: list[str] = QUESTIONS["workload"]
ALL_FILES = {"engine": "copy", "launch": "both", "examples": "yes"}
"""The answers that keep all files, except files of other workloads."""


def is_inside(path: str, kept: str) -> bool:
    """Whether a file or folder is a path of KEEP, or is inside one."""
    return path.rstrip("/") == kept or path.startswith(f"{kept}/")


def removed_files(workload: str, **answers: str) -> set[str]:
    """The files that a project with these answers does not have. Other answers keep all files."""
    given = ALL_FILES | {"workload": workload} | answers
    gone = [path for path, wanted in KEEP.items() if any(given[name] not in wanted[name] for name in wanted)]
    names = {name for name in project_files() if any(is_inside(name, path) for path in gone)}
    return names | {name for name in project_files() if re.fullmatch(r"config\.\w+\.yaml", name)}
