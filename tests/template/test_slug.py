"""The slug that is suggested for a project name is one that the hook accepts, unless the name is that of a package."""

import itertools
import re
import tomllib
from typing import Any

import pytest
from baking import resolve
from cookiecutter.environment import StrictEnvironment
from template import PROJECT, ROOT


def load_hook(**given: object) -> dict[str, Any]:
    """The names that hooks/pre_gen_project.py defines, rendered as cookiecutter does but not run as a script."""
    source = StrictEnvironment(context={}).from_string((ROOT / "hooks/pre_gen_project.py").read_text())
    names: dict[str, Any] = {"__name__": "pre_gen_project"}
    exec(source.render(cookiecutter=resolve(given)), names)
    return names


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("  Müller's “x” ", "muller_s_x"),
        ("123 go", "project_123_go"),
        ("!!! ... ???", "project_one"),
        ("a " * 60, "a_" * 20 + "a"),
        ("1" * 60, "project_" + "1" * 42),
    ],
)
def test_slug_suggested_for_a_name(name, slug):
    assert resolve({"project_name": name})["project_slug"] == slug
    assert load_hook(project_name=name)["mistakes"]() == []


def test_the_hook_refuses_the_names_of_the_packages_that_a_project_installs():
    text = re.sub(r"{%.*?%}", "", (PROJECT / "pyproject.toml").read_text())
    project = tomllib.loads(text)["project"]
    needed = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in needed}
    assert load_hook()["DEPENDENCIES"] == names


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("project_slug", "../evil", 'use lower-case letters, digits and "_"'),
        ("project_slug", "1st", "a letter first"),
        ("project_slug", "cats_", "no _ last"),
        ("project_slug", "a" * 51, "at most 50"),
        ("project_slug", "match", "a word of the Python language"),
        (
            "project_slug",
            "nvidia_ml_py",
            "a package that the project imports: add a word, such as nvidia_ml_py_project",
        ),
        ("project_slug", "torchvision", "a package that the project imports: add a word, such as torchvision_project"),
        ("project_name", "two\nlines", "without control characters"),
        ("author", "   ", "write a word or two"),
    ],
)
def test_answers_that_break_are_refused(name, answer, reason):
    (mistake,) = load_hook(**{"project_slug": "cats", name: answer})["mistakes"]()
    assert mistake.startswith(f"{name} is ")
    assert reason in mistake
