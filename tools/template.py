"""Facts about the template that its tools and tests share."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
PROJECT = ROOT / FOLDER
LEAF_ROOMS = ("convert", "diagnose", "predict")
"""Rooms of fastgpu/ that a user may delete together with their script and their tests."""

sys.path.insert(0, str(PROJECT))  # the tools import the project as it lies here


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


ONLY_FOR: dict[str, list[str]] = hook_constant("ONLY_FOR")
"""{workload: files of a project that are deleted unless this workload was chosen}."""
WORKLOAD_ANSWERS = (*ONLY_FOR, "both")


def removed_files(answer: str) -> set[str]:
    """The files that a project with this answer to the question `workload` does not have."""
    if answer == "both":
        return {"config.recsys.yaml"}
    names = {name for workload, names in ONLY_FOR.items() if workload != answer for name in names}
    return names | {"config.recsys.yaml"}


def condition_of(path: str) -> str:
    """The Jinja expression under which a project has a file or folder; empty if every project has it."""
    members = {name for name in project_files() if name == path or (path.endswith("/") and name.startswith(path))}
    for workload, names in ONLY_FOR.items():
        if members and members <= {*names}:
            return f'cookiecutter.workload in ("{workload}", "both")'
    return ""
