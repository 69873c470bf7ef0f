"""Cookiecutter in this process, away from the settings of this user."""

from pathlib import Path

from cookiecutter.generate import generate_context
from cookiecutter.main import cookiecutter
from cookiecutter.prompt import prompt_for_config
from template import QUESTIONS, ROOT


def bake_project(folder: Path, template: Path, **answers: str) -> Path:
    """Make a project in folder/out. Returns its folder. Raises FailedHookException if the answers are refused."""
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
