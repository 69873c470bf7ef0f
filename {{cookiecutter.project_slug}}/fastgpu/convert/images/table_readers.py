"""Images that a CSV file lists or holds, as map-style Datasets."""

import os
import re
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.images.readers import ImageFiles
from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import group_splits
from fastgpu.convert.tables import Table, parse_labels
from fastgpu.images.parts import Preprocessing
from fastgpu.process.launch import UserError


class ImageTable(ImageFiles):
    """A CSV with a file and its labels in each line.

    columns: names of the column with the files and of those with labels, which `parse_labels` describes. split_by: name
    of the column that says train, val or test. Paths begin at the folder of the CSV. Raises UserError with the line if
    something is missing or wrong.
    """

    def __init__(
        self,
        path: str | Path,
        prepared: Preprocessing = Preprocessing(),  # noqa: B008 (immutable)
        *,
        columns: Sequence[str] = ("path", "label"),
        split_by: str | None = None,
        encoded: bool = False,
    ):
        if len(columns) < 2:
            raise UserError(f"--columns is {','.join(columns)}; it should be two names or more: PATH,LABEL")
        path = Path(path)
        table = Table(path)
        columns = [name.strip() for name in columns]
        files, *names = columns
        words = table.read(dict.fromkeys([files, *filter(None, [split_by])], pl.String))
        labels, attributes = parse_labels(table, names)
        paths = words[files].to_list()
        if n_repeated := len(paths) - len({*map(os.path.normpath, paths)}):
            print(f"lines of {path} whose image an earlier line names, perhaps for another split: {n_repeated:,}")
        super().__init__(str(path), path.parent, paths, prepared, labels=labels, encoded=encoded)
        self.attributes |= attributes
        if split_by:
            self.splits = group_splits(path, words[split_by].to_list())
        if unused := [name for name in table.names if name not in (*columns, split_by)]:
            print(f"columns that are not used: {list_first(unused)}")


PIXEL_COLUMN = re.compile(r"(pixel|px|p)?[ _]?\d+([x_]\d+)?", re.IGNORECASE)
"""Names of the columns of pixels, such as pixel0, px_17 and 1x28."""


class PixelTable(Reader):
    """A CSV whose rows are square grey images: a column for each pixel (MNIST), or one with all of them (FER2013).

    label: its column. None: the one column that is neither pixels nor split_by. All pixels are in memory. Raises
    UserError with the line of what is no row of pixels.
    """

    def __init__(self, path: str | Path, *, label: str | None = None, split_by: str | None = None):
        self.name = str(path)
        table = Table(Path(path))
        named = [name for name in table.names if PIXEL_COLUMN.fullmatch(name) and name not in (label, split_by)]
        numbers = [list(map(int, re.findall(r"\d+", name))) for name in named]
        if numbers != sorted(numbers):
            raise UserError(f"{path} has columns of pixels in another order than their numbers; put them into it")
        pixels = named or [name for name in table.names if name.lower() == "pixels"]
        labels = [label] if label else [name for name in table.names if name not in (*pixels, split_by)]
        if len(labels) != 1 or not pixels:
            found = f"{path} has the columns {list_first(table.names)}"
            cure = "pixel0, pixel1, ... or one column `pixels`; --label and --split-by name two others"
            raise UserError(f"{found}; it should have columns of pixels, {cure}")
        rows = table.read(dict.fromkeys(named, pl.UInt8)).to_numpy() if named else _unpack(table, pixels[0])
        side = isqrt(rows.shape[1])
        if side**2 != rows.shape[1]:
            raise UserError(f"{path} has {rows.shape[1]:,} pixels in a row, which are no square; save arrays (.npy)")
        self.images = np.ascontiguousarray(rows).reshape(-1, 1, side, side)
        self.labels, self.attributes = parse_labels(table, labels)
        if split_by:
            self.splits = group_splits(Path(path), table.read({split_by: pl.String})[split_by].to_list())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        assert self.labels is not None
        return {"images": self.images[row], "labels": self.labels[row]}


def _unpack(table: Table, name: str) -> np.ndarray:
    """The pixels (rows, pixels) of a column of numbers that are separated by spaces."""
    texts = table.read({name: pl.String})[name]
    rows = [_parse_pixels(text) for text in texts]
    n_pixels = max(map(len, rows))
    is_right = np.array([len(row) == n_pixels for row in rows])
    table.check(texts, is_right, f"it should be {n_pixels:,} whole numbers from 0 to 255")
    return np.stack(rows)


def _parse_pixels(text: str) -> np.ndarray:
    """(pixels,) uint8; empty if the text is something else."""
    try:
        return np.array(text.split(), np.uint8)
    except (ValueError, OverflowError):
        return np.empty(0, np.uint8)
