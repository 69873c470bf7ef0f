"""Images that a CSV file lists or holds, as map-style Datasets."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.images.readers import ImageFiles
from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import read_splits
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
        files, *names = (name.strip() for name in columns)
        words = table.read(dict.fromkeys([files, *filter(None, [split_by])], pl.String))
        labels, attributes = parse_labels(table, names)
        paths = words[files].to_list()
        if n_repeated := len(paths) - len({*map(os.path.normpath, paths)}):
            print(f"lines of {path} whose image an earlier line names, perhaps for another split: {n_repeated:,}")
        super().__init__(str(path), path.parent, paths, prepared, labels=labels, encoded=encoded)
        self.attributes |= attributes
        if split_by:
            self.splits = read_splits(str(path), words[split_by].to_list())


class PixelTable(Reader):
    """A CSV whose rows are square grey images: a column for each pixel (MNIST), or one with all of them (FER2013).

    label: its column. None: `label`, or the one column beside `pixels` and split_by. All pixels are in memory. Raises
    UserError with the line of what is no row of pixels.
    """

    def __init__(self, path: str | Path, *, label: str | None = None, split_by: str | None = None):
        table = Table(Path(path))
        others = [name for name in table.names if name not in ("pixels", label, split_by)]
        if not label:
            if len(others) != 1 and "label" not in others:
                raise UserError(f"{path} has the columns {list_first(table.names)}; name that of the label by --label")
            label = "label" if "label" in others else others[0]
            others.remove(label)
        numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in others]
        if "pixels" in table.names:
            rows = _unpack(table, "pixels")
        elif numbers == sorted(numbers):
            rows = table.read(dict.fromkeys(others, pl.UInt8)).to_numpy()
        else:
            raise UserError(f"{path} has columns of pixels in another order than their numbers; put them into it")
        side = isqrt(rows.shape[1])
        if side**2 != rows.shape[1]:
            raise UserError(f"{path} has {rows.shape[1]:,} pixels in a row, which are no square; save arrays (.npy)")
        labels, attributes = parse_labels(table, [label])
        super().__init__(str(path), len(labels), labels)
        self.images = np.ascontiguousarray(rows).reshape(-1, 1, side, side)
        self.attributes |= attributes
        if split_by:
            self.splits = read_splits(str(path), table.read({split_by: pl.String})[split_by].to_list())

    def __getitem__(self, row: int) -> dict[str, Any]:
        assert self.labels is not None
        return {"images": self.images[row], "labels": self.labels[row]}


def _unpack(table: Table, name: str) -> np.ndarray:
    """The pixels (rows, pixels) of a column of numbers that are separated by spaces."""
    texts = table.read({name: pl.String})[name]
    rows = [np.empty(0, np.uint8)] * len(texts)
    for row, text in enumerate(texts):
        with suppress(ValueError, OverflowError):
            rows[row] = np.array(text.split(), np.uint8)
    n_pixels = max(map(len, rows))
    is_right = np.array([len(row) == n_pixels for row in rows])
    table.check(texts, is_right, f"it should be {n_pixels:,} whole numbers from 0 to 255")
    return np.stack(rows)
