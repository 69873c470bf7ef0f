"""The public names of the engine: those in `__all__` of its modules. A project, the examples and the pages use no other
name of it, so a release may change the rest without a word.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from support import PROJECT, ROOT
from support.projects import read_blocks
from tools.facts import project_files, tracked

PAGES = [name for name in tracked() if name.endswith(".md") and not re.match("bench/results/|tests/|CHANGELOG", name)]
MODULES = {
    re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): (PROJECT / name).read_text()
    for name in project_files()
    if re.match(r"fastgpu/.*\.py$", name)
}
"""{name of a module of the engine: what it holds}."""
PUBLIC = {name: import_module(name) for name, source in MODULES.items() if re.search("(?m)^__all__ = ", source)}
"""{name: a module that has public names}."""
RETURNED = {"fastgpu.predict.model.Trained"}
"""Public classes that nobody imports: what public functions return."""


def names_used(source: str) -> set[str]:
    """The full names of the engine that a program imports, or uses as attributes of a module that it imports."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"fastgpu(\.|$)", node.module or ""):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES:
                    modules[alias.asname or alias.name] = full
                else:
                    found.add(full)
        elif isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("fastgpu")], ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add(f"{modules[node.value.id]}.{node.attr}")
    return found


def used_by_people() -> dict[str, str]:
    """{full name of the engine: a file or page that uses it}, of projects, examples and pages."""
    programs = [PROJECT / name for name in project_files() if re.match(r"(?!fastgpu/).*\.py$", name)]
    texts = {path: path.read_text() for path in programs}
    found = {name: path.name for path, text in texts.items() for name in names_used(text)}
    for page in PAGES:
        blocks = "\n".join(block.text for block in read_blocks(ROOT / page) if block.language == "python")
        words = re.findall(r"(?<=[=`\"])(fastgpu[\w.]+):(\w+)", (ROOT / page).read_text())  # data.dataset=module:Class
        found |= dict.fromkeys([*names_used(blocks), *map(".".join, words)], page)
    return found


def docstring_of(module: ModuleType, name: str) -> str:
    """The docstring of a class or a function, or the text below a constant or a type."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    sources = "\n".join(source for each, source in MODULES.items() if each.startswith(module.__name__))
    below = re.search(rf'(?m)^{name}\b.*=.*\n"""(.+)', sources)
    return below[1] if below else ""


def test_public_names_are_all_that_people_use():
    used = used_by_people()
    public = {f"{module.__name__}.{name}" for module in PUBLIC.values() for name in module.__all__}
    assert {name: place for name, place in used.items() if name not in public} == {}
    assert public - used.keys() == RETURNED


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings(module):
    names = PUBLIC[module].__all__
    assert names == sorted(names)
    assert [name for name in names if not docstring_of(PUBLIC[module], name)] == []


def test_public_modules_are_those_of_the_page():
    page = (ROOT / "docs/site/api.md").read_text()
    listed = re.findall(r"(?m)^## (\S+)\n\n```{eval-rst}\n.. automodule:: \1\n```", page)
    assert sorted(listed) == sorted(PUBLIC)
    assert len(listed) == page.count("\n## ")


def test_public_names_that_a_program_uses():
    program = "from fastgpu import feed\nfrom fastgpu.rows import Rows\ndef f():\n    return feed.open_splits(Rows.a)"
    assert names_used(program) == {"fastgpu.rows.Rows", "fastgpu.feed.open_splits"}
    assert Path(str(PUBLIC["fastgpu.feed"].__file__)).is_relative_to(PROJECT)
