"""The cookiecutter command, away from the settings of this user."""

import json
import subprocess
import sys
from pathlib import Path

from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import generate_context
from cookiecutter.prompt import render_variable
from template import ROOT

Done = subprocess.CompletedProcess[str]


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
