"""A project made by `cruft create` takes in later changes of the template by `cruft update`, beside its own."""

import os
import shutil
import sys

import pytest
from harness import printed_by
from template import FOLDER


@pytest.mark.slow
def test_an_update_merges_the_template_and_the_user(template, tmp_path):
    """Away from the settings of this user."""
    (tmp_path / "cookiecutter.yaml").write_text(f"cookiecutters_dir: {tmp_path}/c\nreplay_dir: {tmp_path}/r\n")
    settings = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    settings |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(tmp_path)}
    settings["COOKIECUTTER_CONFIG"] = str(tmp_path / "cookiecutter.yaml")

    def run(folder, *command):
        return printed_by(command, folder, **settings)

    def commit(folder):
        run(folder, "git", "init", "-q", "-b", "main")  # once more does no harm
        run(folder, "git", "add", "-A")
        run(folder, "git", "commit", "-qm", "as it is")

    def edit(path, line, text):
        lines = path.read_text().splitlines()
        lines[line] = text
        path.write_text("\n".join([*lines, ""]))

    source = shutil.copytree(template, tmp_path / "template")
    commit(source)
    cruft = (sys.executable, "-m", "cruft")
    answers = '{"project_name": "Cat finder", "workload": "both"}'
    assert "Next:" in run(tmp_path, *cruft, "create", str(source), "--no-input", "--extra-context", answers)
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
    edit(inside / ".github/workflows/ci.yml", 0, "name: the template")
    (inside / "configs/celeba.yaml").unlink()
    (inside / "fastgpu/new.py").write_text("NEW = True\n")
    (inside / "data/digits.h5").write_bytes(bytes(range(256)))
    commit(source)
    assert "Next:" not in run(project, *cruft, "update", "-y")

    lines = (project / "config.yaml").read_text().splitlines()
    assert (lines[10], lines[12]) == ("# the template's line", "# the user's line")
    lines = (project / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Cat finder: the template's title", "The user's last line.")
    assert (project / "fastgpu/new.py").read_text() == "NEW = True\n"
    assert (project / "data/digits.h5").read_bytes() == bytes(range(256))
    assert not list(project.rglob("*.rej"))
    changed = set(run(project, "git", "status", "--porcelain").split()[1::2])
    assert changed == {
        *(".cruft.json", "fastgpu/new.py", "README.md", "config.yaml", "configs/celeba.yaml", "data/digits.h5")
    }  # and neither the user's module nor the one that the user deleted
    commit(project)
    run(project, *cruft, "check")
