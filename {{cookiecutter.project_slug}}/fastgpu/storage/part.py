"""A part of a dataset: the rows of one HDF5 file, or of a group of it, opened and checked."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.rows.selection import Runs
from fastgpu.storage.columns import InMemory, RaggedColumn
from fastgpu.storage.file import OpenFile
from fastgpu.storage.hdf5 import attributes_of, dtype_of, find, look_up, open_file
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, open_layout

PACKING = {"scale_factor": "1.0", "add_offset": "0.0", "_FillValue": "nan", "missing_value": "nan"}
"""{attribute of a netCDF variable that changes the meaning of stored numbers: values without an effect}"""


class Recordings(NamedTuple):
    """Series of steps, such as a file of sensor values. A window belongs to one recording."""

    runs: Runs
    """The steps of each recording: rows of the dataset, in its order."""
    values: Mapping[str, np.ndarray]
    """{field: (recordings, *shape)}: fields with one value for each recording, such as its class."""

    @property
    def fields(self) -> dict[str, Field]:
        """{field: its type}"""
        return {name: Field(each.dtype, each.shape[1:]) for name, each in self.values.items()}

    def part(self, starts: np.ndarray, counts: np.ndarray) -> "Recordings":
        """The recordings cut to other steps, without recordings that have no step left."""
        keep = np.flatnonzero(counts > 0)
        values = {field: each[keep] for field, each in self.values.items()}
        return Recordings(Runs(starts, counts).take(keep), values)


def one_recording(n_steps: int) -> Recordings:
    """All steps of a file as one recording."""
    return Recordings(Runs(np.zeros(1, np.int64), np.array([n_steps])), {})


class Part(NamedTuple):
    """The rows of one file, or of one group of a file."""

    name: str
    """The path, with the group if there is one: `file.h5::/group`."""
    path: str
    group: str
    """The group with the fields; "/" for the whole file."""
    file: OpenFile
    columns: Mapping[str, Any]
    """{field: its rows, a column of columns.py}"""
    block_rows: np.ndarray
    """(blocks,) int32: number of rows in each block."""
    attributes: dict[str, Any]
    recordings: Recordings
    """If rows are steps: the whole file is one recording, or each row of a ragged field is a recording."""

    @property
    def fields(self) -> dict[str, Field]:
        """{field: its type}"""
        return {name: column.field for name, column in self.columns.items()}

    @property
    def n_rows(self) -> int:
        return int(self.block_rows.sum())


class Request(NamedTuple):
    """The arguments of `open_parts` that all files of a dataset share."""

    key: str
    """The config key that names the files, for messages."""
    fields: Mapping[str, str]
    """{field: dataset or CSR group}"""
    by_step: bool
    """Whether a row is a step of a recording. Each value of a ragged row is then a step, too."""
    around_page_cache: bool
    cache: str
    """For `around_page_cache` and `cache`, see `open_file`."""


def open_parts(asked: Request, path: str, groups: Sequence[str], *, is_first: bool) -> list[Part]:
    """Open groups of a file; "/" is the whole file. Raises UserError if a person has to change something.

    is_first: whether this is the first of several files. Only its first group is checked for values that are not read
    as they are meant.
    """
    opened: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    where_file = f"{asked.key}: {path}"
    open_column = _open_steps if asked.by_step else _open_column
    with open_file(path, where_file, around_page_cache=asked.around_page_cache, cache=asked.cache) as (file, h5):
        for group in groups:
            name = path if group == "/" else f"{path}::{group}"
            where = f"{asked.key}: {name}"
            root = find(h5, group, h5py.Group, where_file)
            columns = {field: open_column(root, dataset, where, file) for field, dataset in asked.fields.items()}
            if is_first and not opened:
                _warn_of_numbers_not_meant(root, asked.fields.values(), where)
            opened.append((name, columns, attributes_of(root)))
    parts = []
    for group, (name, columns, attributes) in zip(groups, opened, strict=True):
        where = f"{asked.key}: {name}"
        if asked.by_step:
            _check_order(asked.fields, columns, attributes, where)
        rows, recordings = _cut_recordings(columns, where) if asked.by_step else (columns, one_recording(0))
        if not asked.by_step:
            _check_lengths(rows, where)
        parts.append(Part(name, path, group, file, *_cut_blocks(rows), attributes, recordings))
    return parts


def _check_lengths(opened: Mapping[str, Any], where: str) -> None:
    lengths = {field: len(column) for field, column in opened.items()}
    if min(lengths.values()) < max(1, *lengths.values()):
        raise UserError(f"{where} has fields of lengths {lengths}; give each as many rows, and at least one")


def _cut_blocks(opened: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """The columns, with small columns read into memory, and the number of rows in each block."""
    n_rows = len(next(iter(opened.values())))
    largest = max(opened.values(), key=lambda column: column.field.row_bytes)
    # Small fields are kept in memory, so that a block costs a single read, of the largest field.
    columns = {
        field: column if column is largest or n_rows * column.field.row_bytes > COLUMN_BYTES else _in_memory(column)
        for field, column in opened.items()
    }
    if isinstance(largest, Layout):
        step = largest.chunk_rows
    else:  # blocks of about BLOCK_BYTES, at least MIN_BLOCKS blocks
        step = max(1, min(BLOCK_BYTES // largest.field.row_bytes, n_rows // MIN_BLOCKS))
    return columns, np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)


def _in_memory(column: Any) -> Any:
    """Read a `Layout`, or the values of a ragged column, into memory."""
    if isinstance(column, RaggedColumn):
        return RaggedColumn(column.field, _in_memory(column.values), column.indptr)
    return InMemory(column.read_all(), column.field.n_items)


class _OfRecording(InMemory):
    """A single number: the value of a whole recording."""


def _open_steps(root: h5py.Group, name: str, where: str, file: OpenFile) -> Any:
    """A field of steps. A dataset that is named directly is one recording, even if `indptr` in its group cuts it into
    rows. A single number is the value of a whole recording."""
    data = look_up(root, name, where)
    if not isinstance(data, h5py.Dataset):
        return _open_column(root, name, where, file)
    if data.ndim == 0 and dtype_of(data).kind in "buif":
        return _OfRecording(np.array(data[()], ndmin=1))
    return open_layout(f"{where}: {name}", data, file)


def _check_order(
    fields: Mapping[str, str], opened: Mapping[str, Any], attributes: Mapping[str, Any], where: str
) -> None:
    """Raise UserError if convert.py has shuffled the steps. Ragged rows are no error, even if their values are named as
    one series: convert.py shuffles them as whole recordings, and the order of recordings does not matter."""
    is_ragged = any(isinstance(opened[field], RaggedColumn) or "/" in name for field, name in fields.items())
    if not is_ragged and str(attributes.get("row_order", "")).startswith("random"):
        cure = "write the file with --keep-order, or use data.window=0"
        raise UserError(f"{where} has its rows in random order, but data.window needs the order of a series; {cure}")


def _cut_recordings(opened: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Recordings]:
    """The fields with a value for each step, and the recordings, with the fields of one value for each recording."""
    ragged = {field: column for field, column in opened.items() if isinstance(column, RaggedColumn)}
    first, *others = ragged or [""]
    for field, column in ragged.items():
        if column.field.codec:
            raise UserError(f"{where}: {field} has encoded images, which cannot be cut into windows; use data.window=0")
    for field in others:
        if not np.array_equal(ragged[first].indptr, ragged[field].indptr):
            raise UserError(f"{where}: {first} and {field} have recordings of other lengths; give both the same indptr")
    columns = {field: column.values if field in ragged else column for field, column in opened.items()}
    of_steps = [column for column in columns.values() if not isinstance(column, _OfRecording)]
    if not of_steps:
        raise UserError(f"{where}: {', '.join(columns)} have one value for the recording; name a field of steps, too")
    n_steps = len(columns[first]) if ragged else max(map(len, of_steps))
    ends = ragged[first].indptr if ragged else np.array([0, n_steps])
    n_recordings = len(ends) - 1
    values = {
        field: column
        for field, column in columns.items()
        if isinstance(column, _OfRecording) or len(column) == n_recordings != n_steps
    }
    lengths = {field: len(column) for field, column in columns.items()}
    if any(len(column) != (n_recordings if field in values else n_steps) for field, column in columns.items()):
        raise UserError(
            f"{where} has fields of lengths {lengths}; give each as many steps, or one value for each of its "
            f"{n_recordings:,} recordings"
        )
    arrays = {
        field: column.rows if isinstance(column, InMemory) else column.read_all() for field, column in values.items()
    }
    steps = {field: column for field, column in columns.items() if field not in values}
    return steps, Recordings(Runs(ends[:-1], np.diff(ends)), arrays)


def _warn_of_numbers_not_meant(root: h5py.Group, names: Collection[str], where: str) -> None:
    """Warn of packed numbers (scale, offset), and of a CSR matrix with values that are not all 1 at its beginning."""
    for name in names:
        known = attributes_of(look_up(root, name, where))
        packed = [key for key, same in PACKING.items() if str(known.get(key, same)).strip("[]") not in same]
        if packed:
            warn(
                f"{where}: {name} has {', '.join(packed)}, which are not applied: its numbers are read as they are "
                "stored, missing ones too. To convert it once, save xarray.open_dataset(FILE)[NAME].values by "
                "numpy.save, then python convert.py arrays"
            )
        data = look_up(root, f"{name}/data", where)
        is_left_out = isinstance(data, h5py.Dataset) and data.ndim == 1 and f"{name}/data" not in names
        if is_left_out and dtype_of(data).kind in "buif" and (data[: 1 << 16] != 1).any():
            warn(
                f"{where}: {name}/data has values other than 1, which are not read: each stored item counts as one, "
                "a 0, too; store only the items that count"
            )


def _open_column(root: h5py.Group, name: str, where: str, file: OpenFile) -> Layout | RaggedColumn:
    """The field with the name `name` in the file. Raises UserError if its datasets do not fit together.

    It is a dataset (rows, *shape); a CSR matrix as anndata writes it, or the `data` of such a matrix
    (https://anndata.readthedocs.io/en/stable/fileformat-prose.html); or a group of `indptr` and `values`, (N, *shape).
    If the group has the attribute `codec`, the values are the bytes of image files.
    """
    group = look_up(root, name, where)
    n_items = None
    codec = ""
    if not isinstance(group, h5py.Group) or "indptr" not in group:
        data = find(root, name, h5py.Dataset, where)
        cuts = look_up(data.parent, "indptr", where) if data.ndim == 1 else None
        is_cut = isinstance(cuts, h5py.Dataset) and cuts.ndim == 1 and len(cuts) != len(data) + 1
        if not is_cut:  # there is no indptr, or it gives each row one value
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
