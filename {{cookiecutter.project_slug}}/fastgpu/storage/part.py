"""A part of a dataset: the rows of one HDF5 file, or of a group of it, opened and checked."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.storage.columns import InMemory, RaggedColumn
from fastgpu.storage.file import OpenFile
from fastgpu.storage.hdf5 import attributes_of, dtype_of, find, look_up, open_file
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS, Layout, open_layout

PACKING = {"scale_factor": "1.0", "add_offset": "0.0", "_FillValue": "nan", "missing_value": "nan"}
"""{attribute of a netCDF variable that says which value a stored number stands for: one that changes nothing}"""


class Part(NamedTuple):
    """The rows of one file."""

    name: str
    """Its path, and its group if it has one: `file.h5::/group`."""
    path: str
    group: str
    """The group that has the fields, which is "/" for those of the whole file."""
    file: OpenFile
    columns: Mapping[str, Any]
    """{field: its rows, a column of columns.py}"""
    block_rows: np.ndarray
    """(blocks,) int32: number of rows in each block."""
    attributes: dict[str, Any]

    @property
    def n_rows(self) -> int:
        return int(self.block_rows.sum())


def open_part(
    key: str, file: tuple[str, str], fields: Mapping[str, str], *, around_page_cache: bool, cache: str, is_first: bool
) -> Part:
    """Open a file. Raises UserError if a person has to change something. key: the config key that names it.

    file: its path and the group. fields: {field: dataset or CSR group}. around_page_cache, cache: see `open_file`.
    is_first: of several parts, the one that is warned of if it has values that are not read as they are meant.
    """
    path, group = file
    name = path if group == "/" else f"{path}::{group}"
    where = f"{key}: {name}"
    with open_file(path, f"{key}: {path}", around_page_cache=around_page_cache, cache=cache) as (opened_file, h5):
        root = find(h5, group, h5py.Group, f"{key}: {path}")
        attributes = attributes_of(root)
        opened = {field: _open_column(root, dataset, where, opened_file) for field, dataset in fields.items()}
        if is_first:
            _warn_of_numbers_not_meant(root, fields.values(), where)
    lengths = {field: len(column) for field, column in opened.items()}
    n_rows = min(lengths.values())
    if n_rows < max(1, *lengths.values()):
        raise UserError(f"{where} has fields of lengths {lengths}; give each as many rows, and at least one")
    largest = max(opened.values(), key=lambda column: column.field.row_bytes)
    # Small fields are kept in memory, so that a block costs one read: of the largest field.
    columns = {
        field: column if column is largest or n_rows * column.field.row_bytes > COLUMN_BYTES else _in_memory(column)
        for field, column in opened.items()
    }
    if isinstance(largest, Layout):
        step = largest.chunk_rows
    else:  # about BLOCK_BYTES, in MIN_BLOCKS or more
        step = max(1, min(BLOCK_BYTES // largest.field.row_bytes, n_rows // MIN_BLOCKS))
    block_rows = np.diff(np.arange(0, n_rows, step), append=n_rows).astype(np.int32)
    return Part(name, path, group, opened_file, columns, block_rows, attributes)


def _in_memory(column: Any) -> Any:
    """The rows of a `Layout`, or of a ragged column of one, which are read now."""
    if isinstance(column, RaggedColumn):
        return RaggedColumn(column.field, _in_memory(column.values), column.indptr)
    return InMemory(column.read_all())


def _warn_of_numbers_not_meant(root: h5py.Group, names: Collection[str], where: str) -> None:
    """Say where numbers stand for others, and where a matrix has numbers of which the first ones are not all 1."""
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
