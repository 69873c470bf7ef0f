"""From readers to files: names, orders, broken rows, and whatever ends the process."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import ROOT

from fastgpu.convert import writing
from fastgpu.convert.reader import Part, Reader
from fastgpu.convert.writing import WriteOptions, complete_or_absent, write_files
from fastgpu.process.launch import UserError


class Numbers(Reader):
    """Rows that hold their number. Those of `broken` cannot be read."""

    name = "numbers"

    def __init__(self, n_rows: int, broken: tuple[int, ...] = ()):
        self.n_rows = n_rows
        self.broken = broken
        self.attributes = {}

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        if row in self.broken:
            raise ValueError("it is odd")
        return {"x": np.full(1000, row), "y": row}


def rows_of(path: Path) -> list[int]:
    with h5py.File(path) as file:
        assert (file["x"][:] == file["y"][:][:, None]).all()
        return file["y"][:].tolist()


def test_every_row_is_written_once_in_an_order_that_the_seed_decides(tmp_path):
    orders = []
    for seed in (1, 1, 2, None):
        write_files({"": Part(Numbers(1000))}, tmp_path / "x.h5", WriteOptions(seed, replace=True))
        orders.append(rows_of(tmp_path / "x.h5"))
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == sorted(orders[0]) == list(range(1000))
    assert 0.4 < np.mean(np.diff(orders[0]) > 0) < 0.6


def test_parts_go_to_files_of_their_names(tmp_path, capsys):
    reader = Numbers(100)
    parts = {"train": Part(reader, np.arange(0, 100, 2)), "val": Part(reader, np.arange(1, 100, 2))}
    write_files(parts, tmp_path / "new/x.h5", WriteOptions())
    assert sorted(rows_of(tmp_path / "new/x-train.h5")) == list(range(0, 100, 2))
    assert sorted(rows_of(tmp_path / "new/x-val.h5")) == list(range(1, 100, 2))
    assert "warning" not in capsys.readouterr().out
    write_files({"": Part(reader)}, tmp_path / "new/x.h5", WriteOptions())
    assert "x-train.h5, " in capsys.readouterr().out.partition("warning: ")[2]


@pytest.mark.parametrize(
    ("n_rows", "broken", "is_skipped"), [(100, (3,), True), (99, (3, 7), False), (250, (0, 9), True)]
)
def test_few_broken_rows_are_left_out_and_listed(tmp_path, n_rows, broken, is_skipped):
    parts = {"": Part(Numbers(n_rows, broken))}
    with pytest.raises(UserError, match=rf"{len(broken)} of {n_rows} rows are broken, so nothing was written") as error:
        write_files(parts, tmp_path / "x.h5", WriteOptions())
    assert f"numbers: row {broken[0]} cannot be read: it is odd" in str(error.value)
    assert not list(tmp_path.iterdir())
    if is_skipped:
        write_files(parts, tmp_path / "x.h5", WriteOptions(skips_broken=True))
        assert sorted(rows_of(tmp_path / "x.h5")) == [row for row in range(n_rows) if row not in broken]
        lines = [f"numbers: row {row} cannot be read: it is odd" for row in broken]
        assert (tmp_path / "x.h5.skipped.txt").read_text().splitlines() == lines
    else:
        with pytest.raises(UserError, match="more than 1 %"):
            write_files(parts, tmp_path / "x.h5", WriteOptions(skips_broken=True))
        assert not list(tmp_path.iterdir())


def test_many_broken_rows_are_counted(tmp_path):
    with pytest.raises(UserError, match="25 of 30 rows are broken, so nothing was written:") as error:
        write_files({"": Part(Numbers(30, tuple(range(3, 28))))}, tmp_path / "x.h5", WriteOptions())
    lines = str(error.value).splitlines()
    assert (len(lines), lines[21]) == (22, "  and 5 more")
    with pytest.raises(UserError, match="none of the first rows can be read"):
        write_files({"": Part(Numbers(3, (0, 1, 2)))}, tmp_path / "x.h5", WriteOptions())


def test_rows_that_do_not_come_are_not_lost_in_silence(tmp_path):
    class Short(Numbers):
        def batches(self, order, broken):
            yield {"x": np.zeros((9, 1000), int), "y": np.zeros(9, int)}

    with pytest.raises(AssertionError, match="9 of 10 rows came"):
        write_files({"": Part(Short(10))}, tmp_path / "x.h5", WriteOptions())
    assert not list(tmp_path.iterdir())


def test_a_target_in_the_way_is_refused(tmp_path, monkeypatch):
    (tmp_path / "train.h5").touch()
    with pytest.raises(UserError, match="train.h5 exists; choose another name, or --force"):
        write_files({"": Part(Numbers(3))}, tmp_path / "train.h5", WriteOptions())
    with pytest.raises(UserError, match="numbers has no rows for"):
        write_files({"": Part(Numbers(3), np.arange(0))}, tmp_path / "x.h5", WriteOptions())
    with pytest.raises(OSError, match="File exists: .*train.h5"):
        write_files({"": Part(Numbers(3))}, tmp_path / "train.h5/x.h5", WriteOptions())
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(UserError, match="needs 0.00 GB, .* make room, or write it elsewhere"):
        write_files({"": Part(Numbers(3))}, tmp_path / "x.h5", WriteOptions())


# ---------------------------------------------------------------------------------------------- whole or absent


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_all_files_or_none(tmp_path, monkeypatch):
    with complete_or_absent(tmp_path / "x.h5") as folder:
        for split in ("train", "val"):
            (folder / f"x-{split}.h5").write_text("old")
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    old = {"x-train.h5": "old", "x-val.h5": "old"}
    assert contents(tmp_path) == old

    def fail(error: type[BaseException]) -> None:
        with complete_or_absent(tmp_path / "x.h5") as folder:
            (folder / "x-train.h5").write_text("new")
            raise error

    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
        assert contents(tmp_path) == old

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "flush", refuse)  # a disk that refuses the last bytes
    with pytest.raises(OSError, match="No space left"), complete_or_absent(tmp_path / "x.h5") as folder:
        (folder / "x-train.h5").write_text("new")
    assert contents(tmp_path) == old


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_repack_leaves_nothing(tmp_path, number):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (100_000, 3, 16, 16), np.uint8)  # seconds of gzip
        file["labels"] = np.zeros(100_000, int)
    command = [sys.executable, str(ROOT / "convert.py"), "repack", "old.h5", "new.h5", "--compression", "gzip"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".new.h5-*/new.h5")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (130, 143), error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["old.h5"]


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((100, 1 << 16), np.uint8))
    command = f"ulimit -f 1024; '{sys.executable}' '{ROOT / 'convert.py'}' arrays x=x.npy y.h5"
    result = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; {command}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "File too large" in result.stderr
    assert result.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
