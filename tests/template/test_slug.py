"""The slug that is suggested for a project name is one that the hook accepts, unless the name is that of a package."""

import itertools
import re
import tomllib
from typing import Any

import pytest
from baking import resolve
from cookiecutter.environment import StrictEnvironment
from template import FOLDER, ROOT


def load_hook(answers: dict[str, object]) -> dict[str, Any]:
    """The names that hooks/pre_gen_project.py defines, rendered as cookiecutter does but not run as a script."""
    source = StrictEnvironment(context={}).from_string((ROOT / "hooks/pre_gen_project.py").read_text())
    names: dict[str, Any] = {"__name__": "pre_gen_project"}
    exec(source.render(cookiecutter=answers), names)
    return names


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("My Training Project", "my_training_project"),
        ("Cat Finder 2", "cat_finder_2"),
        ("  Müller's “x” ", "muller_s_x"),
        ("Cats", "cats"),
        ("123 go", "project_123_go"),
        ("2048", "project_2048"),
        ("!!! ... ???", "project_one"),
        ("O'Neil/Ω", "o_neil_o"),
        ("a " * 60, "a_" * 20 + "a"),
        ("a" * 60, "a" * 42),
        ("1" * 60, "project_" + "1" * 42),
        ("cat " + "finder " * 9, "cat_finder_finder_finder_finder_finder"),
    ],
)
def test_slug_suggested_for_a_name(name, slug):
    answers = resolve({"project_name": name})
    assert answers["project_slug"] == slug
    assert load_hook(answers)["mistakes"]() == []


def test_the_hook_refuses_the_names_of_the_packages_that_a_project_installs():
    text = re.sub(r"{%.*?%}", "", (ROOT / FOLDER / "pyproject.toml").read_text())
    project = tomllib.loads(text)["project"]
    needed = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in needed}
    assert load_hook(resolve({}))["DEPENDENCIES"] == names
    for name in ("scipy", "fastgpu", "torchvision"):
        (mistake,) = load_hook(resolve({"project_slug": name}))["mistakes"]()
        assert f"'{name}', a package that the project imports" in mistake


@pytest.mark.parametrize("name", ["project_name", "author"])
@pytest.mark.parametrize("text", ["two\nlines", "tab\there", "\x1b[31mred", "", "   "])
def test_answers_that_are_no_line_of_text_are_refused(name, text):
    (mistake,) = load_hook(resolve({"project_slug": "cats", name: text}))["mistakes"]()
    assert mistake.startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("slug", "reason"),
    [
        ("my-project", 'use lower-case letters, digits and "_"'),
        ("1st", "a letter first"),
        ("Cats", "lower-case"),
        ("café", "lower-case"),
        ("cats_", "no _ last"),
        ("a" * 51, "at most 50"),
        ("class", "a word of the Python language"),
        ("match", "a word of the Python language"),
        ("torch", "a package that the project imports: add a word, such as torch_project"),
        ("h5py", "a package that the project imports"),
        ("nvidia_ml_py", "a package that the project imports"),
        ("../evil", "lower-case"),
        ("-rf", "a letter first"),
        ("a b", "lower-case"),
    ],
)
def test_names_that_break_are_refused(slug, reason):
    (mistake,) = load_hook(resolve({"project_slug": slug}))["mistakes"]()
    assert mistake.startswith(f"project_slug is {slug!r}")
    assert reason in mistake
