"""Reads the file of a benchmark: as train.py opens data.train, or the bytes of its images."""

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import project  # noqa: F401

from fastgpu.feed.sources import open_splits
from fastgpu.process.config import Data, Loader
from fastgpu.rows.contract import Dataset

IMAGES = {"images": "images", "labels": "labels"}


def open_rows(path: Path, fields: Mapping[str, str] = IMAGES) -> Dataset:
    """The rows of one HDF5 file."""
    data = Data(train=str(path), val=str(path), fields=dict(fields))
    return open_splits(data, Loader(), 0)[0]


def rows_of(path: Path) -> list[np.ndarray]:
    """The bytes of each encoded image of a file."""
    with h5py.File(path) as file:
        return np.split(file["images/values"][:], file["images/indptr"][1:-1])
