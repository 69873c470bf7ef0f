import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import ALONE

from fastgpu.feed.sources import open_sources
from fastgpu.process.config import Data, Hdf5, Loader
from fastgpu.process.launch import UserError
from fastgpu.storage import trial

FIELDS = {"images": "images", "labels": "labels"}


def open_untrusted(path: str, fields: dict[str, str] = FIELDS) -> int:
    data = Data(train=path, val=path, fields=fields, trusted=False)
    return len(open_sources(data, Loader(), Hdf5(), ALONE)[0])


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """helper(code) replaces the module that the helper process runs."""

    def replace(code: str) -> None:
        (tmp_path / "fastgpu" / "storage").mkdir(parents=True)
        (tmp_path / "fastgpu" / "storage" / "trial.py").write_text(f"import os, sys, time\ndef main():\n    {code}\n")
        monkeypatch.setattr(trial, "ROOT", str(tmp_path))

    return replace


def test_a_crash_of_the_helper_process_is_one_line(write, helper):
    helper("os.abort()")
    with pytest.raises(UserError, match=r"data.train is .*rows.h5: opening it in a helper process ended with -6"):
        open_untrusted(write())


def test_a_helper_process_that_hangs_is_one_line(write, helper, monkeypatch):
    helper("time.sleep(600)")
    monkeypatch.setattr(trial, "TIME_LIMIT_S", 0.5)
    with pytest.raises(UserError, match="in a helper process took longer than 0.5 s"):
        open_untrusted(write())


def test_what_the_helper_process_refuses_is_said_in_its_words(write, helper):
    helper("sys.exit('error: data.train: it has no labels')")
    with pytest.raises(UserError, match="^data.train: it has no labels$"):
        open_untrusted(write())


@pytest.mark.slow
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused_and_others_open(write, tmp_path, monkeypatch):
    assert open_untrusted(write(20)) == 20
    path = tmp_path / "bomb.h5"
    n_rows = 2**31
    with h5py.File(path, "w") as file:
        group = file.create_group("items")
        indptr = group.create_dataset("indptr", (n_rows,), "i8", chunks=(1 << 20,), compression="gzip")
        zeros = zlib.compress(bytes(8 << 20))
        for start in range(0, n_rows, 1 << 20):
            indptr.id.write_direct_chunk((start,), zeros)
        group["indices"] = np.arange(10)
        group.attrs["shape"] = (n_rows - 1, 10)
    assert Path(path).stat().st_size < 32 << 20
    with pytest.raises(UserError, match="bomb.h5 asks for more memory than there is"):
        open_untrusted(str(path), {"items": "items"})
