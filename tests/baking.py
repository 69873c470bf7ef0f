"""Cookiecutter in this process, away from the settings of this user."""

import json
from pathlib import Path

from cookiecutter.environment import StrictEnvironment
from cookiecutter.generate import generate_context
from cookiecutter.main import cookiecutter
from cookiecutter.prompt import render_variable
from template import ROOT


def bake_project(folder: Path, template: Path, *, accept_hooks: bool = True, **answers: object) -> Path:
    """Make a project in folder/out. Returns its folder. Raises FailedHookException if the answers are refused.

    Answers go in as a person types them: through a replay file, which cookiecutter does not render.
    """
    settings = folder / "cookiecutter.yaml"
    settings.write_text(f"cookiecutters_dir: {folder}/c\nreplay_dir: {folder}/r\n")
    how: dict[str, object] = {"no_input": True}
    if answers:
        how = {"replay": str(folder / "answers.json")}
        (folder / "answers.json").write_text(json.dumps({"cookiecutter": resolve(answers)}))
    output = folder / "out"
    output.mkdir(exist_ok=True)
    made = cookiecutter(
        str(template), output_dir=str(output), config_file=str(settings), accept_hooks=accept_hooks, **how
    )
    return Path(made)


def resolve(answers: dict[str, object]) -> dict[str, object]:
    """All variables as cookiecutter holds them once a person has given these answers."""
    context = generate_context(str(ROOT / "cookiecutter.json"))
    environment = StrictEnvironment(context=context)
    resolved: dict[str, object] = {}
    for name, value in context["cookiecutter"].items():
        if name == "__prompts__":
            continue
        is_copied = name.startswith("_") and not name.startswith("__")
        default = value[0] if isinstance(value, list) and not is_copied else value
        resolved[name] = value if is_copied else render_variable(environment, default, resolved)
        if name in answers:
            resolved[name] = answers[name]
    return resolved
