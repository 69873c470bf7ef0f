"""The rows of HDF5 files as blocks that any number of threads can read.

h5py reads the metadata once: type, shape and the place of each chunk in the file. The rows are read without it, because
the HDF5 library holds one lock over all its reads: two threads read as fast as one through h5py, and 1.8x as fast by
`preadv`. How the rows of one dataset are read is in layout.py, and which datasets a field has in csr.py.
"""

import glob
import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import PoolPlan, Reads, Source
from fastgpu.rows.rows import LONG_ROW_BYTES, Field
from fastgpu.storage.csr import FieldData, open_field, read_indptr, warn_of_unread_values
from fastgpu.storage.file import split_group
from fastgpu.storage.hdf5 import attributes_of, open_file, open_group
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, Range, ReadOptions
from fastgpu.storage.meaning import check_meaning

AROUND_PAGE_CACHE = 1.5
"""Files of more than this times the free memory are read around the page cache, which could keep a few blocks at most
until the next epoch asks for them: under a third of them, if the blocks come in random order."""


class Store(Source):
    """The rows of one or more HDF5 files, one file after the other.

    `attributes` are those of the first file or group, but `mean` and `std` are of all rows. Picklable, and safe to use
    after a fork.
    """

    def __init__(self, files: Sequence["_File"]):
        first = files[0]
        self._files = files
        self.file_rows = [int(file.block_rows.sum()) for file in files]
        self._first_row = [0, *accumulate(self.file_rows)]
        self.name = first.name
        if len(files) > 1:
            self.name += f" and {len(files) - 1} more"
        self.attributes: dict[str, Any] = first.attributes | _pool_statistics(files)
        self.filters = first.largest.filters
        self.by_h5py = not first.largest.is_direct
        self.around_page_cache = first.largest.is_around_page_cache
        self.block_rows = np.concatenate([file.block_rows for file in files])
        self.fields: dict[str, Field] = dict(first.fields)
        self.lengths = {}
        for name, field in first.fields.items():
            if field.is_ragged:
                lengths = np.concatenate([np.diff(file.indptr[name]).astype(np.int32) for file in files])
                self.lengths[name] = lengths
                codecs = {codec for file in files for codec in file.fields[name].codec.split("+")}
                self.fields[name] = field._replace(  # over all files
                    mean_values=float(lengths.mean()), codec="+".join(sorted(codecs))
                )

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(file.fingerprint() for file in self._files)).hexdigest()[:12]

    @property
    def identity(self) -> dict[str, object]:
        """Size and types, and a digest of all rows if the files have checksums, else of some. Raises UserError."""
        return super().identity | {"the digest of the rows": self._digest}

    def through_page_cache(self) -> "Store":
        """See `Source.through_page_cache`."""
        if not self.around_page_cache:
            return self
        store = deepcopy(self)
        store.around_page_cache = False
        for file in store._files:
            file.use_page_cache()
        return store

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Any]) -> None:
        """Copy the rows of each read to their places (see `Source.read`). Thread-safe.

        Raises OSError or RankError if a file cannot give the bytes.
        """
        ranges: dict[int, list[Range]] = {}
        for start, places in reads.ranges():
            number = bisect_right(self._first_row, start) - 1
            ranges.setdefault(number, []).append((start - self._first_row[number], places))
        for number, ranges_of_file in ranges.items():
            self._files[number].read(ranges_of_file, out)

    def are_in_memory(self, reads: Reads) -> bool:
        """See `Source.are_in_memory`. Rows of several files, and ragged rows, are left to `read`."""
        if len(self._files) > 1 or self.lengths:
            return False
        return all(self._files[0].is_in_memory(start, len(places)) for start, places in reads.ranges())

    def gather(self, row_ids: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Copy rows that were found in memory (see `Source.gather`). Thread-safe."""
        self._files[0].gather(row_ids, out)

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape). Raises KeyError if it is not in memory."""
        if self.fields[name].is_ragged:
            raise KeyError(name)
        return np.concatenate([file.columns[name] for file in self._files])


def open_store(
    key: str,
    paths: str | Sequence[str],
    fields: Mapping[str, str],
    *,
    verify: bool = False,
) -> Store:
    """Open HDF5 files as one source of rows. Raises UserError if a person has to change something.

    key: the config key that names the files, for messages. paths: one or more of `file.h5`, `file.h5::/group` and globs
    such as `part-*.h5`. fields: {field: dataset or CSR group in the file}. verify: check the SHA-256 of each block
    whenever it is read.
    """
    if not fields:
        raise UserError(f"{key}: no field is named; data.fields maps names in the code to datasets of the file")
    if isinstance(paths, str):
        paths = [paths]
    names = [name for path in paths for name in expand(key, path)]
    n_bytes = sum(Path(path).stat().st_size for path in {path for path, _ in names} if Path(path).is_file())
    is_too_large = n_bytes > AROUND_PAGE_CACHE * free_host_bytes()
    options = ReadOptions(verify, is_too_large)
    _warn_of_missing_shards(key, [path for path, _ in names])
    files = [_File(key, path, group, fields=fields, options=options) for path, group in names]
    if not files:
        raise UserError(f"{key} is an empty list; name a file")
    check_meaning(key, *files)
    for file in files[1:]:
        for name, field in file.fields.items():
            expected = files[0].fields[name]
            if field.signature != expected.signature:
                raise UserError(
                    f"{key}: {file.name} holds {name} as {field}, {files[0].name} as {expected}; shards must agree"
                )
    return Store(files)


def _warn_of_missing_shards(key: str, paths: Sequence[str]) -> None:
    """Say that files of a set are missing, as after a conversion or a copy that was cut short."""
    matches = [re.fullmatch(r"(.+)-\d{5}-of-(\d{5})(\.\w+)", path) for path in paths]  # names of shards
    for stem, count, suffix in sorted({match.groups() for match in matches if match}):
        shards = [f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(int(count))]
        missing = [path for path in shards if not Path(path).exists()]
        if missing:
            warn(f"{key}: {len(missing):,} of {len(shards):,} shards are missing, the first is {missing[0]}")


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


class _File:
    """The rows of one file, or of one group of a file."""

    def __init__(self, key: str, path: str, group: str, *, fields: Mapping[str, str], options: ReadOptions):
        self.name = path
        if group != "/":
            self.name = f"{path}::{group}"
        self.fields: dict[str, Field] = {}
        self.indptr: dict[str, np.ndarray] = {}
        """{ragged field: (rows + 1,) int64}"""
        self.columns: dict[str, np.ndarray] = {}
        """{field: (rows, *shape), or (N,) for a ragged field}, for those that are kept in memory"""
        self._layouts: dict[str, Layout] = {}
        """{field: where its rows lie; for a ragged field: where its values lie}"""
        with open_file(path, f"{key}: {path}") as file:
            root = open_group(file, group, f"{key}: {path}")
            self.attributes = attributes_of(root, f"{key}: {self.name}")
            _check_types(self.attributes, f"{key}: {self.name}")
            data = {}
            for field_name, name in fields.items():
                data[field_name] = open_field(root, name, f"{key}: {self.name}")
                if data[field_name].n_items and f"{name}/data" not in fields.values():
                    warn_of_unread_values(root, name, f"{key}: {self.name}")
            n_rows = self._note_fields(data, fields, f"{key}: {self.name}", options)
            largest = max(self.fields, key=lambda name: self.fields[name].row_bytes)
            self.largest = self._layouts[largest]
            for name, field in self.fields.items():  # in memory, so that a block costs one read: of the largest field
                if name != largest and n_rows * field.row_bytes <= COLUMN_BYTES:
                    self.columns[name] = self._layouts[name].read_all(field.dtype)
        block_rows = self.largest.chunk_rows  # for ragged rows: about BLOCK_BYTES, in MIN_BLOCKS or more
        if self.fields[largest].is_ragged:
            block_rows = max(1, min(BLOCK_BYTES // self.fields[largest].row_bytes, n_rows // MIN_BLOCKS))
        self.block_rows = np.diff(np.arange(0, n_rows, block_rows), append=n_rows).astype(np.int32)
        """(blocks,) int32: number of rows in each block."""

    def _note_fields(
        self, data: Mapping[str, FieldData], names: Mapping[str, str], where: str, options: ReadOptions
    ) -> int:
        """Note where the rows of all fields lie, and return their number."""
        for field, field_data in data.items():
            if field_data.indptr is not None:
                self.indptr[field] = read_indptr(field_data, f"{where}: {names[field]}", options)
        lengths = {field: field_data.n_rows for field, field_data in data.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"{where} has fields of unequal length {lengths}; give each as many rows")
        n_rows = next(iter(lengths.values()))
        if not n_rows:
            raise UserError(f"{where} has no rows")
        for field, field_data in data.items():
            layout = Layout(f"{where}: {names[field]}", field_data.values, options, field_data.n_items)
            self._layouts[field] = layout
            self.fields[field] = field_data.field(layout.field)
        return n_rows

    def fingerprint(self) -> bytes:
        """Digests of the fields that are in memory, and those of `Layout.fingerprint`."""
        in_memory = [hashlib.sha256(array.data).digest() for array in (*self.columns.values(), *self.indptr.values())]
        return b"".join([*in_memory, *(layout.fingerprint() for layout in self._layouts.values())])

    def use_page_cache(self) -> None:
        """Read through the page cache from now on."""
        for layout in self._layouts.values():
            layout.use_page_cache()

    def read(self, ranges: Sequence[Range], out: Mapping[str, Any]) -> None:
        """Copy the rows of all fields to their places."""
        for name, layout in self._layouts.items():
            target = out[name]
            field_ranges = ranges
            if name in self.indptr:  # a range of rows is a range of values
                indptr = self.indptr[name]
                if self.fields[name].row_bytes >= LONG_ROW_BYTES:
                    field_ranges = [
                        (int(indptr[start + first]), values)
                        for start, places in ranges
                        for first, values in target.runs(places)
                    ]
                else:
                    field_ranges = [(int(indptr[start]), target.places(places)) for start, places in ranges]
                target = target.values
            if name in self.columns:
                column = self.columns[name]
                for start, places in field_ranges:
                    target[places] = column[start : start + len(places)]
            else:
                layout.read(field_ranges, target)

    def is_in_memory(self, start: int, n_rows: int) -> bool:
        """Whether `gather` can copy the rows start, start + 1, ..."""
        layouts = self._layouts.items()
        return all(name in self.columns or layout.is_in_memory(start, n_rows) for name, layout in layouts)

    def gather(self, row_ids: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Copy rows that are in memory to `out`, in the order of `row_ids`."""
        for name, layout in self._layouts.items():
            if name in self.columns:
                np.take(self.columns[name], row_ids, axis=0, out=out[name], mode="clip")
            else:
                layout.gather(row_ids, out[name])
