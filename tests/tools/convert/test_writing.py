"""From readers to files: names, orders, broken rows, and whatever ends the process."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.convert import writing
from fastgpu.convert.reader import draw_splits, split_rows
from fastgpu.convert.writing import write_files
from fastgpu.process.launch import UserError
from support import PROJECT
from support.ranks import run_to_end, wait_until
from support.readers import Numbers


def numbers_in(path: Path) -> list[int]:
    with h5py.File(path) as file:
        assert (file["x"][:] == file["y"][:][:, None]).all()
        return file["y"][:].tolist()


def test_writing_order_is_that_of_the_seed(tmp_path):
    orders = []
    for seed in (1, 1, 2, None):
        write_files({"": Numbers(1000)}, tmp_path / "x.h5", seed=seed, replace=True)
        orders.append(numbers_in(tmp_path / "x.h5"))
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == sorted(orders[0]) == list(range(1000))
    assert 0.4 < np.mean(np.diff(orders[0]) > 0) < 0.6


def test_writing_splits_by_class():
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    splits = draw_splits(labels, (0.8, 0.1, 0.1), seed=1)
    assert [np.bincount(labels[splits == number]).tolist() for number in range(3)] == [[80, 8, 2], [10, 1, 1], [10, 1]]
    again, other = (draw_splits(labels, (0.8, 0.1, 0.1), seed=seed) for seed in (1, 2))
    assert splits.tolist() == again.tolist() != other.tolist()
    for labels in (np.random.default_rng(0).random(100), np.zeros((100, 3), int)):
        assert np.bincount(draw_splits(labels, (0.7, 0.2, 0.1), seed=0)).tolist() == [70, 20, 10]


def test_writing_splits_to_files(tmp_path, capsys):
    reader = Numbers(100)
    reader.splits = np.arange(100) % 2
    write_files(split_rows(reader, None, 0), tmp_path / "new/x.h5")
    assert sorted(numbers_in(tmp_path / "new/x-train.h5")) == list(range(0, 100, 2))
    assert sorted(numbers_in(tmp_path / "new/x-val.h5")) == list(range(1, 100, 2))
    assert "warning" not in capsys.readouterr().out
    write_files({"": reader}, tmp_path / "new/x.h5")
    assert "x-train.h5, " in capsys.readouterr().out.partition("warning: ")[2]


def test_writing_refuses_attributes_early(tmp_path):
    reader = Numbers(10)
    reader.attributes["date"] = np.datetime64("2026-01-01")
    reader.fields  # noqa: B018 (reads the first row)
    reader.odd = range(10)  # a row that is read now is broken
    with pytest.raises(TypeError):
        write_files({"": reader}, tmp_path / "x.h5")
    assert not reader.broken


@pytest.mark.parametrize(("n_rows", "broken"), [(60, (3,)), (200, (0, 9))])
def test_writing_leaves_out_few_broken_rows(tmp_path, n_rows, broken):
    """One, or 1 %. The list of them is of the file that is there."""
    listed = tmp_path / "x.h5.skipped.txt"
    parts = {"": Numbers(n_rows, broken)}
    write_files(parts, tmp_path / "x.h5", max_broken=0.01)
    assert sorted(numbers_in(tmp_path / "x.h5")) == [row for row in range(n_rows) if row not in broken]
    lines = [f"numbers: row {row} cannot be read: it is odd" for row in broken]
    assert listed.read_text().splitlines() == lines
    (tmp_path / "x.h5").rename(tmp_path / "kept.h5")
    with pytest.raises(UserError, match="x.h5.skipped.txt exists; --force replaces a file"):
        write_files(parts, tmp_path / "x.h5", max_broken=0.01)
    write_files({"": Numbers(n_rows)}, tmp_path / "x.h5", replace=True)
    assert not listed.exists()


@pytest.mark.parametrize(
    ("n_rows", "broken", "max_broken"),
    [(250, (0, 9), 0.0), (99, (3, 7), 0.01), (299, (0, 9, 8), 0.01), (209, range(0, 210, 10), 0.1)],
)
def test_writing_of_many_broken_rows_changes_nothing(tmp_path, n_rows, broken, max_broken):
    (tmp_path / "x.h5").write_text("before")
    with pytest.raises(UserError, match=rf"{len(broken)} of {n_rows} rows are broken, .* nothing else .* 1 % at most"):
        write_files({"": Numbers(n_rows, broken)}, tmp_path / "x.h5", replace=True, max_broken=max_broken)
    lines = "".join(f"numbers: row {row} cannot be read: it is odd\n" for row in sorted(broken))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"x.h5": "before", "x.h5.broken.txt": lines}
    write_files({"": Numbers(n_rows)}, tmp_path / "x.h5", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_writing_notices_missing_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(
        writing, "_read", lambda *_, **__: (rows for rows in [{"x": np.zeros((9, 1000)), "y": np.zeros(9)}])
    )
    with pytest.raises(AssertionError, match="9 of 10 rows came"):
        write_files({"": Numbers(10)}, tmp_path / "x.h5")
    assert not list(tmp_path.iterdir())


def test_writing_does_not_follow_a_link(tmp_path):
    (tmp_path / "x.h5").symlink_to("nowhere")
    with pytest.raises(UserError, match="x.h5 exists; --force replaces a file"):
        write_files({"": Numbers(3)}, tmp_path / "x.h5")
    write_files({"": Numbers(3)}, tmp_path / "x.h5", replace=True)
    assert sorted(numbers_in(tmp_path / "x.h5")) == [0, 1, 2]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_writing_interrupted_leaves_nothing(tmp_path, number):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (100_000, 3, 16, 16), np.uint8)  # seconds of gzip
        file["labels"] = np.zeros(100_000, int)
    command = [sys.executable, str(PROJECT / "convert.py"), "repack", "old.h5", "new.h5", "--compression", "gzip"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: bool([*tmp_path.glob(".new.*.h5")]), process)
    # Python swallows an exception in a callback, such as one of importlib: then a person would try again.
    while process.poll() is None:
        os.kill(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    error = process.stderr.read()
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error or "Exception ignored" in error
    assert [path.name for path in tmp_path.iterdir()] == ["old.h5"]


@pytest.mark.slow
def test_writing_to_a_full_disk_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((100, 1 << 16), np.uint8))
    command = f"trap '' XFSZ; ulimit -f 1024; '{sys.executable}' '{PROJECT / 'convert.py'}' arrays x=x.npy y.h5"
    result = run_to_end(["bash", "-c", command], tmp_path)
    assert "File too large" in result.stderr
    assert result.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
