"""Projects that are baked from the template, and the code that pages and examples put into them."""

import ast
import functools
import re
import shutil
import sys
import tomllib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import h5py
import numpy as np
import yaml
from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import generate_context
from cookiecutter.main import cookiecutter
from cookiecutter.prompt import prompt_for_config

from support import PROJECT, ROOT
from support.ranks import printed_by
from tools.facts import ALL_FILES, QUESTIONS, project_files, removed_files, tracked

EXAMPLES = PROJECT / "docs/examples"


# ---------------------------------------------------------------------------------------------- baking


def copy_template(folder: Path) -> Path:
    """Copy the files that a clone of the template has. Returns the folder."""
    for name in tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def bake_all_files(folder: Path, template: Path, workload: str, **answers: str) -> Path:
    """Make a project in folder/out that has all files, unless the answers say otherwise. Returns its folder."""
    given = {"project_slug": "cats", "license": "MIT", "workload": workload} | ALL_FILES | answers
    return bake_project(folder, template, **given)


def bake_project(folder: Path, template: Path, **answers: str) -> Path:
    """Make a project in folder/out. Returns its folder. Raises FailedHookException if the answers are refused."""
    # Cookiecutter runs in this process, away from the settings of this user.
    settings = folder / "cookiecutter.yaml"
    settings.write_text(f"cookiecutters_dir: {folder}/c\nreplay_dir: {folder}/r\n")
    output = folder / "out"
    output.mkdir(exist_ok=True)
    where = {"output_dir": str(output), "config_file": str(settings)}
    return Path(cookiecutter(str(template), no_input=True, extra_context=as_typed(answers), **where))


def as_typed(answers: dict[str, str]) -> dict[str, str]:
    """Answers that cookiecutter does not render, as it renders none that a person types."""
    is_choice = {name: isinstance(QUESTIONS[name], list) for name in answers}
    return {name: text if is_choice[name] else f"{{% raw %}}{text}{{% endraw %}}" for name, text in answers.items()}


def resolve(answers: dict[str, str]) -> dict[str, object]:
    """All variables as cookiecutter holds them once a person has given these answers."""
    context = generate_context(str(ROOT / "cookiecutter.json"), extra_context=as_typed(answers))
    return prompt_for_config(context, no_input=True)


def render(path: Path, **variables: object) -> str:
    """A file of the template as cookiecutter renders it. variables: answers, and what it adds, such as `_template`."""
    answers = {key: str(value) for key, value in variables.items() if key in QUESTIONS}
    template = StrictEnvironment(context={}).from_string(path.read_text())
    return template.render(cookiecutter=resolve(answers) | variables)


def load_hook(name: str, **variables: object) -> dict[str, Any]:
    """The names that hooks/NAME_gen_project.py defines, rendered but not run as a script."""
    names: dict[str, Any] = {"__name__": name}
    exec(render(ROOT / f"hooks/{name}_gen_project.py", **variables), names)
    return names


# ---------------------------------------------------------------------------------------------- what was baked


def files_below(folder: Path) -> set[str]:
    """The files in a folder, by their paths in it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def expected_files(workload: str = "images", **answers: str) -> set[str]:
    """The files that a project with these answers should have."""
    return set(project_files()) - removed_files(workload, **{"launch": "none", "examples": "no"} | answers)


def parse_files(project: Path) -> dict[str, Any]:
    """Check that every file is well formed, without the template's language. Returns pyproject.toml."""
    for name in files_below(project):
        path = project / name
        if path.suffix == ".py":
            ast.parse(path.read_text())
            assert path.read_bytes() == (PROJECT / name).read_bytes(), f"{name} is not its source"
        elif path.suffix in (".yaml", ".yml"):
            assert list(yaml.safe_load_all(path.read_text()))
        if name in ("LICENSE", "pyproject.toml"):
            assert not re.search(r"cookiecutter\.|{[{%#]|[}%#]}", path.read_text())
        if path.suffix == ".md":
            found = re.search(r"<!-- (only|end|numbers)|\n\n\n#|\n\n\Z", path.read_text())
            assert not found, f"{name} has sections or gaps"
    return tomllib.loads((project / "pyproject.toml").read_text())


def run_in(project: Path, *command: str, python: str | Path = sys.executable) -> str:
    """What `python -m ...` or a script of the project prints; it must succeed."""
    caches = {"MYPY_CACHE_DIR": str(ROOT / ".cache/mypy-baked"), "RUFF_NO_CACHE": "true"}
    return printed_by([python, *command], project, **caches, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")


@functools.cache
def convert_commands(project: Path, python: str | Path = sys.executable) -> set[str]:
    """The sub-commands of convert.py."""
    shown = printed_by([python, "convert.py", "--help"], project)
    return set(re.findall(r"(?m)^  (\w+) ", shown.split("\ncommands:\n")[1].split("\n\n")[0]))


# ---------------------------------------------------------------------------------------------- pages and examples


class Block(NamedTuple):
    """A fenced block of a page. reason: why it is not run; target: the file that it is; both may be empty."""

    reason: str
    language: str
    text: str
    target: str


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    pattern = r"(?ms)^(?:<!-- not run: ([^>]+?) -->\n)?```(\w*)\n((?:# ([\w./-]+\.(?:py|yaml))\n)?.*?)^```$"
    return [Block(*found) for found in re.findall(pattern, page.read_text())]


def take_example(project: Path, name: str) -> None:
    """Copy the workload and the config of an example into a project."""
    for path in EXAMPLES.glob(f"{name}.*"):
        shutil.copyfile(path, project / {".py": "workloads", ".yaml": "configs"}.get(path.suffix, "") / path.name)


def write_text(project: Path) -> None:
    """The text of the example gpt, in a project: 150 KB of it, as bytes."""
    with h5py.File(project / "data/text.h5", "w") as file:
        file["tokens"] = np.frombuffer("\n".join(topics.values()).encode()[:150_000], np.uint8)


def draw_series(project: Path) -> None:
    """Run the script of the example forecast in a project."""
    (block,) = [block for block in read_blocks(EXAMPLES / "README.md") if block.target == "draw_series.py"]
    (project / block.target).write_text(block.text)
    run_in(project, block.target)


def make_events(project: Path, name: str) -> None:
    """Make and convert the events of an example, by the commands in the head of its recipe."""
    head = (EXAMPLES / f"{name}.yaml").read_text()
    run_in(project, str(EXAMPLES / "made_up_events.py"))
    (command,) = re.findall(r"(?m)^#.*? python (convert\.py .*)$", head)
    run_in(project, *command.split())


def use_diff(program: str, diff: str) -> str:
    """A program with the changes of a diff of docs/code.md, which has the lines around a change, but no places."""
    lines = program.splitlines()
    at = 0
    for line in diff.splitlines():
        kind, text = line[0], line[1:]
        if kind == "+":
            lines.insert(at, text)
            at += 1
        else:
            at = lines.index(text, at)
            if kind == "-":
                del lines[at]
            else:
                at += 1
    return "\n".join([*lines, ""])


def section_of_code_page(heading: str) -> list[str]:
    """The fenced blocks of a section of docs/code.md."""
    page = (PROJECT / "docs/code.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)


def use_loader(project: Path, heading: str, module: str, name: str) -> None:
    """Put a loader of docs/code.md into a project: the class `name` in a file, and a function of train.py."""
    loader, build = section_of_code_page(heading)[:2]
    assert loader.startswith(f"# {module}.py\n")
    (project / f"{module}.py").write_text(loader)
    program = (project / "train.py").read_text()
    changed = re.sub(r"def build_loaders\(.*?(?=\n\n\n)", lambda _: build.rstrip(), program, flags=re.DOTALL)
    assert changed != program
    line = "from fastgpu.telemetry import Clock, Monitor, TensorBoard\n"
    unused = "from fastgpu.rows import BlockSampler, Rows, Shard\n"
    assert line in changed
    assert unused in changed
    changed = changed.replace(unused, "from fastgpu.rows import Rows\n")
    (project / "train.py").write_text(changed.replace(line, f"{line}from {module} import {name}\n"))
