"""Files of rows that are open, and fixtures that decide what the page cache holds."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fastgpu.storage import store as module
from fastgpu.storage.file import OpenFile
from fastgpu.storage.store import HDF5Dataset, open_store
from support.rows import DENSE_FIELDS


@pytest.fixture
def store(dense_file) -> Callable[..., HDF5Dataset]:
    """store(rows, ..., name=...) is a file that `dense_file` of these arguments makes, opened."""
    return lambda *sizes, **options: open_store("data.train", dense_file(*sizes, **options), DENSE_FIELDS)


@pytest.fixture
def open_x(tmp_path: Path) -> Callable[..., HDF5Dataset]:
    """open_x(values, ...) is a file with one dataset `x`, opened. chunk: its rows. options: those of h5py.

    Its name could be a pattern of other names.
    """
    path = str(tmp_path / "[1]x.h5")

    def open_file(values: np.ndarray, chunk: int | None = 8, **options: Any) -> HDF5Dataset:
        chunks = (chunk, *values.shape[1:]) if chunk else None
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, **{"chunks": chunks} | options)
        return open_store("data.train", path, {"x": "x"})

    return open_file


@pytest.fixture
def nothing_cached(monkeypatch) -> None:
    """No byte is in the page cache, so all rows are read by system calls."""
    monkeypatch.setattr(OpenFile, "cached", lambda *_: None)


@pytest.fixture
def all_cached(monkeypatch) -> None:
    """Every byte is in the page cache."""
    monkeypatch.setattr(OpenFile, "cached", lambda file, offset, count: file.mapped[offset : offset + count])


@pytest.fixture(params=["cached", "not cached", "around the page cache"])
def either_cached_or_not(request, monkeypatch) -> None:
    """All bytes are in the page cache, so rows are copied out of a mapping; then the same with none, and without it."""
    monkeypatch.setattr(module, "AROUND_PAGE_CACHE", 0.0 if request.param == "around the page cache" else math.inf)
    request.getfixturevalue("all_cached" if request.param == "cached" else "nothing_cached")
