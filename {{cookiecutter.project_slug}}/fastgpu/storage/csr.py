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

from typing import NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import MAX_VALUES, OFFSET_DTYPE, Field
from fastgpu.storage.hdf5 import attributes_of, open_dataset
from fastgpu.storage.layout import Layout, ReadOptions

LOOK_AT_VALUES = 1 << 16
"""How many values of a CSR matrix are looked at to find out whether they matter."""


class FieldData(NamedTuple):
    """The datasets of one field in one file."""

    values: h5py.Dataset
    """(rows, *shape); for a ragged field (N, *shape), the values of one row after the other."""
    indptr: h5py.Dataset | None = None
    """(rows + 1,): where the values of each row begin. None: the field is not ragged."""
    n_items: int | None = None
    """If the values are item numbers: the number of items."""
    codec: str = ""
    """If the values of a row are an image file: the formats of these files."""

    @property
    def n_rows(self) -> int:
        if self.indptr is None:
            return len(self.values)
        return len(self.indptr) - 1

    def field(self, value_field: Field) -> Field:
        """The type of the rows. value_field: the type of the dataset of values."""
        if self.indptr is None:
            return value_field
        dtype = value_field.dtype
        if self.n_items:
            dtype = OFFSET_DTYPE  # item numbers fit it, whatever type the file has
        return Field(dtype, value_field.shape, len(self.values) / max(1, self.n_rows), self.n_items, self.codec)


def open_field(root: h5py.Group, name: str, where: str) -> FieldData:
    """The datasets of the field that `name` stands for (see the table above). Raises UserError if they do not fit.

    where: the config key and the file, for messages.
    """
    group = root.get(name)
    n_items = None
    codec = ""
    if not isinstance(group, h5py.Group) or "indptr" not in group:
        values = open_dataset(root, name, where)
        is_cut_by_indptr = values.ndim == 1 and "indptr" in values.parent
        if not is_cut_by_indptr or len(values) == len(values.parent["indptr"]) - 1:  # one value per row
            return FieldData(values)
    elif "values" in group:
        values = open_dataset(root, f"{name}/values", where)
        codec = str(attributes_of(group, f"{where}: {name}").get("codec", ""))
        if codec and (values.ndim != 1 or values.dtype != np.uint8):
            raise UserError(f"{where}: {name} has the attribute codec, but its values are no bytes, uint8 (N,)")
    else:
        values = open_dataset(root, f"{name}/indices", where)
        n_items = _read_n_items(group, values, f"{where}: {name}")
    indptr = open_dataset(values.parent, "indptr", f"{where}: {name}")
    return FieldData(values, indptr, n_items, codec)


def _read_n_items(group: h5py.Group, indices: h5py.Dataset, where: str) -> int:
    """The number of items of a CSR matrix. Raises UserError if the group is not one, or its indices are no numbers."""
    attributes = attributes_of(group, where)
    kind = attributes.get("encoding-type", "csr_matrix")
    shape = attributes.get("shape")
    if kind != "csr_matrix":
        raise UserError(f"{where} is a {kind}; rows need a csr_matrix: `python convert.py arrays` writes it")
    n_items = shape[1] if isinstance(shape, list) and len(shape) == 2 else 0
    if not 1 <= n_items <= MAX_VALUES or indices.dtype.kind not in "ui" or indices.ndim != 1:
        raise UserError(
            f"{where} should have the attribute shape, (rows, items), and whole numbers as indices; it has "
            f"{shape}, {indices.dtype}"
        )
    return int(n_items)


def warn_of_unread_values(root: h5py.Group, name: str, where: str) -> None:
    """Say if the first values of a CSR matrix, of which only the places are read, are not all 1."""
    values = root[name].get("data", np.empty(0))[:LOOK_AT_VALUES]
    others = values[values != 1]
    if len(others):
        warn(
            f"{where}: {name}/data has values other than 1, such as {others[0]:g}, which are not read: each stored "
            "item counts as one, a 0, too; store only the items that count"
        )


def read_indptr(data: FieldData, where: str, options: ReadOptions) -> np.ndarray:
    """(rows + 1,) int64: where the values of each row of a ragged field begin. Raises UserError if it cannot be so."""
    indptr = Layout(f"{where}/indptr", data.indptr, options).read_all(np.dtype(np.int64))
    rises = indptr.ndim == 1 and len(indptr) and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
    if not rises or indptr[-1] != len(data.values):
        raise UserError(f"{where} is damaged: its indptr should rise from 0 to the {len(data.values):,} values")
    if len(indptr) > 1 and np.diff(indptr).max() > MAX_VALUES:
        raise UserError(f"{where} has a row of more than {MAX_VALUES:,} values")
    return indptr
