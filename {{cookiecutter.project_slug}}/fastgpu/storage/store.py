"""HDF5 file(s) as blocks of rows, read from any number of threads.

h5py is used for the metadata, once: dtype, shape and where each chunk lies. The bytes come past the
library, because it holds one lock over all its reads: two threads read as fast as one through h5py, 1.8x by `preadv`.
layout.py has the ways to read a dataset; this module has files, shards and groups, and what they must not be.
"""

import glob
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.field import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, ReadOptions, RowRange


class Store(Source):
    """The rows of one or more HDF5 files, one after the other, as blocks that are cheap to read whole.

    block_rows: (blocks,) int32, rows of each block; fields: dtype and shape of a row; attributes: those of the first
    file or group. Picklable; holds no h5py object and no file that a fork would share.
    """

    def __init__(self, parts: Sequence["_Part"]):
        self._parts = parts
        self.fields: dict[str, Field] = dict(parts[0].fields)
        self.attributes: dict[str, Any] = parts[0].attributes
        self.name = parts[0].name if len(parts) == 1 else f"{parts[0].name} and {len(parts) - 1} more"
        self.block_rows = np.concatenate([part.block_rows for part in parts])
        self.lengths = {
            name: np.concatenate([np.diff(part.indptr[name]).astype(np.int32) for part in parts])
            for name, field in self.fields.items()
            if field.is_ragged
        }
        for name, lengths in self.lengths.items():  # the mean over all files
            self.fields[name] = self.fields[name]._replace(mean_values=float(lengths.mean()))
        self.filters = parts[0].widest.filters
        self.by_h5py = not parts[0].widest.is_direct
        self._first_block = [0, *accumulate(len(part.block_rows) for part in parts)]

    def __len__(self) -> int:
        return int(self.block_rows.sum())

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Rows first, first + 1, ... of each block -> out[field][places]. Thread-safe.

        places: (n,) int64, all different. out: C-contiguous arrays of shape (rows, *field.shape), or RaggedArray whose
        offsets say how many values of each row go where.
        Raises OSError or RankError when a file cannot give the bytes.
        """
        runs: dict[int, list[RowRange]] = {}
        for block, first, places in reads:
            part = bisect_right(self._first_block, block) - 1
            start = self._parts[part].block_start[block - self._first_block[part]]
            runs.setdefault(part, []).append(RowRange(int(start) + first, places))
        for part, some in runs.items():
            self._parts[part].read(some, out)

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape); raises KeyError if it is not held in memory."""
        if self.fields[name].is_ragged:
            raise KeyError(name)
        return np.concatenate([part.columns[name] for part in self._parts])


def open_store(
    key: str,
    paths: str | Sequence[str],
    fields: Mapping[str, str],
    *,
    verify: bool = False,
    trust_links: bool = False,
    chunk_cache: Mapping[str, float] | None = None,
) -> Store:
    """Open files, lists and globs of `file.h5` or `file.h5::/group`; `fields` maps names to datasets.

    key: the config key that named them, for messages. verify: check each block's SHA-256 whenever it is read.
    trust_links: follow a file to bytes that lie in others. chunk_cache: rdcc_nbytes, rdcc_nslots and rdcc_w0 of
    h5py.File, for what h5py must read. Raises UserError for whatever a person can mend.
    """
    options = ReadOptions(verify, trust_links, dict(chunk_cache or {}))
    files = [found for path in ([paths] if isinstance(paths, str) else paths) for found in expand(key, path)]
    parts = [_Part(key, path, group, fields, options) for path, group in files]
    for part in parts[1:]:
        for name, field in part.fields.items():
            if field.signature != parts[0].fields[name].signature:
                raise UserError(
                    f"{key}: {part.name} holds {name} as {field}, {parts[0].name} as "
                    f"{parts[0].fields[name]}; shards must agree"
                )
    return Store(parts)


def expand(key: str, path: str) -> list[tuple[str, str]]:
    """(file, group) of what `file.h5`, `file.h5::/group` or a glob names. Raises UserError if that is nothing."""
    file, _, group = path.partition("::")
    found = [file] if Path(file).exists() or not glob.has_magic(file) else sorted(glob.glob(file))  # noqa: PTH207
    if not found:
        raise UserError(f"{key}: no file matches {file} (looked in {Path.cwd()})")
    return [(each, group or "/") for each in found]


class _Part:
    """One file: where the rows of each field lie."""

    def __init__(self, key: str, path: str, group: str, fields: Mapping[str, str], options: ReadOptions):
        self.name = path if group == "/" else f"{path}::{group}"
        if Path(path).is_dir():
            raise UserError(f"{key}: {path} is a folder; name the files in it: {path}/*.h5")
        try:
            with h5py.File(path, "r") as file:
                self._layouts = self._read_metadata(key, file, group, fields, options)
        except FileNotFoundError:
            raise UserError(f"{key}: {path} does not exist (looked in {Path.cwd()})") from None
        except BlockingIOError:
            raise UserError(
                f"{key}: {path} is locked by a process that writes it; wait for that to end, "
                "or set HDF5_USE_FILE_LOCKING=FALSE if there is none"
            ) from None
        except OSError as error:
            reason = str(error).lower()
            if "truncated" in reason:
                cure = "is truncated: copy or write it again"
            elif "signature not found" in reason:
                cure = "is not an HDF5 file"
            else:
                cure = f"cannot be opened: {error.strerror or error}"
            raise UserError(f"{key}: {path} {cure}") from None

    def _read_metadata(
        self, key: str, file: h5py.File, group: str, names: Mapping[str, str], options: ReadOptions
    ) -> "dict[str, Layout]":
        root = _open_group(key, file, group, options.trust_links)
        self.attributes = {name: _plain(value) for name, value in root.attrs.items()}
        found = {name: _open_field(key, root, self.name, source, options) for name, source in names.items()}
        self.indptr = {name: column.indptr for name, column in found.items() if column.indptr is not None}
        lengths = {name: len(column) for name, column in found.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"{key}: {self.name} has fields of unequal length {lengths}; give each as many rows")
        (rows,) = set(lengths.values())
        if not rows:
            raise UserError(f"{key}: {self.name} has no rows")
        layouts = {
            name: Layout(f"{key}: {self.name}: {names[name]}", column.values, options, column.n_items)
            for name, column in found.items()
        }
        self.fields = {name: column.field(layouts[name].field) for name, column in found.items()}
        widest = max(self.fields, key=lambda name: self.fields[name].row_bytes)
        self.columns: dict[str, np.ndarray] = {}  # of a ragged field: its values
        for name, field in self.fields.items():
            if name != widest and rows * field.row_bytes <= COLUMN_BYTES:
                self.columns[name] = layouts[name].read_all(field.dtype)
        step = layouts[widest].chunk_rows
        if self.fields[widest].is_ragged:
            step = max(1, min(BLOCK_BYTES // self.fields[widest].row_bytes, rows // MIN_BLOCKS))
        self.widest = layouts[widest]
        self.block_start = np.arange(0, rows, step)
        self.block_rows = np.diff(self.block_start, append=rows).astype(np.int32)
        return layouts

    def read(self, runs: Sequence[RowRange], out: Mapping[str, Any]) -> None:
        for name, layout in self._layouts.items():
            target, found = out[name], runs
            if name in self.indptr:  # runs of rows are runs of values
                found = [RowRange(int(self.indptr[name][start]), target.places(places)) for start, places in runs]
                target = target.values
            if name in self.columns:
                for start, places in found:
                    target[places] = self.columns[name][start : start + len(places)]
            else:
                layout.read(found, target)


def _open_group(key: str, file: h5py.File, group: str, trust_links: bool) -> h5py.Group:
    found = file.get(group)
    if not isinstance(found, h5py.Group):
        raise UserError(f"{key}: {file.filename} has no group {group}; it has {_contents(file)}")
    if found.file.filename != file.filename and not trust_links:
        raise UserError(f"{key}: {file.filename}: {group} {ELSEWHERE}")
    return found


class _Column(NamedTuple):
    """What a file holds of a field: the rows, or of ragged ones the values and where each row's begin."""

    values: h5py.Dataset
    indptr: np.ndarray | None = None
    """(rows + 1,) int64"""
    n_items: int | None = None

    def __len__(self) -> int:
        return len(self.values) if self.indptr is None else len(self.indptr) - 1

    def field(self, of_values: Field) -> Field:
        if self.indptr is None:
            return of_values
        dtype = OFFSET_DTYPE if self.n_items else of_values.dtype  # item numbers, whatever the file has
        return Field(dtype, of_values.shape, len(self.values) / max(1, len(self)), self.n_items)


def _open_field(key: str, root: h5py.Group, part: str, source: str, options: ReadOptions) -> _Column:
    """A dataset; or ragged rows, as a group: `indptr` with `indices`, a CSR matrix as anndata writes it, or `values`.

    The item numbers of such a matrix are below the second number of its attribute `shape`; `group/data` are what
    belongs to them.
    """
    matrix = root.get(source)
    if not isinstance(matrix, h5py.Group) or "indptr" not in matrix:
        values = _open_dataset(key, root, part, source, options)
        if values.ndim != 1 or "indptr" not in values.parent or len(values) == len(values.parent["indptr"]) - 1:
            return _Column(values)
        return _Column(values, _indptr(key, part, source, values, options))
    if "values" in matrix:
        values = _open_dataset(key, root, part, f"{source}/values", options)
        return _Column(values, _indptr(key, part, source, values, options))
    kind, shape = _plain(matrix.attrs.get("encoding-type", "csr_matrix")), matrix.attrs.get("shape", (0, 0))
    if kind != "csr_matrix":
        raise UserError(
            f"{key}: {part}: {source} is a {kind}; rows need a csr_matrix: `python convert.py arrays` writes it"
        )
    values = _open_dataset(key, root, part, f"{source}/indices", options)
    n_items = int(shape[1]) if len(shape) == 2 else 0
    if not 0 < n_items <= MAX_VALUES or values.dtype.kind not in "ui" or values.ndim != 1:
        raise UserError(
            f"{key}: {part}: {source} should have the attribute shape, (rows, items), and whole numbers as "
            f"indices; it has {tuple(shape)}, {values.dtype}"
        )
    return _Column(values, _indptr(key, part, source, values, options), n_items)


def _indptr(key: str, part: str, source: str, values: h5py.Dataset, options: ReadOptions) -> np.ndarray:
    indptr = _open_dataset(key, values.parent, part, "indptr", options)
    found = Layout(f"{key}: {part}: {source}/indptr", indptr, options).read_all(np.dtype(np.int64))
    if found.ndim != 1 or not len(found) or found[0] != 0 or (np.diff(found) < 0).any() or found[-1] != len(values):
        raise UserError(
            f"{key}: {part}: {source} is damaged: its indptr should rise from 0 to the {len(values):,} values"
        )
    if len(found) > 1 and np.diff(found).max() > MAX_VALUES:
        raise UserError(f"{key}: {part}: {source} has a row of more than {MAX_VALUES:,} values")
    return found


ELSEWHERE = "takes its bytes from other files; write them into one file, or set data.trust_links=true if you trust them"


def _open_dataset(key: str, root: h5py.Group, name: str, source: str, options: ReadOptions) -> h5py.Dataset:
    data = root.get(source)
    where = f"{key}: {name}: {source}"
    if data is None and isinstance(link := root.get(source, getlink=True), h5py.ExternalLink):
        raise UserError(f"{where} links to {link.filename}, which is not there")
    if not isinstance(data, h5py.Dataset):
        raise UserError(f"{key}: {name} has no dataset {source}; it has {_contents(root)} (see data.fields)")
    if data.is_virtual or data.external or data.file.filename != root.file.filename:
        if not options.trust_links:
            raise UserError(f"{where} {ELSEWHERE}")
        folder = Path(data.file.filename).parent  # HDF5 itself gives zeros for a virtual source that is missing
        needed = [each.file_name for each in data.virtual_sources()] if data.is_virtual else []
        for path in needed + [each[0] for each in data.external or []]:
            if path != "." and not (folder / path).exists():
                raise UserError(f"{where} takes its bytes from {path}, which is not there")
    if data.ndim == 0:
        raise UserError(f"{where} is a single value; a field needs a first dimension of rows")
    if data.dtype.kind not in "buif":
        raise UserError(f"{where} is of type {data.dtype}; allowed are bool, integers and floats")
    return data


def _contents(group: h5py.Group) -> str:
    return ", ".join(sorted(group)) or "nothing"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value.tolist()]
    return value.decode() if isinstance(value, bytes) else value.item() if isinstance(value, np.generic) else value
