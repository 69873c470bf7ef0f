"""Fixtures that bake projects from a clean copy of the template."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import generate_context
from cookiecutter.prompt import render_variable
from template import ROOT, tracked

Done = subprocess.CompletedProcess[str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start a Slurm cluster run only where `-m slurm` asks for them."""
    if config.option.markexpr != "slurm":
        items[:] = [item for item in items if not item.get_closest_marker("slurm")]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the template, as a user clones it."""
    copy = tmp_path_factory.mktemp("template")
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return copy


@pytest.fixture
def bake(template: Path, tmp_path: Path) -> Callable[..., Done]:
    """bake(**answers) runs the cookiecutter command. The project is made in tmp_path/out."""
    return functools.partial(run_cookiecutter, tmp_path, template)


@pytest.fixture(scope="session")
def baked(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """baked(workload) is the folder of a project that all tests share: they read it, or run tools that leave it as it
    is. The project is baked at the first call."""

    @functools.cache
    def project(workload: str) -> Path:
        folder = tmp_path_factory.mktemp(workload)
        done = run_cookiecutter(folder, template, project_slug="cats", license="MIT", workload=workload)
        assert done.returncode == 0, done.stderr
        return folder / "out" / "cats"

    return project


@pytest.fixture
def own_copy(baked: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """own_copy(workload) is a project that the test may change."""

    def copy(workload: str) -> Path:
        return shutil.copytree(baked(workload), tmp_path / workload)

    return copy


def run_cookiecutter(
    folder: Path, template: Path, *options: str, source: Path | None = None, **answers: object
) -> Done:
    """Run the cookiecutter command away from the settings of this user; the project is made in folder/out.

    Answers go in as a person types them: through a replay file, which cookiecutter does not render.
    """
    settings = folder / "cookiecutter.yaml"
    settings.write_text(f"cookiecutters_dir: {folder}/c\nreplay_dir: {folder}/r\n")
    out = folder / "out"
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "cookiecutter", "--config-file", str(settings), "-o", str(out)]
    if answers:
        (folder / "answers.json").write_text(json.dumps({"cookiecutter": resolve(answers)}))
        command += ["--replay-file", str(folder / "answers.json")]
    else:
        command += ["--no-input"]
    command += [*options, str(source or template)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def resolve(answers: dict[str, object]) -> dict[str, object]:
    """All variables as cookiecutter holds them once a person has given these answers."""
    context = generate_context(str(ROOT / "cookiecutter.json"))
    known = dict(context["cookiecutter"])
    environment = StrictEnvironment(context=context)
    resolved: dict[str, object] = {}
    for name, value in known.items():
        if name == "__prompts__":
            continue
        if name in answers:
            resolved[name] = answers[name]
        elif name.startswith("_") and not name.startswith("__"):
            resolved[name] = value
        else:
            default = value[0] if isinstance(value, list) else value
            resolved[name] = render_variable(environment, default, resolved)
    return resolved
