"""Images that a CSV file lists or holds, as map-style Datasets."""

import os
import re
from collections.abc import Sequence
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.images.readers import ImageFiles, Kept
from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import group_splits
from fastgpu.convert.tables import Table, parse_labels
from fastgpu.images.files import Preprocessing
from fastgpu.process.launch import UserError


class ImageTable(ImageFiles):
    """A CSV with a file and its labels in each line.

    columns: names of the column with the files and of those with labels, which `parse_labels` describes. split_by: name
    of the column that says train, val or test. root: folder that the files lie in. Raises UserError with the line if
    something is missing or wrong.
    """

    def __init__(
        self,
        path: str | Path,
        prepared: Preprocessing | Kept = Preprocessing(),  # noqa: B008 (immutable)
        *,
        columns: Sequence[str] = ("path", "label"),
        split_by: str | None = None,
        n_classes: int | None = None,
        root: Path | None = None,
    ):
        if len(columns) < 2:
            raise UserError(f"--columns is {','.join(columns)}; it should be two names or more: PATH,LABEL")
        path = Path(path)
        table = Table(path)
        files, *names = columns
        paths = table.read(dict.fromkeys([files, *filter(None, [split_by])], pl.String))
        labels, attributes = parse_labels(table, names, n_classes)
        if n_repeated := len(paths) - len(set(map(os.path.normpath, paths[files]))):
            print(
                f"lines of {path} whose image an earlier line names, too, and perhaps for another split: {n_repeated:,}"
            )
        super().__init__(str(path), root or path.parent, paths[files].to_list(), prepared)
        self.labels = labels
        self.attributes |= attributes
        if split_by:
            self.splits = group_splits(path, paths[split_by].to_list())
        if unused := [name for name in table.names if name not in (*columns, split_by)]:
            print(f"columns that are not used: {list_first(unused)}")


PIXEL_COLUMN = re.compile(r"(pixel|px|p)?[ _]?\d+([x_]\d+)?", re.IGNORECASE)
"""Names of the columns of pixels, such as pixel0, px_17 and 1x28."""


class PixelTable(Reader):
    """A CSV whose rows are images: a column for each pixel (MNIST), or one with all of them (FER2013).

    label: its column. None: the one column that is neither pixels nor split_by. shape: (C, H, W). None: a square. All
    pixels are in memory. Raises UserError with the line of what is no row of pixels.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        label: str | None = None,
        split_by: str | None = None,
        shape: tuple[int, int, int] | None = None,
        n_classes: int | None = None,
    ):
        self.name = str(path)
        table = Table(Path(path))
        if table.names and all(name.lstrip("-").isdecimal() for name in table.names):
            raise UserError(f"{path} has numbers in its first line, which should name the columns: label,pixel0,...")
        named = [name for name in table.names if PIXEL_COLUMN.fullmatch(name) and name not in (label, split_by)]
        numbers = [list(map(int, re.findall(r"\d+", name))) for name in named]
        if numbers != sorted(numbers):
            raise UserError(f"{path} has columns of pixels in another order than their numbers; put them into it")
        packed = [] if named else [name for name in table.names if name.lower() == "pixels"]
        labels = [label] if label else [name for name in table.names if name not in (*named, *packed, split_by)]
        if len(labels) != 1 or not (named or packed):
            found = f"{path} has the columns {list_first(table.names)}"
            cure = "pixel0, pixel1, ... or one column `pixels`, and --label and --split-by name two others"
            raise UserError(f"{found}; it should have columns of pixels: {cure}")
        self.images = (
            self._unpack(table, packed[0]) if packed else table.read(dict.fromkeys(named, pl.UInt8)).to_numpy()
        )
        n_pixels = self.images.shape[1]
        side = isqrt(n_pixels)
        if prod(shape or (1, side, side)) != n_pixels:
            given = f"but --shape has {prod(shape):,}" if shape else "which is no square; give --shape CxHxW"
            raise UserError(f"{path} has {n_pixels:,} pixels in a row, {given}")
        if not shape:
            print(f"{n_pixels:,} pixels in a row are taken for 1x{side}x{side} (--shape)")
        self.images = np.ascontiguousarray(self.images).reshape(-1, *(shape or (1, side, side)))
        self.labels, self.attributes = parse_labels(table, labels, n_classes)
        if split_by:
            self.splits = group_splits(Path(path), table.read({split_by: pl.String})[split_by].to_list())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        assert self.labels is not None
        return {"images": self.images[row], "labels": self.labels[row]}

    @staticmethod
    def _unpack(table: Table, name: str) -> np.ndarray:
        """The pixels (rows, pixels) of a column of numbers that are separated by spaces."""
        rows: list[np.ndarray] = []
        for row, text in enumerate(table.read({name: pl.String})[name]):
            try:
                values = np.array(text.split(), np.int64)
            except (ValueError, OverflowError):
                raise table.error(row, "the pixels are not whole numbers") from None
            if values.min() < 0 or values.max() > 255:
                raise table.error(row, f"a pixel is {values[(values < 0) | (values > 255)][0]}; allowed are 0 to 255")
            if rows and len(values) != len(rows[0]):
                raise table.error(row, f"{len(values):,} pixels, but the first row has {len(rows[0]):,}")
            rows.append(values.astype(np.uint8))
        return np.stack(rows)
