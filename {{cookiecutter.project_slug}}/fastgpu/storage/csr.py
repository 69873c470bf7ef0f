"""The datasets of one field: one row after the other, or ragged rows as a CSR group.

    field                        datasets                                     `data.fields`
    rows of one shape            (rows, *shape)                               images: images
    item numbers of each row     items/indptr, items/indices, shape           items: items
    values that belong to them   items/indptr, items/data                     weights: items/data
    other ragged values, (N,)    words/indptr, words/values                   words: words
    with a trailing shape        boxes/indptr, boxes/values (N, 4)            boxes: boxes
    encoded images               images/indptr, images/values, codec          images: images

A CSR matrix is written as anndata writes it (https://anndata.readthedocs.io/en/stable/fileformat-prose.html): row n has
indices[indptr[n] : indptr[n + 1]], and the attribute `shape` is (rows, items). The values of an encoded image are the
bytes of an image file; the attribute `codec` of the group says that they are, and names the formats.
"""

from collections.abc import Collection

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.storage.columns import RaggedColumn
from fastgpu.storage.file import OpenFile
from fastgpu.storage.hdf5 import attributes_of, find
from fastgpu.storage.layout import Layout

LOOK_AT_VALUES = 1 << 16
"""How many values of a CSR matrix are looked at to find out whether they matter."""


def open_column(
    root: h5py.Group, name: str, where: str, file: OpenFile, *, verify: bool = False
) -> Layout | RaggedColumn:
    """The field that `name` stands for (see the table above). Raises UserError if its datasets do not fit.

    where: the config key and the file, for messages. file, verify: see `Layout`.
    """
    group = root.get(name)
    n_items = None
    codec = ""
    if not isinstance(group, h5py.Group) or "indptr" not in group:
        data = find(root, name, h5py.Dataset, where)
        is_cut_by_indptr = data.ndim == 1 and "indptr" in data.parent
        if not is_cut_by_indptr or len(data) == len(data.parent["indptr"]) - 1:  # one value per row
            return Layout(f"{where}: {name}", data, file, verify=verify)
    elif "values" in group:
        data = find(root, f"{name}/values", h5py.Dataset, where)
        codec = str(attributes_of(group).get("codec", ""))
    else:
        data = find(root, f"{name}/indices", h5py.Dataset, where)
        n_items = _read_n_items(group, data, f"{where}: {name}")
    values = Layout(f"{where}: {name}", data, file, verify=verify, n_items=n_items)
    indptr_data = find(data.parent, "indptr", h5py.Dataset, where)
    indptr = Layout(f"{where}: {name}/indptr", indptr_data, file, verify=verify).read_all(np.dtype(np.int64))
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
    n_items = shape[1] if isinstance(shape, list) and len(shape) == 2 else 0
    is_matrix = 1 <= n_items <= MAX_VALUES and indices.dtype.kind in "ui" and indices.ndim == 1
    if kind != "csr_matrix" or not is_matrix:
        raise UserError(
            f"{where} should be a CSR matrix with the attribute shape, (rows, items), and whole numbers as indices; it "
            f"is a {kind} with {shape}, {indices.dtype}: `python convert.py arrays` writes one"
        )
    return int(n_items)


def warn_of_unread_values(root: h5py.Group, names: Collection[str], where: str) -> None:
    """Say which CSR matrices, of which only the places are read, have first values that are not all 1."""
    for name in names:
        data = root.get(f"{name}/data")
        if data is None or f"{name}/data" in names:
            continue
        values = data[:LOOK_AT_VALUES]
        others = values[values != 1]
        if len(others):
            warn(
                f"{where}: {name}/data has values other than 1, such as {others[0]:g}, which are not read: each stored "
                "item counts as one, a 0, too; store only the items that count"
            )
