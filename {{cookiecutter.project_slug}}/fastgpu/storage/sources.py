"""Where the rows of HDF5 files came from, as convert.py wrote it. Training does not ask."""

import h5py
import numpy as np

from fastgpu.storage.hdf5 import SOURCES, find, look_up, open_file, refuse_large
from fastgpu.storage.store import HDF5Dataset


def sources_of(rows: HDF5Dataset, row_ids: np.ndarray | slice = slice(None)) -> list[str]:
    """Where each of some rows came from; empty texts if their file does not say it."""
    found = []
    for (path, group), n_rows in zip(rows.files, rows.part_rows, strict=True):
        with open_file(path, path) as (_, file):
            data = look_up(find(file, group, h5py.Group, path), SOURCES, path)
            is_known = isinstance(data, h5py.Dataset) and data.shape == (n_rows,) and data.dtype.kind in "SO"
            refuse_large(f"{path}: {SOURCES}", n_rows * data.dtype.itemsize if is_known else 0)
            found.append(data[:] if is_known else np.zeros(n_rows, "S1"))
    return [text.decode(errors="backslashreplace") for text in np.concatenate(found)[row_ids].tolist()]
