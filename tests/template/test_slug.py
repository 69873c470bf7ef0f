"""The slug that is suggested for a project name is one that the hook accepts, whatever the name is."""

import json
import re
import sys
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from baking import resolve
from cookiecutter.environment import StrictEnvironment
from hypothesis import given, settings
from hypothesis import strategies as st
from template import FOLDER, ROOT, project_files

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text())
ENVIRONMENT = StrictEnvironment(context={"cookiecutter": QUESTIONS})
ANSWERS = resolve({})
DEFAULTS = {name: ENVIRONMENT.from_string(QUESTIONS[name]) for name in ("__words", "project_slug")}


def load_hook() -> dict[str, Any]:
    """The names that hooks/pre_gen_project.py defines, rendered as cookiecutter does but not run as a script."""
    source = ENVIRONMENT.from_string((ROOT / "hooks/pre_gen_project.py").read_text())
    names: dict[str, Any] = {"__name__": "pre_gen_project"}
    exec(source.render(cookiecutter=ANSWERS), names)
    return names


HOOK = load_hook()
TAKEN: set[str] = HOOK["TAKEN"]


def suggested(project_name: str) -> str:
    """The default project_slug for a name, which the hook must accept."""
    answers = {**ANSWERS, "project_name": project_name}
    for name, default in DEFAULTS.items():
        answers[name] = default.render(cookiecutter=answers)
    HOOK["answers"] = answers
    assert not [mistake for mistake in HOOK["mistakes"]() if mistake.startswith("project_slug")], project_name
    return answers["project_slug"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("My Training Project", "my_training_project"),
        ("Cat Finder 2", "cat_finder_2"),
        ("  Müller's “x” ", "muller_s_x"),
        ("Cats", "cats_project"),
        ("Torch", "torch_project"),
        ("Random", "random_project"),
        ("Diagnose", "diagnose_project"),
        ("class", "class_project"),
        ("nul", "nul_project"),
        ("Sre Compile", "sre_compile_project"),
        ("TensorBoard data-server", "tensorboard_data_server_project"),
        ("123 go", "project_123_go"),
        ("2048", "project_2048"),
        ("!!! ... ???", "my_project"),
        ("___", "my_project"),
        ("", "my_project"),
        ("a " * 60, "a_" * 20 + "a"),
        ("a" * 60, "a" * 42 + "_project"),
        ("1" * 60, "project_" + "1" * 42),
        ("cat " + "finder " * 9, "cat_finder_finder_finder_finder_finder"),
    ],
)
def test_slug_suggested_for_a_name(name, slug):
    assert suggested(name) == slug


def test_the_suggested_slug_avoids_every_taken_name():
    for name in sorted(TAKEN | sys.stdlib_module_names):
        assert suggested(name) == suggested(name.replace("_", " ").title())
        if name in TAKEN:
            assert suggested(name) == f"{name}_project"


words = st.one_of(
    st.sampled_from(sorted(TAKEN | sys.stdlib_module_names)),
    st.text(max_size=20),
    st.from_regex(r"[\w\d_ .'&#;-]{1,60}", fullmatch=True),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(words, max_size=8), st.sampled_from([" ", "_", "-", "", "\n"]))
def test_the_suggested_slug_is_accepted_for_any_name(parts, between):
    suggested(between.join(parts))


def test_the_hook_refuses_every_name_in_use():
    beside = {name.split("/")[0] for name in project_files()}
    scripts = {name.removesuffix(".py") for name in beside if name.endswith(".py") or "." not in name}
    pins = re.findall(r"(?m)^([^#\s=]+)==", (ROOT / FOLDER / "constraints.txt").read_text())
    packages = {re.sub(r"[-.]", "_", name).lower() for name in pins}
    modules = {
        module.lower()
        for module, distributions in packages_distributions().items()
        if module.isidentifier() and packages & {re.sub(r"[-.]", "_", name).lower() for name in distributions}
    }
    in_use = {name for name in scripts | packages | modules if re.fullmatch("[a-z][a-z0-9_]*", name)}
    assert in_use - TAKEN <= {"example"}  # a script that a package leaves in site-packages
