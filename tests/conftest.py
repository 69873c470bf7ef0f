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

ROOT = Path(__file__).parents[1]
FOLDER = "{{cookiecutter.project_slug}}"


def tracked() -> list[str]:
    """The files that a clone of this repository holds, those about to be added included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


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
def bake(template: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """bake(**answers) runs the cookiecutter command; what comes out lies in tmp_path/out.

    Answers go in as a person types them: through a replay file, which cookiecutter does not render.
    """
    (tmp_path / "config.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")

    def run(*options: str, source: Path = template, **answers: object) -> subprocess.CompletedProcess[str]:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "cookiecutter", "--config-file", str(tmp_path / "config.yaml"), "-o", str(out)]
        if answers:
            (tmp_path / "answers.json").write_text(json.dumps({"cookiecutter": resolve(answers)}))
            command += ["--replay-file", str(tmp_path / "answers.json")]
        else:
            command += ["--no-input"]
        return subprocess.run([*command, *options, str(source)], capture_output=True, text=True, check=False)

    return run


def resolve(answers: dict[str, object]) -> dict[str, object]:
    """All variables as cookiecutter holds them once a person has answered so."""
    context = generate_context(str(ROOT / "cookiecutter.json"))
    known = dict(context["cookiecutter"])
    environment = StrictEnvironment(context=context)
    done: dict[str, object] = {}
    for name, value in known.items():
        if name == "__prompts__":
            continue
        if name in answers:
            done[name] = answers[name]
        elif name.startswith("_") and not name.startswith("__"):
            done[name] = value
        else:
            done[name] = render_variable(environment, value[0] if isinstance(value, list) else value, done)
    return done
