"""Fixtures that write files whose rows carry their own numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from harness import ITEMS, numbered, ragged


@pytest.fixture
def write_ragged(tmp_path: Path) -> Callable[..., str]:
    """write_ragged(rows) -> path of an HDF5 file with `items`, a CSR matrix, and `number`, the row's own."""

    def make(rows: int = 100, name: str = "ragged.h5", start: int = 0, items: int = ITEMS, **options: Any) -> str:
        numbers = range(start, start + rows)
        found = ragged(numbers)
        with h5py.File(tmp_path / name, "w") as file:
            group = file.create_group("items")
            group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, items)})
            group["indptr"] = found.offsets
            group.create_dataset("indices", data=found.values, **options)
            file["number"] = np.array(numbers)
        return str(tmp_path / name)

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, chunk=..., ...) -> path of an HDF5 file with numbered `images` and `labels`."""

    def make(
        rows: int = 100,
        shape: tuple[int, ...] = (1, 4, 2),
        chunk: int | None = 8,
        name: str = "rows.h5",
        start: int = 0,
        classes: int = 4,
        **options: Any,
    ) -> str:
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            chunks = (min(chunk, rows), *shape) if chunk else None
            file.create_dataset("images", data=numbered(rows, shape, start), chunks=chunks, **options)
            file["labels"] = np.arange(start, start + rows) % classes
        return str(path)

    return make
