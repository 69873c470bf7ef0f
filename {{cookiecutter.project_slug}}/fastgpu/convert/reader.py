"""`Reader`: the base class of sources that convert.py writes, and how its messages name broken rows.

A row is broken if it cannot be read, or holds a wrong value. A reader keeps the reasons in `broken`, {row: reason}.
A table whose labels are parsed finds broken rows when it is made, and these rows are never read. Other readers find
them when they read: `__getitem__` raises an exception of any kind. `--on-error` treats both alike: it lists all
reasons, and writes no file, or only the other rows.

A reason begins with the origin of the row, which `where` returns and the dataset `fastgpu_source` stores:

    photos/cat/1.jpg              an image file
    labels.csv:7                  a line of a table with a wrong value, counted from 1
    part-0.parquet: row 7         a row of a file, counted from 0 over all row groups
    shard-0.tar::cat/1.jpg        a member of an archive
    mine:Photos called with photos: row 7     an item of a Dataset

Then follows the fault: ` cannot be read: ` and the error, or `: label is 'x'; ` and the allowed values.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.convert.broken import none_whole
from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemSource
from fastgpu.process.files import not_found
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.store import HDF5Dataset


class Reader(ItemSource):
    """A map-style Dataset that can be converted, or trained on as `data.dataset`.

    Your own reader has `__getitem__`, which returns {field: value} of one row. Several threads call it. It may raise
    an exception of any kind if the row is broken.
    """

    splits: np.ndarray | None = None
    """(rows,) places in SPLITS, if the source is split already."""
    split_by: np.ndarray | None = None
    """(rows,) texts or numbers: the column of --split-by. A random split keeps rows with the same value together, such
    as the images of a patient. Without a random split, the values are train, val or test."""
    encoded = False
    """Whether `images` are the bytes of image files."""

    def __init__(
        self,
        name: str,
        n_rows: int | np.ndarray,
        labels: np.ndarray | None = None,
        *,
        broken: dict[int, str] | None = None,
    ):
        """name: the source, for messages. n_rows: the number of rows, or (blocks,) the number of rows in each block
        that is read at once. labels: (rows,) or (rows, K). broken: see the head of the module."""
        self.name = name
        self.labels = labels
        self.attributes = {}
        self.block_rows = np.ones(n_rows, np.int32) if isinstance(n_rows, int) else n_rows.astype(np.int32)
        self.broken = {} if broken is None else broken
        self.known_broken = dict(self.broken)
        """The rows of `broken` that were found when the reader was made."""
        # {row: what the written row loses, such as transparency}
        self.losses: dict[int, list[str]] = {}

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, for a run with `data.dataset`."""
        return self.attributes.get("class_names")

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise NotImplementedError

    def split_by_pattern(self, pattern: str, paths: Sequence[str]) -> None:
        """Fill `split_by` with the text in each path that matches a regular expression, or with its first group.

        Rows whose path does not match are broken. Raises UserError if the pattern is not a regular expression.
        """
        try:
            found = [re.search(pattern, path) for path in paths]
        except re.error as error:
            raise UserError(f"--split-by is {pattern}, which is no regular expression: {error}") from None
        self.split_by = np.array([each[1 if each.re.groups else 0] or "" if each else "" for each in found])
        for row in np.flatnonzero(self.split_by == "").tolist():
            reason = f"{self.where(row)}: nothing in its path fits --split-by {pattern}"
            self.known_broken[row] = self.broken.setdefault(row, reason)

    def refuse(self, row: int) -> None:
        """Raise ValueError if a row was found to be broken when the reader was made."""
        if row in self.known_broken:
            raise ValueError(self.known_broken[row])

    def stored_column(self, name: str) -> np.ndarray | None:
        return self.labels if name == "labels" else None

    def where(self, row: int) -> str:
        """The origin of a row, for messages."""
        return f"{self.name}: row {row}"

    def origins(self, row_ids: np.ndarray) -> list[str]:
        """The origin of each row, which is stored with the rows."""
        return list(map(self.where, row_ids.tolist()))

    def facts(self) -> dict[str, Any]:
        """Attributes that are known only after all rows have been read."""
        return {}

    @cached_property
    def fields(self) -> dict[str, Field]:  # type: ignore[override]
        """The fields of the first row that is not broken. Raises UserError if all rows are broken."""
        n_rows = int(self.block_rows.sum())
        first = next(filter(None, (self._try(row, {}) for row in range(n_rows))), None)
        if not first:
            raise none_whole(self.name, self.broken)
        fields = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        if self.encoded:  # the mean length is estimated from a few rows
            items = [self._try(row, {}) for row in np.linspace(0, n_rows - 1, min(32, n_rows)).astype(int).tolist()]
            mean_bytes = float(np.mean([len(item["images"]) for item in items if item] or len(first["images"])))
            fields["images"] = Field(np.dtype(np.uint8), (), mean_bytes, codec="encoded")
        return fields

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """See `ItemSource`. Broken rows are zeros, or have no values. Any thread may call this."""
        zeros = {name: np.zeros(0 if each.is_ragged else each.shape, each.dtype) for name, each in self.fields.items()}
        items = [self._try(row, self.fields) or zeros for row in rows.tolist()]
        columns: Columns = {}
        for name, field in self.fields.items():
            values = [item[name] for item in items]
            if field.is_ragged:
                columns[name] = RaggedArray(np.concatenate(values), np.cumsum([0, *map(len, values)]))
            else:
                columns[name] = np.array(values, field.dtype)
        return columns

    def _try(self, row: int, fields: Mapping[str, Field]) -> dict[str, np.ndarray] | None:
        """The item of a row, checked against these fields. None: the row is broken."""
        if row in self.broken:
            return None
        try:
            item = {name: np.asarray(value) for name, value in self[row].items()}
            for name, field in fields.items():
                found = Field(item[name].dtype, item[name].shape)
                if found != field and not field.is_ragged:
                    raise ValueError(f"{name} are {found}, in the first row {field} (--size makes images alike)")
        except Exception as error:  # a decoder may raise anything for damaged bytes
            self.broken[row] = f"{self.where(row)} cannot be read: {error}"
            self.losses.pop(row, None)
            return None
        return item


def where_from(source: Dataset, row: int) -> str:
    """The origin of a row of any Dataset, for messages."""
    if isinstance(source, Reader):
        return source.where(row)
    if isinstance(source, HDF5Dataset):
        number = bisect_right(source.first_rows, row) - 1
        path, group = source.files[number]
        return f"{path}::{group}: row {row - source.first_rows[number]}"
    return f"{source.name}: row {row}"


@contextmanager
def explain_errors(path: str | Path, expected: str) -> Iterator[None]:
    """Turn errors of a missing or damaged file into a UserError. expected: the format that the file should have."""
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except FileNotFoundError:
        raise not_found(path) from None
    except Exception as error:  # parsers raise anything for damaged bytes
        raise UserError(f"{path} cannot be read as {expected}: {' '.join(str(error).split())[:200]}") from None
