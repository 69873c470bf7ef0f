"""The rows of HDF5 files as blocks that any number of threads can read.

h5py reads the metadata once: type, shape and the place of each chunk in the file. The rows are read without it, because
the HDF5 library holds one lock over all its reads: two threads read as fast as one through h5py, and 1.8x as fast by
`preadv`. How the rows of one dataset are read is in layout.py, and which datasets a field has in csr.py.
"""

import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Out, PoolPlan
from fastgpu.rows.rows import Field
from fastgpu.storage.columns import Column, ColumnDataset, InMemory, RaggedColumn
from fastgpu.storage.csr import open_field, read_indptr, warn_of_unread_values
from fastgpu.storage.file import split_group
from fastgpu.storage.hdf5 import attributes_of, open_file, open_group
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, ReadOptions
from fastgpu.storage.meaning import check_meaning

AROUND_PAGE_CACHE = 1.5
"""Files of more than this times the free memory are read around the page cache, which could keep a few blocks at most
until the next epoch asks for them: under a third of them, if the blocks come in random order."""


class HDF5Dataset(ColumnDataset):
    """The rows of one or more HDF5 files, one file after the other. Safe to use after a fork.

    `attributes` are those of the first file or group, but `mean` and `std` are of all rows.
    """

    def __init__(self, files: Sequence["_File"]):
        first = files[0]
        self._files = files
        self.parts = [file.columns for file in files]
        self.part_rows = [int(file.block_rows.sum()) for file in files]
        self.name = first.name
        if len(files) > 1:
            self.name += f" and {len(files) - 1} more"
        self.attributes: dict[str, Any] = first.attributes | _pool_statistics(files)
        self.around_page_cache = first.largest.is_around_page_cache
        """Whether rows are read from the disk in each epoch, because the memory could not keep them."""
        self.block_rows = np.concatenate([file.block_rows for file in files])
        self.fields: dict[str, Field] = {name: column.field for name, column in first.columns.items()}
        self.lengths = {}
        for name, field in self.fields.items():
            if field.is_ragged:
                lengths = np.concatenate([file.lengths(name) for file in files])
                self.lengths[name] = lengths
                codecs = {codec for file in files for codec in file.columns[name].field.codec.split("+")}
                self.fields[name] = field._replace(  # over all files
                    mean_values=float(lengths.mean()), codec="+".join(sorted(codecs))
                )

    @cached_property
    def digest(self) -> str:
        """Of all rows if the files have checksums, else of some. Raises UserError."""
        return hashlib.sha256(b"".join(file.fingerprint() for file in self._files)).hexdigest()[:12]

    def jobs(self, plan: PoolPlan, out: Mapping[str, Out], n_rows: int) -> Iterator[Callable[[], None]]:
        """See `Dataset.jobs`. Rows of one file that are in the page cache are gathered in the order of the pool."""
        columns = {name: each for name, each in self.parts[0].items() if isinstance(each, InMemory | Layout)}
        may_be_found = len(self.parts) == 1 and len(columns) == len(self.fields)
        if not may_be_found or not all(
            column.is_in_memory(start, len(places))
            for start, places in plan.reads.ranges()
            for column in columns.values()
        ):
            yield from super().jobs(plan, out, n_rows)
            return
        row_ids = plan.row_ids
        for start in range(0, plan.n_rows, n_rows):
            part = slice(start, min(start + n_rows, plan.n_rows))
            targets = {name: column[part] for name, column in out.items() if isinstance(column, np.ndarray)}
            yield partial(_gather, columns, row_ids[part], targets)

    def column(self, name: str) -> np.ndarray | None:
        """One small field of all rows, (rows, *shape). None if it is not in memory."""
        columns = [column for part in self.parts if isinstance(column := part.get(name), InMemory)]
        return np.concatenate([column.rows for column in columns]) if len(columns) == len(self.parts) else None


def _gather(columns: Mapping[str, InMemory | Layout], row_ids: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
    """Copy rows that are in memory to `out`, {field: (n, *shape)}, in the order of `row_ids`, (n,)."""
    for name, column in columns.items():
        column.gather(row_ids, out[name])


def open_store(
    key: str,
    paths: str | Sequence[str],
    fields: Mapping[str, str],
    *,
    verify: bool = False,
) -> HDF5Dataset:
    """Open HDF5 files as one source of rows. Raises UserError if a person has to change something.

    key: the config key that names the files, for messages. paths: one or more of `file.h5`, `file.h5::/group` and globs
    such as `part-*.h5`. fields: {field: dataset or CSR group in the file}. verify: check the SHA-256 of each block
    whenever it is read.
    """
    names = [name for path in ([paths] if isinstance(paths, str) else paths) for name in expand(key, path)]
    if not fields or not names:
        raise UserError(f"{key}: no file or no field is named; data.fields maps names in the code to datasets of files")
    n_bytes = sum(Path(path).stat().st_size for path in {path for path, _ in names} if Path(path).is_file())
    options = ReadOptions(verify, around_page_cache=n_bytes > AROUND_PAGE_CACHE * free_host_bytes())
    files = [_File(key, path, group, fields=fields, options=options) for path, group in names]
    check_meaning(key, *files)
    for file in files[1:]:
        for name, column in file.columns.items():
            expected = files[0].columns[name].field
            if column.field.signature != expected.signature:
                raise UserError(
                    f"{key}: {file.name} holds {name} as {column.field}, {files[0].name} as {expected}; files must "
                    "agree"
                )
    return HDF5Dataset(files)


def expand(key: str, path: str) -> list[tuple[str, str]]:
    """(file, group) for each file that `file.h5`, `file.h5::/group` or a glob names. Raises UserError for none.

    Whether a plain `file.h5` exists is found out when it is opened.
    """
    pattern, group = split_group(path)
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [(pattern, group)]
    files = sorted(glob.glob(pattern))  # noqa: PTH207 (pathlib cannot glob absolute patterns)
    if not files:
        raise UserError(f"{key}: no file matches {pattern} (looked in {Path.cwd()})")
    return [(file, group) for file in files]


def _pool_statistics(files: Sequence["_File"]) -> dict[str, Any]:
    """The attributes `mean` and `std` of the rows of all files that have them. Nothing if they do not differ."""
    known = [file for file in files if {"mean", "std"} <= file.attributes.keys()]
    pairs = [np.broadcast_arrays(file.attributes["mean"], file.attributes["std"]) for file in known]
    values = [np.array(pair, np.float64) for pair in pairs]
    if not known or (len(known) == len(files) and all(np.array_equal(value, values[0]) for value in values)):
        return {}
    if len(known) < len(files):
        unknown = next(file for file in files if file not in known)
        warn(f"{unknown.name} has no attributes mean and std; those of {known[0].name} are used for its rows, too")
    if len({value.shape for value in values}) > 1:
        raise UserError(f"{known[0].name} and others have an attribute mean of different shapes; convert them together")
    means, stds = np.stack(values, axis=1)
    weights = np.array([file.block_rows.sum() for file in known], np.float64)
    weights /= weights.sum()
    mean = np.tensordot(weights, means, 1)
    variance = np.tensordot(weights, stds**2 + means**2, 1) - mean**2
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(variance, 0)).tolist()}


def _check_types(attributes: Mapping[str, Any], where: str) -> None:
    """Raise UserError if an attribute that workloads look at is of another type than they expect."""
    if not isinstance(attributes.get("class_names", []), list):
        raise UserError(f"{where}: the attribute class_names is {attributes['class_names']}; it should be a list")
    for name in ("n_classes", "mean", "std"):
        if np.asarray(attributes.get(name, 0)).dtype.kind not in "biuf":
            raise UserError(f"{where}: the attribute {name} is {attributes[name]}; it should be numbers")


class _File:
    """The rows of one file, or of one group of a file."""

    def __init__(self, key: str, path: str, group: str, *, fields: Mapping[str, str], options: ReadOptions):
        self.name = path if group == "/" else f"{path}::{group}"
        where = f"{key}: {self.name}"
        with open_file(path, f"{key}: {path}") as file:
            root = open_group(file, group, f"{key}: {path}")
            self.attributes = attributes_of(root, where)
            _check_types(self.attributes, where)
            data = {field_name: open_field(root, name, where) for field_name, name in fields.items()}
            indptr = {
                field_name: read_indptr(each, f"{where}: {fields[field_name]}", options)
                for field_name, each in data.items()
                if each.indptr is not None
            }
            lengths = {field_name: each.n_rows for field_name, each in data.items()}
            n_rows = next(iter(lengths.values()))
            if len(set(lengths.values())) != 1:
                raise UserError(f"{where} has fields of unequal length {lengths}; give each as many rows")
            if not n_rows:
                raise UserError(f"{where} has no rows")
            layouts: dict[str, Layout] = {}
            for field_name, each in data.items():
                name = fields[field_name]
                layouts[field_name] = Layout(f"{where}: {name}", each.values, options, each.n_items)
                if each.n_items and f"{name}/data" not in fields.values():
                    warn_of_unread_values(root, name, where)
            types = {field_name: each.field(layouts[field_name].field) for field_name, each in data.items()}
        largest = max(types, key=lambda field_name: types[field_name].row_bytes)
        self._layouts = layouts
        self.largest = layouts[largest]
        """Where the values of the largest field lie."""
        self.columns: dict[str, Column] = {}
        for field_name, field in types.items():  # small ones in memory, so that a block costs one read: of the largest
            column: InMemory | Layout = layouts[field_name]
            if field_name != largest and n_rows * field.row_bytes <= COLUMN_BYTES:
                column = InMemory(layouts[field_name].read_all(field.dtype))
            is_ragged = field_name in indptr
            self.columns[field_name] = RaggedColumn(field, column, indptr[field_name]) if is_ragged else column
        block_rows = self.largest.chunk_rows  # for ragged rows: about BLOCK_BYTES, in MIN_BLOCKS or more
        if types[largest].is_ragged:
            block_rows = max(1, min(BLOCK_BYTES // types[largest].row_bytes, n_rows // MIN_BLOCKS))
        self.block_rows = np.diff(np.arange(0, n_rows, block_rows), append=n_rows).astype(np.int32)
        """(blocks,) int32: number of rows in each block."""

    def lengths(self, name: str) -> np.ndarray:
        """(rows,) int32: number of values in each row of a ragged field."""
        column = self.columns[name]
        assert isinstance(column, RaggedColumn)
        return np.diff(column.indptr).astype(np.int32)

    def fingerprint(self) -> bytes:
        """Digests of what is in memory, and those of `Layout.fingerprint`."""
        columns = self.columns.values()
        values = [column.values if isinstance(column, RaggedColumn) else column for column in columns]
        arrays = [column.rows for column in values if isinstance(column, InMemory)]
        arrays += [column.indptr for column in columns if isinstance(column, RaggedColumn)]
        digests = [hashlib.sha256(array.data).digest() for array in arrays]
        return b"".join([*digests, *(layout.fingerprint() for layout in self._layouts.values())])
