import os
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from harness import ROOT

from fastgpu.convert import writing
from fastgpu.convert.writer import WriteOptions, Writer
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.arrays import ArrayDataset


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


def test_rows_that_do_not_come_are_not_lost_in_silence(tmp_path, monkeypatch):
    def copy_some(source: Dataset, order: BlockSampler, writer: Writer, n_threads: int) -> None:
        writer.append({"x": np.arange(9)})

    monkeypatch.setattr(writing, "_copy_rows", copy_some)
    with pytest.raises(AssertionError, match="9 of 10 rows came"):
        writing.write_files({"": ArrayDataset("x", {"x": np.arange(10)})}, tmp_path / "x.h5", WriteOptions(), seed=0)
    assert not list(tmp_path.iterdir())
