"""A project made by `cruft create` takes in later changes of the template by `cruft update`, beside its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from template import FOLDER

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(folder, *command) gives the output of a command that must succeed, away from the settings of this user."""
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    environment = os.environ | {
        "HOME": str(tmp_path),
        "COOKIECUTTER_CONFIG": str(tmp_path / "cookiecutter.yaml"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def call(folder: Path, *command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def commit(run: Run, folder: Path) -> None:
    if not (folder / ".git").exists():
        run(folder, "git", "init", "-q", "-b", "main")
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "as it is")


def edit(path: Path, line: int, text: str) -> None:
    """Replace one line of a file, counted from 0, or from the end if negative."""
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = f"{text}\n"
    path.write_text("".join(lines))


@pytest.mark.slow
def test_an_update_merges_the_template_and_the_user(template, run, tmp_path):
    source = tmp_path / "template"
    shutil.copytree(template, source)
    commit(run, source)
    cruft = (sys.executable, "-m", "cruft")
    answers = json.dumps({"project_name": "Cat finder", "workload": "both"})
    out = run(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
    assert "Next:" in out
    project = tmp_path / "cat_finder"
    commit(run, project)

    # The user edits, deletes and adds.
    edit(project / "config.yaml", 12, "# the user's line")
    edit(project / "README.md", -1, "The user's last line.")
    (project / ".github/workflows/ci.yml").unlink()
    (project / "workloads/mine.py").write_text("MINE = True\n")
    commit(run, project)

    # The template edits two lines above the user, edits what the user deleted, removes, adds, and edits a binary file.
    inside = source / FOLDER
    edit(inside / "config.yaml", 10, "# the template's line")
    edit(inside / "README.md", 0, "# {{ cookiecutter.project_name }}: the template's title")
    edit(inside / "fastgpu/__init__.py", 0, '"""The template\'s docstring."""')
    edit(inside / ".github/workflows/ci.yml", 0, "name: the template's")
    (inside / "configs/celeba.yaml").unlink()
    (inside / "fastgpu/new.py").write_text("NEW = True\n")
    (inside / "data/digits.h5").write_bytes(bytes(range(256)))
    commit(run, source)
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
    commit(run, project)
    run(project, *cruft, "check")
