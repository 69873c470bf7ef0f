"""Projects that are updated by cruft, as a user and the template both change them."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from template import FOLDER

from support.ranks import printed_by

Git = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Git:
    """run(folder, *command) is what a program prints, away from the settings of this user."""
    settings = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(tmp_path)}
    settings["COOKIECUTTER_CONFIG"] = str(tmp_path / "cookiecutter.yaml")
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    return lambda folder, *command: printed_by(command, folder, **settings)


def commit(run: Git, folder: Path) -> None:
    run(folder, "git", "init", "-q", "-b", "main")  # once more does no harm
    run(folder, "git", "add", "-A")
    run(folder, "git", "commit", "-qm", "as it is")


def edit(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join([*lines, ""]))


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False], ids=["committed", "edited-first"])
def test_update_keeps_what_both_have_changed(template, tmp_path, run, is_known):
    """Lines that both have changed are marked in the file. If git does not know the file as it was baked, the user's
    stay, and those of the template are in a file beside it. All else is updated."""
    source = shutil.copytree(template, tmp_path / "template")
    commit(run, source)
    cruft = (sys.executable, "-m", "cruft")
    answers = '{"project_name": "Cat finder", "workload": "both"}'
    assert "Next:" in run(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
    project = tmp_path / "cat_finder"
    if is_known:
        commit(run, project)

    # The user edits, deletes and adds.
    edit(project / "train.py", 0, "# mine")
    edit(project / "config.yaml", 12, "# mine")
    edit(project / "README.md", -1, "mine")
    (project / ".github/workflows/ci.yml").unlink()
    (project / "workloads/mine.py").touch()
    commit(run, project)

    # The template edits the same line, two lines above the user, and what the user deleted; removes and adds.
    inside = source / FOLDER
    edit(inside / "train.py", 0, "# theirs")
    edit(inside / "config.yaml", 10, "# theirs")
    edit(inside / "README.md", 2, "theirs")
    edit(inside / ".github/workflows/ci.yml", 0, "name: theirs")
    (inside / "configs/celeba.yaml").unlink()
    (inside / "fastgpu/theirs.py").touch()
    (inside / "data/digits.h5").write_bytes(bytes(range(256)))
    commit(run, source)
    assert "Next:" not in run(project, *cruft, "update", "-y")

    text = (project / "train.py").read_text()
    assert ("<<<<<<< ours\n# mine\n=======\n# theirs\n>>>>>>> theirs\n" in text) == is_known
    assert text.startswith("# mine") != is_known
    if is_known:
        lines = (project / "config.yaml").read_text().splitlines()
        assert (lines[10], lines[12]) == ("# theirs", "# mine")
    rejected = set() if is_known else {"train.py.rej", "config.yaml.rej"}
    assert {path.name for path in project.rglob("*.rej")} == rejected
    lines = (project / "README.md").read_text().splitlines()
    assert [*lines[::2][:2], lines[-1]] == ["# Cat finder", "theirs", "mine"]
    assert (project / "data/digits.h5").read_bytes() == bytes(range(256))
    updated = {"fastgpu/theirs.py", "README.md", "configs/celeba.yaml", "data/digits.h5"}
    changed = set(re.findall(r"(?m)^.. (\S+)$", run(project, "git", "status", "--porcelain")))
    assert {name for name in changed if not re.search(r"train\.py|config\.yaml|cruft", name)} == updated
    commit(run, project)
    run(project, *cruft, "check")
