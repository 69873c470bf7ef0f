"""CSV files whose rows are images: a column for each pixel (MNIST), or one column of numbers with spaces (FER2013)."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from math import isqrt, prod
from pathlib import Path

import numpy as np

from fastgpu.convert.images.image_files import Listing
from fastgpu.convert.images.tables import check_columns, check_width, choose_delimiter, parse_labels, read_table
from fastgpu.convert.reading import BrokenRowError, DecodedRows, OnError
from fastgpu.convert.splits import group_splits
from fastgpu.process.launch import UserError
from fastgpu.rows.field import Field

PIXEL_COLUMN = re.compile(r"(pixel|px|p)?[ _]?\d+([x_]\d+)?", re.IGNORECASE)
"""Names of the columns of pixels, such as pixel0, px_17 and 1x28."""


class PixelFile:
    """The pixels of a CSV file. Only the place of each line is kept in memory."""

    def __init__(self, path: Path, delimiter: str | None):
        self.path = path
        self._file = path.open("rb")
        with path.open(encoding="utf-8", newline="") as lines:  # so that lines end where they do for `read_table`
            header = lines.readline()
            sizes = (len(line.encode()) for line in chain([header], lines))
            self._borders = [0, *accumulate(sizes)]  # line n lies between the borders n - 1 and n
        header = header.lstrip("\ufeff")
        self.delimiter = choose_delimiter(header, delimiter)
        self.header = [name.strip() for name in self._parse(header)]
        self._columns: list[int] = []
        self.shape: tuple[int, ...] = ()

    def choose_columns(self, others: Sequence[str], shape: tuple[int, ...] | None) -> None:
        """Find the columns of pixels and their shape. others: columns that are not pixels."""
        line = next((line for line in range(2, len(self._borders)) if self._fields(line)), 0)
        if not line:
            raise UserError(f"{self.path} has no rows below its header")
        fields = self._fields(line)
        check_width(self.path, line, fields, self.header)
        places = [place for place, name in enumerate(self.header) if name not in others]
        packed = [place for place in places if re.fullmatch(r"\d+(\s+\d+)+", fields[place].strip())]
        named = [place for place in places if PIXEL_COLUMN.fullmatch(self.header[place])]
        self._columns = packed[:1] or named or places
        numbers = [list(map(int, re.findall(r"\d+", self.header[place]))) for place in named]
        if not packed and numbers != sorted(numbers):
            place = next(place for place, low, high in zip(named[1:], numbers, numbers[1:], strict=False) if high < low)
            raise UserError(
                f"{self.path} has the column {self.header[place]} behind {self.header[place - 1]}; put the columns of "
                "pixels into the order of their numbers: those of each row of the image from left to right"
            )
        try:
            n_pixels = len(self._numbers(fields))
        except ValueError:
            raise UserError(f"{self.path}: pixels of the first row are no whole numbers from 0 to 255") from None
        side = isqrt(n_pixels)
        self.shape = shape or (1, side, side)
        if prod(self.shape) != n_pixels:
            given = f"but --shape has {prod(shape):,}" if shape else "which is no square; give --shape CxHxW"
            raise UserError(f"{self.path} has {n_pixels:,} pixels in its first row, {given}")
        if shape is None:
            print(f"{n_pixels:,} pixels in a row are taken for 1x{side}x{side} (--shape)")

    @property
    def other_columns(self) -> list[str]:
        """Names of the columns that are not pixels."""
        return [name for place, name in enumerate(self.header) if place not in set(self._columns)]

    def read(self, line: int) -> np.ndarray:
        """The pixels of a line, uint8 (C, H, W). Thread-safe. Raises BrokenRowError if they are not 0 to 255."""
        fields = self._fields(line)
        check_width(self.path, line, fields, self.header)
        try:
            values = self._numbers(fields)
        except ValueError:
            raise BrokenRowError(f"{self.path}:{line}: the pixels are not whole numbers") from None
        if len(values) != prod(self.shape):
            raise BrokenRowError(f"{self.path}:{line}: {len(values):,} pixels, but --shape has {prod(self.shape):,}")
        if values.min() < 0 or values.max() > 255:
            value = values[(values < 0) | (values > 255)][0]
            raise BrokenRowError(f"{self.path}:{line}: a pixel is {value}; allowed are 0 to 255")
        return values.astype(np.uint8).reshape(self.shape)

    def _fields(self, line: int) -> list[str]:
        start, stop = self._borders[line - 1 : line + 1]
        return self._parse(os.pread(self._file.fileno(), stop - start, start).decode())

    def _parse(self, line: str) -> list[str]:
        return next(csv.reader([line], delimiter=self.delimiter), [])

    def _numbers(self, fields: Sequence[str]) -> np.ndarray:
        return np.fromstring(" ".join(fields[place] for place in self._columns), np.int64, sep=" ")


def list_pixels(
    file: PixelFile, *, label: str | None, split_by: str | None, shape: tuple[int, ...] | None, n_classes: int | None
) -> Listing:
    """The lines and labels of a CSV of pixels.

    label: its column. None: the one column that is neither pixels nor split_by. shape: (C, H, W). None: a square.
    """
    path = file.path
    if file.header and all(name.strip().lstrip("-").isdecimal() for name in file.header):
        raise UserError(f"{path} has numbers in its first line, which should name the columns: label,pixel0,pixel1,...")
    named = [name for name in (label, split_by) if name]
    check_columns(path, file.header, named, "choose with --label and --split-by")
    file.choose_columns(named, shape)
    labels = [label] if label else [name for name in file.other_columns if name != split_by]
    if len(labels) != 1:
        found = ", ".join(labels) or "of pixels alone"
        cure = "name that of the labels with --label, and that of the splits with --split-by"
        raise UserError(f"{path} has the columns {found}; {cure}")
    pixels = set(file.header) - set(file.other_columns)
    words, lines = read_table(path, [*labels, *filter(None, [split_by])], file.delimiter, pixels)
    splits = group_splits(path, words.pop(split_by), lines) if split_by else {}
    parsed, attributes = parse_labels(path, words, lines, n_classes)
    return Listing(str(path), (), parsed, attributes, lines, splits=splits)


class PixelRows(DecodedRows):
    """Rows `images`, uint8 (N, C, H, W), and `labels` of a CSV of pixels."""

    def __init__(self, file: PixelFile, listing: Listing, on_error: OnError):
        assert listing.labels is not None
        super().__init__(listing.source, len(listing.lines), {"labels": listing.labels}, on_error=on_error)
        self.attributes = listing.attributes
        self.fields = {"images": Field(np.dtype(np.uint8), file.shape)} | self.fields
        self._file = file
        self._lines = listing.lines

    def decode(self, row: int) -> Mapping[str, np.ndarray]:
        """The image. Thread-safe. Raises BrokenRowError with the line if it is not one."""
        return {"images": self._file.read(self._lines[row])}
