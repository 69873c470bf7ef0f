"""A project made by `cruft create` takes in later changes of the template by `cruft update`, beside its own."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from harness import run_to_end
from template import FOLDER


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git and cookiecutter away from the settings of this user."""
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    settings = {"COOKIECUTTER_CONFIG": str(tmp_path / "cookiecutter.yaml"), "GIT_CONFIG_GLOBAL": os.devnull}
    names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for name, value in (settings | names | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}).items():
        monkeypatch.setenv(name, value)


def run(folder: Path, *command: str) -> str:
    """The output of a command that must succeed."""
    done = run_to_end(list(command), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commit(folder: Path) -> None:
    run(folder, "git", "init", "-q", "-b", "main")  # once more does no harm
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "as it is")


def edit(path: Path, line: int, text: str) -> None:
    """Replace one line of a file, counted from 0, or from the end if negative."""
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = f"{text}\n"
    path.write_text("".join(lines))


@pytest.mark.slow
def test_an_update_merges_the_template_and_the_user(template, tmp_path):
    source = shutil.copytree(template, tmp_path / "template")
    commit(source)
    cruft = (sys.executable, "-m", "cruft")
    answers = json.dumps({"project_name": "Cat finder", "workload": "both"})
    out = run(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
    assert "Next:" in out
    project = tmp_path / "cat_finder"
    commit(project)

    # The user edits, deletes and adds.
    edit(project / "config.yaml", 12, "# the user's line")
    edit(project / "README.md", -1, "The user's last line.")
    (project / ".github/workflows/ci.yml").unlink()
    (project / "workloads/mine.py").write_text("MINE = True\n")
    commit(project)

    # The template edits two lines above the user, edits what the user deleted, removes, adds, and edits a binary file.
    inside = source / FOLDER
    edit(inside / "config.yaml", 10, "# the template's line")
    edit(inside / "README.md", 0, "# {{ cookiecutter.project_name }}: the template's title")
    edit(inside / "fastgpu/__init__.py", 0, '"""The template\'s docstring."""')
    edit(inside / ".github/workflows/ci.yml", 0, "name: the template's")
    (inside / "configs/celeba.yaml").unlink()
    (inside / "fastgpu/new.py").write_text("NEW = True\n")
    (inside / "data/digits.h5").write_bytes(bytes(range(256)))
    commit(source)
    out = run(project, *cruft, "update", "-y")

    assert "Next:" not in out
    lines = (project / "config.yaml").read_text().splitlines()
    assert (lines[10], lines[12]) == ("# the template's line", "# the user's line")
    lines = (project / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Cat finder: the template's title", "The user's last line.")
    assert (project / "fastgpu/__init__.py").read_text().startswith('"""The template\'s docstring."""\n')
    assert not (project / ".github/workflows/ci.yml").exists()
    assert (project / "workloads/mine.py").read_text() == "MINE = True\n"
    assert not (project / "configs/celeba.yaml").exists()
    assert (project / "fastgpu/new.py").read_text() == "NEW = True\n"
    assert (project / "data/digits.h5").read_bytes() == bytes(range(256))
    assert not list(project.rglob("*.rej"))
    assert not run(project, "git", "diff", "--name-only", "--diff-filter=U")  # no conflict is left

    changed = set(run(project, "git", "status", "--porcelain").split()[1::2])
    expected = ["README.md", "config.yaml", "configs/celeba.yaml", "data/digits.h5", "fastgpu/__init__.py"]
    assert changed == {".cruft.json", "fastgpu/new.py", *expected}
    commit(project)
    run(project, *cruft, "check")
