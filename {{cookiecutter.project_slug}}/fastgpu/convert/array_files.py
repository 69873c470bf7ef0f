"""Arrays in files."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.arrays import Arrays


def open_arrays(sources: Sequence[str]) -> Arrays:
    """Columns by name, from

        name=file.npy            mapped, not read
        file.npz                 arrays with names of their own, read
        name=file.npz            a sparse matrix as scipy.sparse.save_npz writes it: ragged rows of column numbers, and
                                 if its values are not all 1, those as ragged rows `name_values`
        name=file.h5::/dataset   of any HDF5 file; the group of a CSR or CSC matrix as anndata writes it, too

    Raises UserError for what cannot be rows.
    """
    columns, n_items = dict[str, Any](), dict[str, int]()
    for source in sources:
        name, _, path = source.rpartition("=")
        try:
            found = _load(path)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist (looked in {Path.cwd()})") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} holds no NumPy arrays of numbers: {error}") from None
        is_matrix = isinstance(found, Mapping) and {"shape", "data"} <= set(found)
        if (isinstance(found, Mapping) and not is_matrix) == bool(name):
            raise UserError(f"{source} should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone")
        if is_matrix:
            n_items[name] = int(found["shape"][1])
            columns |= _ragged(name, path, found)
        else:
            columns |= {name: found} if name else dict(found)
    for name, column in columns.items():
        if not isinstance(column, RaggedArray) and (column.ndim == 0 or column.dtype.kind not in "buif"):
            raise UserError(f"{name} is {column.dtype} {column.shape}; allowed are rows of bool, integers and floats")
    if len(lengths := {name: len(column) for name, column in columns.items()}) and len(set(lengths.values())) > 1:
        raise UserError(f"the arrays are of unequal length {lengths}; give each as many rows")
    if not next(iter(lengths.values()), 0):
        raise UserError(f"{', '.join(sources)}: no rows")
    return Arrays(", ".join(sources), columns, n_items=n_items)


def _load(path: str) -> Any:
    """An array, or a mapping of them."""
    file, is_h5, inside = path.partition("::")
    if not is_h5:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    found = h5py.File(file)[inside]
    if isinstance(found, h5py.Dataset):
        return found
    kind = np.array(str(found.attrs["encoding-type"]).removesuffix("_matrix"))
    return {name: each[:] for name, each in found.items()} | {"shape": found.attrs["shape"], "format": kind}


def _ragged(name: str, path: str, matrix: Mapping[str, np.ndarray]) -> dict[str, RaggedArray]:
    """The rows of a sparse matrix: numbers of the columns with a value that is not 0, ascending; and the values."""
    kind = str(matrix["format"].astype(str))
    if kind == "coo":
        rows, columns = matrix["row"], matrix["col"]
    elif kind in ("csr", "csc"):
        rows, columns = np.repeat(np.arange(len(matrix["indptr"]) - 1), np.diff(matrix["indptr"])), matrix["indices"]
        rows, columns = (rows, columns) if kind == "csr" else (columns, rows)
    else:
        raise UserError(f"{path} is a matrix in the format {kind}; save it as csr")
    height, width = (int(each) for each in matrix["shape"])
    if len(rows) != len(matrix["data"]) or not len(rows) or rows.max() >= height or columns.max() >= width:
        raise UserError(f"{path} is no whole matrix of {height:,} x {width:,}: save it again")
    keys, which = np.unique(rows.astype(np.int64) * width + columns, return_inverse=True)
    values = np.zeros(len(keys), matrix["data"].dtype)
    np.add.at(values, which, matrix["data"])  # what stands twice is summed, as scipy does
    keys, values = keys[values != 0], values[values != 0]
    offsets = np.searchsorted(keys, np.arange(height + 1) * width)
    found = {name: RaggedArray((keys % width).astype(np.int32), offsets)}
    return found if (values == 1).all() else found | {f"{name}_values": RaggedArray(values, offsets)}
