"""HDF5 files as one dataset of rows in blocks, which any number of threads can read.

h5py reads the metadata once: type, shape and the place of each chunk in the file. The rows are read without it: its
library holds one lock over all reads, so only one thread at a time can read through h5py. `preadv` has no such lock.
"""

import glob
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.storage import remote
from fastgpu.storage.columns import Codec, DecodedColumn, InMemory, RaggedColumn
from fastgpu.storage.file import OpenFile, side_by_side, split_group
from fastgpu.storage.hdf5 import SOURCES, attributes_of, check_path, dtype_of, find, look_up, open_file, refuse_large
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, PlainRows, Range, open_layout
from fastgpu.storage.meaning import check_meaning

__all__ = ["open_store"]

AROUND_PAGE_CACHE = 1.5
"""Files of more than this times the free memory are read around the page cache, which could keep a few blocks at most
until the next epoch asks for them: under a third of them, if the blocks come in random order."""
PACKING = {"scale_factor": "1.0", "add_offset": "0.0", "_FillValue": "nan", "missing_value": "nan"}
"""{attribute of a netCDF variable that says which value a stored number stands for: one that changes nothing}"""


class HDF5Dataset(Dataset):
    """The rows of one or more HDF5 files, one file after the other. Safe to use after a fork."""

    def __init__(
        self,
        name: str,
        file: OpenFile,
        parts: Sequence[Mapping[str, Any]],
        part_blocks: Sequence[np.ndarray],
        *,
        attributes: dict[str, Any],
    ):
        """file: the first one. parts: {field: its column} of each file. part_blocks: (blocks,) number of rows in each
        block of each file."""
        self.name = name
        self.file = file
        self.parts = parts
        self.part_rows = [int(block_rows.sum()) for block_rows in part_blocks]
        self.first_rows = [0, *accumulate(self.part_rows[:-1])]
        self.block_rows = np.concatenate(part_blocks)
        self.files: list[tuple[str, str]] = []
        """(path, group) of each file."""
        self.attributes = attributes
        self.fields = {field_name: column.field for field_name, column in parts[0].items()}
        self.stored_lengths = {}
        for field_name, field in self.fields.items():
            if field.is_ragged:
                lengths = np.concatenate([part[field_name].lengths for part in parts])
                self.stored_lengths[field_name] = lengths
                self.fields[field_name] = field._replace(mean_values=float(lengths.mean()))

    @cached_property
    def _sources(self) -> np.ndarray:
        """(rows,) bytes of UTF-8, empty for the rows of a file that does not have them."""
        found = []
        for (path, group), n_rows in zip(self.files, self.part_rows, strict=True):
            with open_file(path, path) as (_, file):
                data = look_up(find(file, group, h5py.Group, path), SOURCES, path)
                is_known = isinstance(data, h5py.Dataset) and data.shape == (n_rows,) and data.dtype.kind in "SO"
                refuse_large(f"{path}: {SOURCES}", n_rows * data.dtype.itemsize if is_known else 0)
                found.append(data[:] if is_known else np.zeros(n_rows, "S1"))
        return np.concatenate(found)

    def sources(self, row_ids: np.ndarray | slice) -> list[str]:
        """Where convert.py found these rows; empty texts if their file does not say it."""
        return [text.decode(errors="backslashreplace") for text in self._sources[row_ids].tolist()]

    @cached_property
    def digest(self) -> str:
        """A hash of all rows if the files have checksums, else of some. Raises UserError."""
        columns = [column for part in self.parts for column in part.values()]
        fingerprints = side_by_side(lambda column: column.fingerprint(), columns)
        return hashlib.sha256(b"".join(fingerprints)).hexdigest()[:12]

    def stored_column(self, name: str) -> np.ndarray | None:
        columns: list[Any] = [part.get(name) for part in self.parts]
        n_bytes = sum(len(each) * each.field.row_bytes for each in columns if isinstance(each, Layout))
        if n_bytes > COLUMN_BYTES or not all(isinstance(each, InMemory | Layout) for each in columns):
            return None
        return np.concatenate([each.rows if isinstance(each, InMemory) else each.read_all() for each in columns])

    @property
    def is_local(self) -> bool:
        return all(column.is_local for part in self.parts for column in part.values())

    @property
    def n_requests(self) -> int:
        return remote.n_requests()

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        ranges: dict[int, list[Range]] = {}
        for start, places in reads.ranges():
            number = bisect_right(self.first_rows, start) - 1
            ranges.setdefault(number, []).append((start - self.first_rows[number], places))
        for number, ranges_of_part in ranges.items():
            for name, column in self.parts[number].items():
                column.read(ranges_of_part, out[name], plan)

    def gathers(self, plan: PoolPlan, out: Mapping[str, Out], n_rows: int) -> list[Callable[[], None]]:
        """Jobs for any thread that copy a pool out of the page cache, `n_rows` rows each in the order of the pool.

        Empty if `cached_rows` has none for one field, or if there are several files. `read` would take 1.11 and 1.16
        times the CPU time for rows of 116 kB, 1.02 and 1.05 times for 12 kB, but only 0.87 times for 3 kB (two readers
        of bench/run.py on a 2-core VM with other work, 2026-11-27; medians of 9 and of 15 rounds).
        """
        copies: list[tuple[np.ndarray, np.ndarray]] = []  # all rows and the pool, (rows, bytes) both, of each field
        for name, column in self.parts[0].items() if len(self.parts) == 1 else ():
            rows = column.cached_rows(plan.reads.ranges()) if isinstance(column, InMemory | PlainRows) else None
            if rows is None:
                return []
            copies.append((rows, np.asarray(out[name])[: plan.n_rows].reshape(plan.n_rows, -1).view(np.uint8)))
        row_ids = plan.row_ids

        def gather(part: slice) -> None:
            self.file.check_unchanged()
            for rows, pool in copies:
                np.take(rows, row_ids[part], axis=0, out=pool[part], mode="clip")  # mode="raise" would copy the pool
            self.file.check_unchanged()

        starts = range(0, plan.n_rows if copies else 0, n_rows)
        return [partial(gather, slice(start, start + n_rows)) for start in starts]


def open_store(
    key: str,
    paths: str | Sequence[str],
    fields: Mapping[str, str],
    codecs: Mapping[str, Codec] | None = None,
    *,
    cache: str = remote.CACHE,
) -> HDF5Dataset:
    """Open HDF5 files as one source of rows. Raises UserError if a person has to change something.

    key: the config key that names the files, for messages. paths: one or more of `file.h5`, `file.h5::/group`, URLs and
    globs such as `part-*.h5`. fields: {field: dataset or CSR group in the file}. codecs: {field: what decodes its rows,
    if they are encoded}. cache: the folder for copies of remote files. The attributes are those of the first file or
    group, but `mean` and `std` are of all rows.
    """
    names = [name for path in ([paths] if isinstance(paths, str) else paths) for name in expand(key, path)]
    if not fields or not names:
        raise UserError(f"{key}: no file or no field is named; data.fields maps names in the code to datasets of files")
    n_bytes = sum(Path(path).stat().st_size for path in {path for path, _ in names} if Path(path).is_file())
    is_large = n_bytes > AROUND_PAGE_CACHE * free_host_bytes()
    remote.open_ahead(key, {path for path, _ in names if remote.is_url(path)}, cache)
    is_remote = any(remote.is_url(path) for path, _ in names)
    open_one = partial(_open, key, fields=fields, around_page_cache=is_large, first=names[0])
    first, *others = files = side_by_side(open_one, names) if is_remote else [open_one(name) for name in names]
    for other in others:
        check_meaning(key, first, other)
        for field, found in other.fields.items():
            if not found.fits(first.fields[field]):
                raise UserError(
                    f"{key}: {other.name} holds {field} as {found}, {first.name} as {first.fields[field]}; files must "
                    "agree"
                )
    name = first.name + (f" and {len(others)} more" if others else "")
    attributes = first.attributes | _pool_statistics(files)
    parts = [dict(file.parts[0]) for file in files]
    used = {field: codec for field, codec in (codecs or {}).items() if first.fields[field].codec}
    for field, codec in used.items():
        attributes |= codec.attributes
        for part, n_before in zip(parts, accumulate(map(len, files), initial=0), strict=False):
            part[field] = DecodedColumn(codec, part[field], name, n_before)
    rows = HDF5Dataset(name, first.file, parts, [file.block_rows for file in files], attributes=attributes)
    rows.files = names
    rows.decoding = ", ".join(sorted({str(codec) for codec in used.values()}))
    return rows


def expand(key: str, path: str) -> list[tuple[str, str]]:
    """(file, group) for each file that `file.h5`, `file.h5::/group` or a glob names. Raises UserError for none."""
    pattern, group = split_group(path)
    if remote.is_url(pattern):
        return [(url, group) for url in remote.expand(key, pattern)]
    check_path(pattern, f"{key}: {pattern}")
    is_pattern = glob.has_magic(pattern) and not Path(pattern).exists()
    files = sorted(glob.glob(pattern)) if is_pattern else [pattern]  # noqa: PTH207 (pathlib globs no absolute patterns)
    if not files:
        raise UserError(f"{key}: no file matches {pattern} (looked in {Path.cwd()})")
    return [(file, group) for file in files]


def _pool_statistics(files: Sequence[HDF5Dataset]) -> dict[str, Any]:
    """The attributes `mean` and `std` of the rows of all files. Nothing if they do not differ, or a file has none."""
    names = ("mean", "std")
    known = [[file.attributes[name] for name in names] for file in files if {*names} <= file.attributes.keys()]
    if 0 < len(known) < len(files):
        warn(f"{len(known)} of {len(files)} files have attributes mean and std; those of {files[0].name} hold for all")
    if len(known) < len(files) or all(each == known[0] for each in known):
        return {}
    means, stds = np.array(known, np.float64).swapaxes(0, 1)
    n_rows = [len(file) for file in files]
    mean = np.average(means, 0, n_rows)
    variance = np.average(stds**2 + means**2, 0, n_rows) - mean**2
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(variance, 0)).tolist()}


def _open(
    key: str, names: tuple[str, str], *, fields: Mapping[str, str], around_page_cache: bool, first: tuple[str, str]
) -> HDF5Dataset:
    """The rows of a file, or of a group of it. names: both. first: those of the file that warns of what it holds."""
    path, group = names
    name = path if group == "/" else f"{path}::{group}"
    where = f"{key}: {name}"
    with open_file(path, f"{key}: {path}", around_page_cache=around_page_cache) as (file, h5):
        root = find(h5, group, h5py.Group, f"{key}: {path}")
        attributes = attributes_of(root)
        opened = {field: _open_column(root, dataset, where, file) for field, dataset in fields.items()}
        for dataset in fields.values() if names == first else ():
            known = attributes_of(look_up(root, dataset, where))
            packed = [name for name, same in PACKING.items() if str(known.get(name, same)).strip("[]") not in same]
            if packed:
                warn(
                    f"{where}: {dataset} has {', '.join(packed)}, which are not applied: its numbers are read as they "
                    "are stored, missing ones too. To convert it once, save xarray.open_dataset(FILE)[NAME].values by "
                    "numpy.save, then python convert.py arrays"
                )
        for matrix in fields.values():
            data = look_up(root, f"{matrix}/data", where)
            is_read = not isinstance(data, h5py.Dataset) or f"{matrix}/data" in fields.values()
            if not is_read and data.ndim == 1 and dtype_of(data).kind in "buif" and (data[: 1 << 16] != 1).any():
                warn(
                    f"{where}: {matrix}/data has values other than 1, which are not read: each stored item counts as "
                    "one, a 0, too; store only the items that count"
                )
    lengths = {field: len(column) for field, column in opened.items()}
    n_rows = min(lengths.values())
    if n_rows < max(1, *lengths.values()):
        raise UserError(f"{where} has fields of lengths {lengths}; give each as many rows, and at least one")
    largest = max(opened.values(), key=lambda column: column.field.row_bytes)
    columns: dict[str, Any] = {**opened}
    # Small fields are kept in memory, so that a block costs one read: of the largest field.
    for field, column in opened.items():
        if column is largest or n_rows * column.field.row_bytes > COLUMN_BYTES:
            continue
        if isinstance(column, Layout):
            columns[field] = InMemory(column.read_all())
        elif isinstance(column.values, Layout):
            column.values = InMemory(column.values.read_all())
    if isinstance(largest, Layout):
        step = largest.chunk_rows
    else:  # about BLOCK_BYTES, in MIN_BLOCKS or more
        step = max(1, min(BLOCK_BYTES // largest.field.row_bytes, n_rows // MIN_BLOCKS))
    block_rows = np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)
    return HDF5Dataset(name, file, [columns], [block_rows], attributes=attributes)


def _open_column(root: h5py.Group, name: str, where: str, file: OpenFile) -> Layout | RaggedColumn:
    """The field that `name` stands for. Raises UserError if its datasets do not fit.

    It is a dataset (rows, *shape); a CSR matrix as anndata writes it, or the `data` of one
    (https://anndata.readthedocs.io/en/stable/fileformat-prose.html); or a group of `indptr` and `values`, (N, *shape),
    which are the bytes of image files if it has the attribute `codec`.
    """
    group = look_up(root, name, where)
    n_items = None
    codec = ""
    if not isinstance(group, h5py.Group) or "indptr" not in group:
        data = find(root, name, h5py.Dataset, where)
        cuts = look_up(data.parent, "indptr", where) if data.ndim == 1 else None
        is_cut = isinstance(cuts, h5py.Dataset) and cuts.ndim == 1 and len(cuts) != len(data) + 1
        if not is_cut:  # indptr gives each row one value, or there is none
            return open_layout(f"{where}: {name}", data, file)
    elif "values" in group:
        data = find(root, f"{name}/values", h5py.Dataset, where)
        codec = str(attributes_of(group).get("codec", ""))
    else:
        data = find(root, f"{name}/indices", h5py.Dataset, where)
        n_items = _read_n_items(group, data, f"{where}: {name}")
    values = open_layout(f"{where}: {name}", data, file, n_items)
    indptr_data = find(data.parent, "indptr", h5py.Dataset, where)
    indptr = open_layout(f"{where}: {name}/indptr", indptr_data, file).read_all(np.dtype(np.int64))
    lengths = np.diff(indptr, axis=0)
    begins_and_ends = indptr.ndim == 1 and len(indptr) and indptr[0] == 0 and indptr[-1] == len(values)
    if not begins_and_ends or lengths.min(initial=0) < 0 or lengths.max(initial=0) > MAX_VALUES:
        raise UserError(f"{where}: {name} is damaged: its indptr should rise from 0 to the {len(values):,} values")
    dtype = OFFSET_DTYPE if n_items else values.field.dtype  # item numbers fit it, whatever type the file has
    return RaggedColumn(Field(dtype, values.field.shape, n_items=n_items, codec=codec), values, indptr)


def _read_n_items(group: h5py.Group, indices: h5py.Dataset, where: str) -> int:
    """The number of items of a CSR matrix. Raises UserError if the group is not one, or its indices are no numbers."""
    attributes = attributes_of(group)
    kind = attributes.get("encoding-type", "csr_matrix")
    shape = attributes.get("shape")
    stored = look_up(group, "shape", where)
    if shape is None and isinstance(stored, h5py.Dataset) and stored.shape == (2,):
        # 10x Genomics writes (genes, cells), by columns. The rows are what indptr cuts, whichever axis that is.
        shape = stored[:].tolist()
        shape = shape[::-1] if shape[1] == find(group, "indptr", h5py.Dataset, where).size - 1 else shape
    n_items = shape[1] if isinstance(shape, list) and len(shape) == 2 else None
    is_csr = kind == "csr_matrix" and dtype_of(indices).kind in "ui" and (indices.ndim, indices.dtype.shape) == (1, ())
    if is_csr and isinstance(n_items, int) and 1 <= n_items <= MAX_VALUES:
        return n_items
    raise UserError(
        f"{where} should be a CSR matrix with the attribute shape, (rows, items), and whole numbers as indices; it is "
        f"a {kind} with {shape}, {dtype_of(indices)}: `python convert.py arrays` writes one"
    )
