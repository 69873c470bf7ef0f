"""Files that get their names together, whatever ends the process that writes them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastgpu.convert import partial
from fastgpu.convert.partial import complete_or_absent, remove_unfinished
from fastgpu.process.launch import UserError

ROOT = Path(__file__).parents[3] / "{{cookiecutter.project_slug}}"
WRITE = """
import os, signal, sys, time
from pathlib import Path
from fastgpu.convert import partial
target, n_renames = Path(sys.argv[1]), int(sys.argv[2])
with partial.complete_or_absent(target) as folder:
    for name in ("x-train.h5", "x-val.h5"):
        (folder / name).write_text("new")
    if n_renames < 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    replace = Path.replace
    def counted(self, path):
        global n_renames
        n_renames -= 1
        if n_renames < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, path)
    Path.replace = counted
"""


@contextmanager
def writing(target: Path) -> Iterator[subprocess.Popen]:
    """A process that writes x-train.h5 and x-val.h5, and does not end by itself."""
    command = [sys.executable, "-c", WRITE, str(target), "-1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() if path.is_file() else "" for path in folder.iterdir()}


def test_all_files_or_none(tmp_path):
    with complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("old")
        (folder / "x-val.h5").write_text("old")
        assert contents(tmp_path) == {".x.h5.partial": ""}
    assert contents(tmp_path) == {"x-train.h5": "old", "x-val.h5": "old"}
    failing = pytest.raises(ZeroDivisionError)
    with failing, complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("new")
        _ = 1 / 0
    assert contents(tmp_path) == {"x-train.h5": "old", "x-val.h5": "old"}


def test_a_second_converter_is_refused_and_harms_nothing(tmp_path, capsys):
    with writing(tmp_path / "x.h5") as process:
        remove_unfinished(tmp_path)
        message = f"x.h5 is being written by process {process.pid} on .* since .*; wait for it, or choose another name"
        with pytest.raises(UserError, match=message):
            complete_or_absent(tmp_path / "x.h5").__enter__()
        assert contents(tmp_path / ".x.h5.partial").keys() == {"lock", "x-train.h5", "x-val.h5"}
        with complete_or_absent(tmp_path / "y.h5") as folder:
            (folder / "y.h5").touch()
    assert capsys.readouterr().out == ""


def test_what_a_killed_converter_left_is_removed_and_said(tmp_path, capsys):
    (tmp_path / ".mine.partial").mkdir()
    (tmp_path / ".mine.partial/notes").touch()
    with writing(tmp_path / "x.h5") as process:
        os.kill(process.pid, signal.SIGKILL)
    remove_unfinished(tmp_path)
    assert f"{tmp_path}/.x.h5.partial is removed: a converter that was killed has left it" in capsys.readouterr().out
    assert contents(tmp_path) == {".mine.partial": ""}


@pytest.mark.parametrize("n_renames", [0, 1])
def test_files_are_never_mixed_with_older_ones_and_get_their_names_after_a_kill(tmp_path, capsys, n_renames):
    for name in ("x-train.h5", "x-val.h5"):
        (tmp_path / name).write_text("old")
    command = [sys.executable, "-c", WRITE, str(tmp_path / "x.h5"), str(n_renames)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    found = contents(tmp_path)
    assert found.pop(".x.h5.partial") == ""
    assert list(found.values()) == ["new"] * n_renames
    remove_unfinished(tmp_path)
    assert "x-val.h5 in" in capsys.readouterr().out
    assert contents(tmp_path) == {"x-train.h5": "new", "x-val.h5": "new"}


def test_a_disk_that_refuses_the_last_bytes_leaves_the_older_files(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "x-train.h5").write_text("old")
    monkeypatch.setattr(partial, "flush", refuse)
    with pytest.raises(OSError, match="No space left"), complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("new")
    assert contents(tmp_path) == {"x-train.h5": "old"}
