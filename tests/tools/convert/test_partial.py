"""Files that get their names together, whatever ends the process that writes them."""

from pathlib import Path

import pytest

from fastgpu.convert import writing
from fastgpu.convert.writing import complete_or_absent


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() if path.is_file() else "" for path in folder.iterdir()}


def test_all_files_or_none(tmp_path):
    with complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("old")
        (folder / "x-val.h5").write_text("old")
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        assert folder.name.startswith(".x.h5-")
    assert contents(tmp_path) == {"x-train.h5": "old", "x-val.h5": "old"}
    failing = pytest.raises(ZeroDivisionError)
    with failing, complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("new")
        _ = 1 / 0
    assert contents(tmp_path) == {"x-train.h5": "old", "x-val.h5": "old"}


def test_a_disk_that_refuses_the_last_bytes_leaves_the_older_files(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "x-train.h5").write_text("old")
    monkeypatch.setattr(writing, "flush", refuse)
    with pytest.raises(OSError, match="No space left"), complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("new")
    assert contents(tmp_path) == {"x-train.h5": "old"}
