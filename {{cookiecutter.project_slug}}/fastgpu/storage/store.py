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

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Out, PoolPlan
from fastgpu.storage.columns import ColumnDataset, InMemory, RaggedColumn
from fastgpu.storage.csr import open_column, warn_of_unread_values
from fastgpu.storage.file import OpenFile, split_group
from fastgpu.storage.hdf5 import attributes_of, find, open_file
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout
from fastgpu.storage.meaning import check_meaning

AROUND_PAGE_CACHE = 1.5
"""Files of more than this times the free memory are read around the page cache, which could keep a few blocks at most
until the next epoch asks for them: under a third of them, if the blocks come in random order."""


class HDF5Dataset(ColumnDataset):
    """The rows of one or more HDF5 files, one file after the other. Safe to use after a fork.

    `attributes` are those of the first file or group, but `mean` and `std` are of all rows.
    """

    def __init__(self, files: Sequence["_File"]):
        name = files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        attributes = files[0].attributes | _pool_statistics(files)
        super().__init__(name, [file.columns for file in files], [file.block_rows for file in files], attributes)
        self.around_page_cache = files[0].is_around_page_cache
        """Whether rows are read from the disk in each epoch, because the memory could not keep them."""
        self._files = files

    @cached_property
    def digest(self) -> str:
        """Of all rows if the files have checksums, else of some. Raises UserError."""
        columns = [column for file in self._files for column in file.columns.values()]
        return hashlib.sha256(b"".join(column.fingerprint() for column in columns)).hexdigest()[:12]

    def jobs(self, plan: PoolPlan, out: Mapping[str, Out], n_rows: int) -> Iterator[Callable[[], None]]:
        """See `Dataset.jobs`. Rows of one file that are in the page cache are gathered in the order of the pool."""
        columns = {name: each for name, each in self.parts[0].items() if isinstance(each, InMemory | Layout)}
        may_be_found = len(self.parts) == 1 and len(columns) == len(self.fields)
        if not may_be_found or not all(
            column.is_in_memory(start, len(places))
            for start, places in plan.reads.ranges()
            for column in columns.values()
            if isinstance(column, Layout)
        ):
            yield from super().jobs(plan, out, n_rows)
            return
        row_ids = plan.row_ids
        for start in range(0, plan.n_rows, n_rows):
            part = slice(start, min(start + n_rows, plan.n_rows))
            targets = {name: column[part] for name, column in out.items() if isinstance(column, np.ndarray)}
            yield partial(_gather, columns, row_ids[part], targets)


def _gather(columns: Mapping[str, InMemory | Layout], row_ids: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
    """Copy rows that are in memory to `out`, {field: (n, *shape)}, in the order of `row_ids`, (n,)."""
    for name, column in columns.items():
        column.gather(row_ids, out[name])


def open_store(key: str, paths: str | Sequence[str], fields: Mapping[str, str], *, verify: bool = False) -> HDF5Dataset:
    """Open HDF5 files as one source of rows. Raises UserError if a person has to change something.

    key: the config key that names the files, for messages. paths: one or more of `file.h5`, `file.h5::/group` and globs
    such as `part-*.h5`. fields: {field: dataset or CSR group in the file}. verify: compare each block that is read with
    its SHA-256.
    """
    names = [name for path in ([paths] if isinstance(paths, str) else paths) for name in expand(key, path)]
    if not fields or not names:
        raise UserError(f"{key}: no file or no field is named; data.fields maps names in the code to datasets of files")
    n_bytes = sum(Path(path).stat().st_size for path in {path for path, _ in names} if Path(path).is_file())
    is_large = n_bytes > AROUND_PAGE_CACHE * free_host_bytes()
    files = [_File(key, path, group, fields=fields, verify=verify, around_page_cache=is_large) for path, group in names]
    for file in files[1:]:
        check_meaning(key, files[0], file)
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
    """The attributes `mean` and `std` of the rows of all files. Nothing if they do not differ, or a file has none."""
    names = ("mean", "std")
    known = [[file.attributes[name] for name in names] for file in files if {*names} <= file.attributes.keys()]
    if 0 < len(known) < len(files):
        warn(f"{len(known)} of {len(files)} files have attributes mean and std; those of {files[0].name} hold for all")
    if len(known) < len(files) or all(each == known[0] for each in known):
        return {}
    means, stds = np.array(known, np.float64).swapaxes(0, 1)
    n_rows = [file.block_rows.sum() for file in files]
    mean = np.average(means, 0, n_rows)
    variance = np.average(stds**2 + means**2, 0, n_rows) - mean**2
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(variance, 0)).tolist()}


class _File:
    """The rows of one file, or of one group of a file."""

    def __init__(
        self, key: str, path: str, group: str, *, fields: Mapping[str, str], verify: bool, around_page_cache: bool
    ):
        self.name = path if group == "/" else f"{path}::{group}"
        where = f"{key}: {self.name}"
        with open_file(path, f"{key}: {path}") as file:
            bytes_of_file = OpenFile(path, around_page_cache=around_page_cache)
            self.is_around_page_cache = bytes_of_file.is_direct
            root = find(file, group, h5py.Group, f"{key}: {path}")
            self.attributes = attributes_of(root)
            columns = {
                field: open_column(root, name, where, bytes_of_file, verify=verify) for field, name in fields.items()
            }
            warn_of_unread_values(root, fields.values(), where)
        lengths = {field: len(column) for field, column in columns.items()}
        n_rows = next(iter(lengths.values()))
        if len(set(lengths.values())) != 1:
            raise UserError(f"{where} has fields of unequal length {lengths}; give each as many rows")
        if not n_rows:
            raise UserError(f"{where} has no rows")
        largest = max(columns.values(), key=lambda column: column.field.row_bytes)
        self.columns: dict[str, InMemory | Layout | RaggedColumn] = {}
        for field, column in columns.items():  # small ones in memory, so that a block costs one read: of the largest
            is_small = column is not largest and n_rows * column.field.row_bytes <= COLUMN_BYTES
            self.columns[field] = _load(column) if is_small else column
        if isinstance(largest, Layout):
            block_rows = largest.chunk_rows
        else:  # about BLOCK_BYTES, in MIN_BLOCKS or more
            block_rows = max(1, min(BLOCK_BYTES // largest.field.row_bytes, n_rows // MIN_BLOCKS))
        self.block_rows = np.diff(np.arange(0, n_rows, block_rows), append=n_rows).astype(np.int32)
        """(blocks,) int32: number of rows in each block."""


def _load(column: Layout | RaggedColumn) -> InMemory | RaggedColumn:
    """The same column, with its values in memory."""
    if isinstance(column, Layout):
        return InMemory(column.read_all(column.field.dtype))
    assert isinstance(column.values, Layout)
    return RaggedColumn(column.field, InMemory(column.values.read_all(column.field.dtype)), column.indptr)
