"""Parquet files, read by polars one row group at a time, so that files of any size take the memory of a few groups.

polars returns the columns of a file, but not the sizes of its row groups. They are in the footer of the file, a struct
in Thrift's compact protocol (https://github.com/apache/parquet-format, `FileMetaData`).
"""

import json
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from fastgpu.convert.reader import explain_errors
from fastgpu.convert.tables import TextColumns
from fastgpu.process.content import describe_content, open_regular
from fastgpu.process.launch import UserError, list_first
from fastgpu.storage.file import is_url
from fastgpu.storage.hdf5 import expand

MAGIC = b"PAR1"
TAIL_BYTES = 8
"""At the end of a file: the length of the footer, and MAGIC."""
NUM_ROWS, ROW_GROUPS = 3, 4
"""Numbers of fields of `FileMetaData`."""
GROUP_ROWS = 3
"""Number of the field of `RowGroup` that holds its number of rows."""
RECENT_BYTES = 256 << 20
"""Maximum size of the row groups in memory; the last two are always kept."""


class ParquetFiles:
    """The rows of one or more Parquet files with the same columns, file after file in the order of their names.

    Raises UserError for files that are damaged, or have no rows.
    """

    def __init__(self, source: str | Path):
        """source: a file, or a pattern such as `part-*.parquet`."""
        self.name = str(source)
        if is_url(self.name):
            raise UserError(f"{self.name} is a URL; copy Parquet files to a disk first")
        self.files = [Path(file) for file, _ in expand("SOURCE", self.name)]
        groups = [_Group(file, *rows) for file in self.files for rows in _read_groups(file)]
        self._groups = [group for group in groups if group.n_rows]
        if not self._groups:
            raise UserError(f"{self.name} has no rows; write at least one")
        self.group_rows = np.array([group.n_rows for group in self._groups])
        """(groups,) int64: number of rows in each row group."""
        self._starts = np.cumsum(self.group_rows) - self.group_rows
        self.schema = _read_schema(self.files[0])
        """{column: its type}"""

    def __len__(self) -> int:
        return int(self.group_rows.sum())

    def check(self, columns: Sequence[str]) -> None:
        """Raise UserError unless all files have these columns, with the types that they have in the first one."""
        if unknown := [name for name in columns if name not in self.schema]:
            raise UserError(f"{self.name} has no column {unknown[0]}, but {list_first([*self.schema])}")
        for file in self.files[1:]:
            schema = _read_schema(file)
            for name in columns:
                found, expected = schema.get(name), self.schema[name]
                if found != expected:
                    state = f"has {name} as {found}" if found else f"has no column {name}"
                    raise UserError(f"{file} {state}; in {self.files[0]} it is {expected}: write all files alike")

    def read(self, group: int, columns: Sequence[str]) -> pl.DataFrame:
        """The rows of a row group, by its number. Any thread may call this. Raises UserError if it is damaged."""
        return self._read(*self._groups[group], columns=columns)

    def _read(self, file: Path, start: int, n_rows: int, *, columns: Sequence[str]) -> pl.DataFrame:
        with explain(file):
            # A path is no pattern here, and folders such as year=2024 are no columns.
            rows = pl.scan_parquet(file, glob=False, hive_partitioning=False).select(columns)
            frame = rows.slice(start, n_rows).collect()
            if len(frame) != n_rows:
                raise ValueError(f"{n_rows:,} rows should begin at row {start:,}, and {len(frame):,} do")
            if changed := [name for name in columns if frame.schema[name] != self.schema[name]]:
                raise ValueError(f"{changed[0]} is {frame.schema[changed[0]]}, not {self.schema[changed[0]]}")
        return frame

    def frames(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Some columns of all rows, one row group at a time."""
        for group in range(len(self._groups)):
            yield self.read(group, columns)

    def column(self, name: str) -> pl.Series:
        """A column of all rows, which should fit into memory."""
        # Whole files: polars reads the footer again in each call, and many small row groups make it long.
        rows_of = {file: sum(group.n_rows for group in groups) for file, groups in groupby(self._groups, _file_of)}
        return pl.concat([self._read(file, 0, n_rows, columns=[name])[name] for file, n_rows in rows_of.items()])

    def texts(self, names: Sequence[str], broken: dict[int, str]) -> TextColumns:
        """Columns of numbers or text, as text. broken: see `TextTable`. Raises UserError for other types."""
        columns = {}
        for name in names:
            kind = self.schema[name]
            if not (kind.is_numeric() or kind in (pl.Boolean, pl.String, pl.Categorical, pl.Enum)):
                cure = "labels and splits are numbers or text: write such a column, or name another one"
                raise UserError(f"{self.name}: {name} is {kind}; {cure}")
            column = self.column(name)
            columns[name] = (column.cast(pl.Int8) if kind == pl.Boolean else column).cast(pl.String)
        return TextColumns(columns, self.where, broken)

    def groups_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row group, row within it) of each of these rows, (n,) each."""
        groups = np.searchsorted(self._starts, rows, "right") - 1
        return groups, rows - self._starts[groups]

    def origins(self, rows: np.ndarray) -> list[str]:
        """The origin of each row: its file, and its number in the file, from 0."""
        groups, places = self.groups_of(rows)
        found = [self._groups[group] for group in groups.tolist()]
        return [f"{group.file}: row {group.start + place}" for group, place in zip(found, places.tolist(), strict=True)]

    def where(self, row: int) -> str:
        """The origin of one row."""
        return self.origins(np.array([row]))[0]

    def folder_of(self, group: int) -> Path:
        """The folder of the file that has a row group."""
        return self._groups[group].file.parent

    def class_names(self, column: str) -> list[str] | None:
        """Names of the classes that the numbers of a column stand for, if the files have them.

        The library `datasets` writes them for columns of type ClassLabel. Raises UserError if two files differ.
        """
        names = _class_names(self.files[0], column)
        if other := next((file for file in self.files if _class_names(file, column) != names), None):
            raise UserError(
                f"{other} has other names of classes in {column} than {self.files[0]}: write all files alike"
            )
        return names


class RecentGroups:
    """Cache of recent row groups for several threads, most of whose rows are neighbours.

    A row group is read once for all threads that ask for it at about the same time.
    """

    def __init__(self, files: ParquetFiles, columns: Sequence[str]):
        self._files, self._columns = files, columns
        self._recent: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, group: int) -> pl.DataFrame:
        """A row group, by its number. Raises UserError if it is damaged."""
        with self._lock:
            entry = self._recent.setdefault(group, _Entry())
            self._recent.move_to_end(group)
            n_bytes = sum(each.n_bytes for each in self._recent.values())
            while len(self._recent) > 2 and n_bytes > RECENT_BYTES:
                n_bytes -= self._recent.popitem(last=False)[1].n_bytes
        with entry.lock:
            if entry.frame is None and not entry.error:
                try:
                    entry.frame = self._files.read(group, self._columns)
                    entry.n_bytes = int(entry.frame.estimated_size())
                except UserError as error:  # kept, since each row of the group will be asked for
                    entry.error = str(error)
            if entry.frame is None:
                raise UserError(entry.error)
            return entry.frame


class _Entry:
    """A row group in memory, or one that a thread is reading."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.frame: pl.DataFrame | None = None
        self.error = ""
        """The reason why it cannot be read."""
        self.n_bytes = 0


class _Group(NamedTuple):
    """A row group."""

    file: Path
    start: int
    """The number of its first row in the file."""
    n_rows: int


def _file_of(group: _Group) -> Path:
    return group.file


def _read_schema(file: Path) -> Mapping[str, pl.DataType]:
    with explain(file):
        return pl.read_parquet_schema(file)


def _class_names(file: Path, column: str) -> list[str] | None:
    with explain(file):
        text = pl.read_parquet_metadata(file).get("huggingface", "")
    try:
        names = json.loads(text)["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _read_groups(path: Path) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each row group of a file, from its footer. Raises UserError if it is damaged."""
    with explain(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read(TAIL_BYTES)
        if tail[4:] != MAGIC:
            kind = describe_content(path)
            is_cut = kind.startswith("a Parquet file")
            raise ValueError(
                "its end is missing: copy or write it again" if is_cut else f"it is {kind or 'no Parquet'}"
            )
        n_bytes = int.from_bytes(tail[:4], "little")
        if n_bytes > size - TAIL_BYTES - len(MAGIC):
            raise ValueError("its footer is damaged: copy or write it again")
        file.seek(size - TAIL_BYTES - n_bytes)
        try:
            footer = _CompactReader(file.read(n_bytes)).read_struct({NUM_ROWS: {}, ROW_GROUPS: {GROUP_ROWS: {}}})
            counts = [group[GROUP_ROWS] for group in footer.get(ROW_GROUPS, [])]
            is_right = sum(counts) == footer[NUM_ROWS] and min(counts, default=0) >= 0
        except (LookupError, TypeError, ValueError, RecursionError):
            is_right = False
        if not is_right:
            raise ValueError("its footer is damaged: copy or write it again")
    start = 0
    for count in counts:
        yield start, count
        start += count


class _CompactReader:
    """Reads a struct in Thrift's compact protocol. Raises LookupError or ValueError for damaged bytes."""

    TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

    def __init__(self, content: bytes):
        self._content = content
        self._at = 0

    def read_struct(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """{field: value} of the wanted fields. wanted: {field: the wanted fields of its struct}."""
        found: dict[int, Any] = {}
        field = 0
        while byte := self._read_byte():
            kind = byte & 15
            field = field + (byte >> 4) if byte >> 4 else self._read_int()
            value = kind == self.TRUE if kind <= self.FALSE else self._read(kind, wanted.get(field, {}))
            if field in wanted:
                found[field] = value
        return found

    def _read(self, kind: int, wanted: Mapping[int, Any]) -> Any:
        if kind <= self.BYTE:
            return self._read_byte()
        if kind <= self.I64:
            return self._read_int()
        if kind == self.DOUBLE:
            return struct.unpack("<d", self._read_bytes(8))[0]
        if kind == self.BINARY:
            return self._read_bytes(self._read_varint())
        if kind in (self.LIST, self.SET):
            byte = self._read_byte()
            count = byte >> 4 if byte >> 4 < 15 else self._read_varint()
            return [self._read(byte & 15, wanted) for _ in range(count)]
        if kind == self.STRUCT:
            return self.read_struct(wanted)
        raise ValueError(f"there is a value of type {kind}")

    def _read_byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _read_bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._content):
            raise IndexError("it ends inside of a value")
        return self._content[self._at - count : self._at]

    def _read_varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._read_byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    def _read_int(self) -> int:
        number = self._read_varint()
        return number >> 1 ^ -(number & 1)


@contextmanager
def explain(file: Path) -> Iterator[None]:
    """Turn errors of polars into a UserError that names the file. Several threads may be in such a block."""
    with explain_errors(file, "Parquet"):
        try:
            with _SilentPanics():
                yield
        except pl.exceptions.PanicException as error:  # a BaseException
            raise ValueError(str(error)) from None


class _SilentPanics:
    """Hides standard error while any thread is in such a block: Rust prints a panic before it becomes an exception."""

    _lock = threading.Lock()
    _n_inside = 0
    _stderr = -1

    def __enter__(self) -> None:
        with self._lock:
            if not _SilentPanics._n_inside:
                _SilentPanics._stderr = os.dup(2)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                os.close(null)
            _SilentPanics._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            _SilentPanics._n_inside -= 1
            if not _SilentPanics._n_inside:
                os.dup2(_SilentPanics._stderr, 2)
                os.close(_SilentPanics._stderr)
