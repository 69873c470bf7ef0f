"""CSV files: of paths and labels, which are classes, attributes or targets; or of pixels."""

import csv
import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.convert.images.image_files import Listing
from fastgpu.convert.reading import BrokenRowError, DecodedRows, OnError, explain_errors, group_splits, list_first
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import Field

DELIMITERS = (",", ";", "\t")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
MAX_WHOLE = 1e18
"""Larger whole numbers may not fit into 64 bits."""
MAX_DECIMAL = float(np.finfo(np.float32).max)
MAX_CLASSES = 1 << 20
"""Each class has a name in the file."""
MAX_UNUSED_CLASSES = 1000
"""Class numbers without a row. If there are more, the labels are likely not class numbers."""


def choose_delimiter(header: str, delimiter: str | None) -> str:
    """`delimiter` if it is given, otherwise the one that is most frequent in the header. Prints a guess but a comma."""
    if delimiter in ("\\t", "tab"):
        return "\t"
    if delimiter and len(delimiter) > 1:
        raise UserError(f"--delimiter is {delimiter}; it should be one character, or tab")
    if delimiter:
        return delimiter
    guess = max(DELIMITERS, key=header.count)
    if guess != ",":
        print(f"the columns are separated by {guess!r} (--delimiter)")
    return guess


def check_columns(path: Path, present: Sequence[str], wanted: Sequence[str], cure: str) -> None:
    """Raise UserError if the header does not have all `wanted` columns, each once."""
    for name in wanted:
        if present.count(name) != 1:
            problem = "no column" if name not in present else f"{present.count(name)} columns named"
            raise UserError(f"{path} has {problem} {name}; it has {list_first(present) or 'none'}; {cure}")


def read_table(
    path: Path, wanted: Sequence[str], delimiter: str | None, ignored: Collection[str] = ()
) -> tuple[dict[str, list[str]], list[int]]:
    """({column: words}, the line in which each row begins) of a CSV file with a header.

    The other columns are printed, because one of them may say the split, but not those in `ignored`. Raises UserError
    with the line of a missing value, a wrong number of columns or an open quote. Warns of line breaks.
    """
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    lines = []
    long_rows = []
    last_line = 0
    with explain_errors(path, "a CSV file of UTF-8 text"), path.open(newline="", encoding="utf-8-sig") as file:
        separator = choose_delimiter(file.readline(), delimiter)
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            check_columns(path, header, wanted, "name those to read with --columns PATH,LABEL")
            if unused := [name for name in header if name not in wanted and name not in ignored]:
                print(f"columns that are not used: {list_first(unused)}")
            places = {name: header.index(name) for name in wanted}
            last_line = reader.line_num
            for fields in reader:
                line, last_line = last_line + 1, reader.line_num
                if not fields:
                    continue
                check_width(path, line, fields, header)
                for name, place in places.items():
                    columns[name].append(_read_word(path, line, name, fields[place]))
                lines.append(line)
                if last_line > line:
                    long_rows.append(line)
        except csv.Error as error:
            raise UserError(f"{path}:{last_line + 1}: {error}; close the quotes, or double a stray one") from None
    if not lines:
        raise UserError(f"{path} has no rows below its header")
    if long_rows:
        warn(
            f"{path}:{long_rows[0]}: {len(long_rows):,} of {len(lines):,} rows, this one first, have line breaks in "
            "quotes; if this quote is a stray one, the lines up to the next quote are lost: double it"
        )
    return columns, lines


def check_width(path: Path, line: int, fields: Sequence[str], header: Sequence[str]) -> None:
    """Raise UserError if a row has more or fewer columns than the header."""
    if len(fields) != len(header):
        raise UserError(
            f"{path}:{line}: {len(fields):,} columns; its header has {len(header):,}; put quotes around a field that "
            "holds the character between the columns, or choose another with --delimiter"
        )


def _read_word(path: Path, line: int, column: str, text: str) -> str:
    """A value of a column. Raises UserError if it is missing or has several lines."""
    word = text.strip()
    if not word:
        raise UserError(f"{path}:{line}: {column} is missing")
    if len(text.splitlines()) > 1:
        raise UserError(f"{path}:{line}: {column} has a line break in quotes; remove it, or the stray quote")
    return word


def parse_labels(
    path: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[int], n_classes: int | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    n_classes: number of classes, if some of the numbers do not occur. Raises UserError with the line of a label that
    does not fit.
    """
    kinds = {name: _find_kind(path, name, words, lines) for name, words in columns.items()}
    names = list(columns)
    for name, words in columns.items():
        if kinds[name] == "name" and len(names) > 1:
            cure = "several columns of labels should be numbers: 0 and 1 for attributes, decimals for targets"
            raise UserError(f"{path}:{lines[0]}: {name} is {words[0]!r}; {cure}")
    if "decimal" in kinds.values():
        if n_classes:
            raise UserError(f"--classes is {n_classes}, but the labels of {path} are decimals, which are no classes")
        targets = np.array([[float(word) for word in words] for words in columns.values()], np.float32).T
        if len(names) == 1:
            return np.ascontiguousarray(targets[:, 0]), {}
        return np.ascontiguousarray(targets), {"target_names": names}
    if len(names) > 1:
        attributes = [_parse_attribute(path, name, words, lines) for name, words in columns.items()]
        return np.stack(attributes, axis=1), {"class_names": names}
    (words,) = columns.values()
    if kinds[names[0]] == "name":
        for line, word in zip(lines, words, strict=True):
            if word.lower() == "nan":
                cure = "drop the row, or name the class otherwise"
                raise UserError(f"{path}:{line}: {names[0]} is {word}, a missing value; {cure}")
        classes, numbers = np.unique(words, return_inverse=True)
        if n_classes and len(classes) > n_classes:
            raise UserError(f"--classes is {n_classes}, but {path} names {len(classes)} classes")
        return numbers.astype(np.int64), {"class_names": classes.tolist()}
    labels = [int(word) for word in words]
    return _parse_classes(path, labels, lines, n_classes)


def _find_kind(path: Path, name: str, words: Sequence[str], lines: Sequence[int]) -> str:
    """`whole`, `decimal` or `name`. Raises UserError if numbers and names are mixed."""
    is_number = [NUMBER.fullmatch(word) is not None for word in words]
    for line, word in zip(lines, words, strict=True):
        limit = MAX_WHOLE if WHOLE_NUMBER.fullmatch(word) else MAX_DECIMAL
        if NUMBER.fullmatch(word) and abs(float(word)) > limit:
            raise UserError(f"{path}:{line}: {name} is {word[:40]}; allowed are numbers up to {limit:.1g}, or names")
    if all(is_number):
        return "whole" if all(WHOLE_NUMBER.fullmatch(word) for word in words) else "decimal"
    odd = is_number.index(False)
    if any(is_number):
        number = is_number.index(True)
        problem = f"{name} is {words[odd]!r}, but {words[number]} in line {lines[number]}"
        cure = f"give numbers only, or names only (such as class_{words[number]})"
        raise UserError(f"{path}:{lines[odd]}: {problem}; {cure}")
    return "name"


def _parse_attribute(path: Path, name: str, words: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    values = [int(word) for word in words]
    allowed = (-1, 1) if -1 in values else (0, 1)
    for line, value in zip(lines, values, strict=True):
        if value not in allowed:
            cure = f"attributes: {allowed[0]} or 1 (for targets, write decimals such as 2.0)"
            raise UserError(f"{path}:{line}: {name} is {value}; several columns of labels are {cure}")
    return np.array([value == 1 for value in values], np.uint8)


def _parse_classes(
    path: Path, numbers: Sequence[int], lines: Sequence[int], n_classes: int | None
) -> tuple[np.ndarray, dict[str, Any]]:
    if not n_classes:
        n_classes = max(0, *numbers) + 1
        if n_classes > len(numbers) + MAX_UNUSED_CLASSES:
            line = lines[numbers.index(n_classes - 1)]
            problem = f"label {n_classes - 1} makes {n_classes:,} classes of {len(numbers):,} rows"
            raise UserError(
                f"{path}:{line}: {problem}; for targets, write decimals such as 2.0; otherwise give --classes"
            )
    if n_classes > MAX_CLASSES:
        raise UserError(f"{path} has {n_classes:,} classes; allowed are {MAX_CLASSES:,}: are the labels ids?")
    for line, number in zip(lines, numbers, strict=True):
        if number < 0:
            raise UserError(f"{path}:{line}: label {number} is below 0, with which classes begin")
        if number >= n_classes:
            raise UserError(f"{path}:{line}: label {number} is out of range; allowed are 0 to {n_classes - 1}")
    return np.array(numbers, np.int64), {"class_names": [str(number) for number in range(n_classes)]}


def list_csv(
    path: Path, columns: Sequence[str], n_classes: int | None, *, delimiter: str | None = None, split_by: str = ""
) -> Listing:
    """A CSV with a file and its labels in each line.

    columns: names of the column with the files and of those with labels, which `parse_labels` describes. split_by: name
    of the column that says train, val or test. Raises UserError with the line if something is missing or wrong.
    """
    if len(columns) < 2:
        raise UserError(f"--columns is {','.join(columns)}; it should be two names or more: PATH,LABEL")
    words, lines = read_table(path, [*columns, *filter(None, [split_by])], delimiter)
    labels, attributes = parse_labels(path, {name: words[name] for name in columns[1:]}, lines, n_classes)
    splits = group_splits(path, words[split_by], lines) if split_by else {}
    names = words[columns[0]]
    n_outside = sum(os.path.normpath(name).startswith(("/", "../")) for name in names)
    n_repeated = len(names) - len({os.path.normpath(name) for name in names})
    if n_repeated:
        print(f"lines of {path} whose image an earlier line names, too, and perhaps for another split: {n_repeated:,}")
    if n_outside:
        print(f"paths of {path} that are absolute or begin with ../, which are read as they are: {n_outside:,}")
    return Listing(str(path), names, labels, attributes, lines, splits=splits)


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
