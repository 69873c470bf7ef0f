"""NumPy files, sparse matrices and HDF5 datasets as a source of rows."""

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from fastgpu.convert.messages import explain_errors
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.arrays import ArrayDataset, load_numpy
from fastgpu.storage.hdf5 import attributes_of

KEEP_LIKES = "of ratings, keep those that count before they are converted, such as matrix = matrix > 3"
Columns = dict[str, Any]
"""{field: an array, an HDF5 dataset or a RaggedArray}"""


def open_arrays(sources: Sequence[str], *, channels_last: bool = False) -> ArrayDataset:
    """Fields of equal length from any number of

        name=file.npy            mapped into memory, not read
        file.npz                 arrays that have names, read
        name=file.npz            a sparse matrix as scipy.sparse.save_npz writes it: ragged rows of column numbers, and
                                 if its values are not all 1, the ragged rows `name_values`
        name=file.h5::/dataset   of any HDF5 file; or the group of a CSR or CSC matrix as anndata writes it

    channels_last: columns of four axes are (N, H, W, C) and become (N, C, H, W), for which HDF5 datasets are read.
    Raises UserError for what cannot be rows.
    """
    source_name = ", ".join(sources)
    columns: Columns = {}
    n_items: dict[str, int | None] = {}
    for source in sources:
        name, _, path = source.rpartition("=")
        content = _load(path)
        is_matrix = hasattr(content, "indptr")
        has_own_names = isinstance(content, dict)
        if has_own_names == bool(name):
            raise UserError(f"{source} should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone")
        if is_matrix:
            with explain_errors(path, "a whole sparse matrix"):
                columns |= _ragged_columns(name, path, content)
                n_items[name] = content.shape[1]
        elif has_own_names:
            columns |= content
        else:
            columns[name] = content
    dense = {name: column for name, column in columns.items() if not isinstance(column, RaggedArray)}
    for name, column in dense.items():
        if column.ndim == 0 or 0 in column.shape[1:] or column.dtype.kind not in "buif":
            raise UserError(f"{name} is {column.dtype} {column.shape}; allowed are rows of bool, integers and floats")
        if channels_last and column.ndim == 4:
            columns[name] = np.moveaxis(column[:], 3, 1)
    if channels_last and not any(column.ndim == 4 for column in dense.values()):
        raise UserError(
            f"--layout nhwc is for fields of four axes (N, H, W, C), but the fields are {', '.join(columns)}"
        )
    labels = dense.get("labels")
    if labels is not None and labels.dtype.kind == "f":
        wrong = np.argwhere(~np.isfinite(labels[:]))
        if len(wrong):
            value = labels[:][tuple(wrong[0])]
            counts = f"{len(np.unique(wrong[:, 0])):,} of {len(labels):,}"
            raise UserError(f"{source_name}: row {wrong[0, 0]} of labels is {value}; leave out such rows, {counts}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the arrays are of unequal length {lengths}; give each as many rows")
    if not any(lengths.values()):
        raise UserError(f"{source_name}: no rows")
    return ArrayDataset(source_name, columns, n_items=n_items)


def _load(path: str) -> Any:
    """An array, a mapping of arrays, or a sparse matrix of scipy in CSR format."""
    file, is_h5, name = path.partition("::")
    with explain_errors(path, "a file of NumPy arrays of numbers"):
        if not is_h5:
            content = load_numpy(path)
            if isinstance(content, dict) and {"shape", "data", "format"} <= set(content):
                from scipy import sparse  # of the extra `convert`

                return sparse.load_npz(path).tocsr()
            return content
        item = h5py.File(file)[name]
        if isinstance(item, h5py.Dataset):
            return item
        from scipy import sparse

        kind = attributes_of(item, path)["encoding-type"]
        make = {"csr_matrix": sparse.csr_matrix, "csc_matrix": sparse.csc_matrix}[kind]
        members = tuple(item[member][:] for member in ("data", "indices", "indptr"))
        matrix = make(members, shape=attributes_of(item, path)["shape"])
        return matrix.tocsr()


def _ragged_columns(name: str, path: str, matrix: Any) -> dict[str, RaggedArray]:
    """The rows of a CSR matrix: for each row the columns whose value is not 0, ascending; and the values.

    Entries at the same place are summed.
    """
    if matrix.shape[1] > np.iinfo(np.int32).max or matrix.dtype.kind not in "buif":
        raise UserError(
            f"{path} is {matrix.dtype} {matrix.shape}; allowed are real numbers and fewer than 2^31 columns"
        )
    matrix.check_format(full_check=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    if not matrix.nnz:
        raise UserError(f"{path} is a matrix without values")
    offsets = matrix.indptr.astype(np.int64)
    ragged = {name: RaggedArray(matrix.indices.astype(np.int32), offsets)}
    values = matrix.data
    if not (values == 1).all():
        ragged[f"{name}_values"] = RaggedArray(values, offsets)
        warn(
            f"{path} has values from {values.min():g} to {values.max():g}, which become {name}_values; {name} has the "
            f"places of all, also of low and negative ones, which count alike where only places are read; {KEEP_LIKES}"
        )
    return ragged
