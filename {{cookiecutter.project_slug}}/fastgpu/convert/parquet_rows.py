"""Rows from Parquet files with columns of numbers, arrays of one shape, or lists of any length."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from fastgpu.convert.command import split_name
from fastgpu.convert.parquet import ParquetFiles, RecentGroups
from fastgpu.convert.reader import Reader
from fastgpu.dataset.items import Columns
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.layout import COLUMN_BYTES

CURES = {
    pl.String: "number texts: {}.rank('dense') - 1",
    pl.Categorical: "take its numbers: {}.to_physical()",
    pl.Enum: "take its numbers: {}.to_physical()",
    pl.Date: "take days: {}.dt.epoch('d')",
    pl.Datetime: "take seconds: {}.dt.epoch('s')",
    pl.Time: "take nanoseconds: {}.to_physical()",
    pl.Duration: "take seconds: {}.dt.total_seconds()",
    pl.Decimal: "take floats: {}.cast(pl.Float64)",
    pl.Struct: "make columns of its members: table.unnest",
    pl.Null: "fill it in",
    pl.Binary: "`convert.py images` takes images",
}
"""{type: how polars converts it to numbers}"""
TOO_WIDE = ("Int128", "UInt128")


class Kind(NamedTuple):
    """The type of a column."""

    dtype: np.dtype
    shape: tuple[int, ...]
    """Shape of a row, or of each value in a list."""
    is_list: bool


def open_parquet(sources: Sequence[str], *, channels_last: bool = False, split_by: str = "") -> "ParquetRows":
    """Fields of Parquet files: of all columns of `x.parquet`, or of some: `name=x.parquet::column`.

    x.parquet may be a pattern. Raises UserError unless all sources name columns of the same files.
    """
    columns: dict[str, str] = {}
    paths = set()
    for source in sources:
        name, path = split_name(source)
        path, _, column = path.partition("::")
        paths.add(path)
        if column:
            columns[name or column] = column
        elif name or len(sources) > 1:
            raise UserError(f"{source} should be name=x.parquet::column, or x.parquet alone for all of its columns")
    if len(paths) > 1:
        cure = "name a table by one pattern, such as 'part-*.parquet', and write other arrays into its columns"
        raise UserError(f"the sources are {', '.join(sorted(paths))}; {cure}")
    return ParquetRows(paths.pop(), columns, channels_last=channels_last, split_by=split_by)


class ParquetRows(Reader):
    """Columns of Parquet files. A block is a row group. Rows with a null are broken.

    If all lists of a column have one length, they become arrays. Raises UserError for columns of other types.
    """

    def __init__(
        self, source: str, columns: Mapping[str, str] | None = None, *, channels_last: bool = False, split_by: str = ""
    ):
        """columns: {field: column}; empty: all columns. channels_last: rows (H, W, C) become (C, H, W). split_by: the
        column `split_by` of a `Reader`; it is not written if it is text."""
        self._files = ParquetFiles(source)
        self._columns = dict(columns or {name: name for name in self._files.schema})
        self._files.check([*self._columns.values(), *filter(None, [split_by])])
        broken: dict[int, str] = {}
        if split_by:
            self.split_by = self._files.texts([split_by], broken).split_column(split_by)
            if split_by in self._columns and not self._files.schema[split_by].is_numeric():
                del self._columns[split_by]
                print(f"{split_by} is text, which rows cannot hold: it decides the split, and is not written")
        super().__init__(source, self._files.group_rows, broken=broken)
        self._recent = RecentGroups(self._files, sorted({*self._columns.values()}))
        self._kinds = {name: _kind_of(self._files, column) for name, column in self._columns.items()}
        mean_values = self._measure_lists()
        self._turned = [name for name, kind in self._kinds.items() if channels_last and len(kind.shape) == 3]
        if channels_last and not self._turned:
            raise UserError("--layout nhwc has no effect: no field has four axes (N, H, W, C); leave it out")
        self.fields = {name: self._field(name, mean_values.get(name)) for name in self._kinds}
        if class_names := self._files.class_names(self._columns.get("labels", "")):
            self.attributes["class_names"] = class_names

    def _field(self, name: str, mean_values: float | None) -> Field:
        dtype, shape, _ = self._kinds[name]
        return Field(dtype, (shape[2], *shape[:2]) if name in self._turned else shape, mean_values)

    def _measure_lists(self) -> dict[str, float]:
        """{field: mean number of values in a list}. In `_kinds`, lists that all have one length become arrays.

        Reads all columns of lists once.
        """
        lists = {name: column for name, column in self._columns.items() if self._kinds[name].is_list}
        lengths = {name: pl.Series([], dtype=pl.UInt32) for name in lists}
        n_values = dict.fromkeys(lists, 0)
        for frame in self._files.frames(sorted({*lists.values()})) if lists else ():
            for name, column in lists.items():
                counts = frame[column].list.len().drop_nulls()
                n_values[name] += int(counts.sum())
                lengths[name] = lengths[name].append(counts.unique()).unique()
        for name, found in lengths.items():
            if len(found) == 1 and found[0]:
                dtype, shape, _ = self._kinds[name]
                self._kinds[name] = Kind(dtype, (found[0], *shape), False)
        return {name: count / len(self) for name, count in n_values.items() if self._kinds[name].is_list}

    def stored_column(self, name: str) -> np.ndarray | None:
        """See `Dataset`. The values of broken rows are 0."""
        field = self.fields.get(name)
        if field is None or field.is_ragged or field.shape or len(self._files) * field.row_bytes > COLUMN_BYTES:
            return None
        return self._files.column(self._columns[name]).fill_null(strategy="zero").to_numpy()

    def where(self, row: int) -> str:
        return self._files.where(row)

    def origins(self, row_ids: np.ndarray) -> list[str]:
        return self._files.origins(row_ids)

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """See `Reader`. Rows of one row group should be neighbours."""
        groups, places = self._files.groups_of(rows)
        borders = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
        pieces = [
            self._read_group(int(groups[start]), places[start:stop], rows[start:stop])
            for start, stop in pairwise(borders)
        ]
        columns: Columns = {}
        for name, field in self.fields.items():
            values = np.concatenate([piece[name].values for piece in pieces])
            if field.is_ragged:
                counts = np.concatenate([piece[name].counts for piece in pieces])
                columns[name] = RaggedArray(values, np.append(0, np.cumsum(counts)))
            else:
                columns[name] = np.moveaxis(values, 3, 1) if name in self._turned else values
        return columns

    def _read_group(self, group: int, places: np.ndarray, rows: np.ndarray) -> dict[str, "Values"]:
        """{field: values} of some rows of a row group. Broken rows are 0, or empty lists."""
        try:
            frame = self._recent[group][places]
        except UserError as error:
            self._note(rows, str(error))
            return {name: Values.none(kind, len(rows)) for name, kind in self._kinds.items()}
        found = {name: Values.of(frame[column], self._kinds[name]) for name, column in self._columns.items()}
        for name, values in found.items():
            self._note(rows[values.has_null], f"{name} is null or has a null in it")
        has_null = np.any([values.has_null for values in found.values()], axis=0)
        return {name: values.without(has_null, self._kinds[name]) for name, values in found.items()}

    def _note(self, rows: np.ndarray, reason: str) -> None:
        for row in rows.tolist():
            self.broken.setdefault(row, f"{self.where(row)} cannot be read: {reason}")


class Values(NamedTuple):
    """The values of some rows in one column."""

    values: np.ndarray
    """(rows, *shape); for lists (sum of counts, *shape)."""
    counts: np.ndarray
    """(rows,) length of each list; 1 if the column has no lists."""
    has_null: np.ndarray
    """(rows,) bool: whether the row is null or has a null in it."""

    @classmethod
    def none(cls, kind: Kind, n_rows: int) -> "Values":
        """Zeros, or empty lists."""
        values = np.zeros((0 if kind.is_list else n_rows, *kind.shape), kind.dtype)
        return cls(values, np.full(n_rows, int(not kind.is_list)), np.zeros(n_rows, bool))

    @classmethod
    def of(cls, series: pl.Series, kind: Kind) -> "Values":
        """The values of a polars column. Nulls become 0."""
        has_null = series.is_null().to_numpy().copy()
        counts = series.list.len().fill_null(0).to_numpy() if kind.is_list else np.ones(len(series), np.int64)
        numbers = series.filter(pl.Series(~has_null & (counts > 0)))
        while numbers.dtype.is_nested():
            numbers = numbers.explode()
        is_null = numbers.is_null().to_numpy()
        numbers_per_row = np.where(has_null, 0, counts * prod(kind.shape))
        has_null[np.repeat(np.arange(len(series)), numbers_per_row)[is_null]] = True
        filled = numbers.fill_null(False if numbers.dtype == pl.Boolean else 0)
        values = filled.to_numpy().reshape(-1, *kind.shape)
        if not kind.is_list and len(values) < len(series):
            whole = np.zeros((len(series), *kind.shape), kind.dtype)
            whole[numbers_per_row > 0] = values
            values = whole
        return cls(values, counts, has_null)

    def without(self, is_broken: np.ndarray, kind: Kind) -> "Values":
        """The same rows. In a column of lists, broken rows become empty lists."""
        if not kind.is_list or not is_broken.any():
            return self
        values = self.values[np.repeat(~is_broken, self.counts)]
        return self._replace(values=values, counts=np.where(is_broken, 0, self.counts))


def _kind_of(files: ParquetFiles, name: str) -> Kind:
    """The type of a column. Raises UserError, with a cure, if the column has no numbers."""
    column = files.schema[name]
    kind: Any = column
    shape: tuple[int, ...] = ()
    is_list = isinstance(kind, pl.List)
    if is_list:
        kind = kind.inner
    if isinstance(kind, pl.Array):
        shape, kind = kind.shape, kind.inner
        while isinstance(kind, pl.Array):
            kind = kind.inner
    is_number = kind.is_integer() or kind.is_float() or kind == pl.Boolean
    if not is_number or str(kind) in TOO_WIDE:
        cure = next((cure for each, cure in CURES.items() if column == each), "write numbers, arrays or lists of them")
        cure = cure.format(f'pl.col("{name}")')
        others = f"or name the columns to take: x={files.name}::COLUMN"
        raise UserError(
            f"{files.name}: {name} is {column}, which is no number, array or list of numbers; {cure}, {others}"
        )
    if 0 in shape:
        raise UserError(f"{files.name}: {name} is {column}, which has no values; name other columns")
    return Kind(pl.Series([], dtype=kind).to_numpy().dtype, shape, is_list)
