"""NumPy arrays and sparse matrices as rows."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipInfo

import h5py
import numpy as np

from fastgpu.convert.command import split_name
from fastgpu.convert.reader import explain_errors
from fastgpu.process.content import describe_content, open_regular
from fastgpu.process.launch import UserError, list_first, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.rows import OFFSET_DTYPE, Field, RaggedArray
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.file import open_to_read
from fastgpu.storage.hdf5 import look_up


def is_number(dtype: np.dtype) -> bool:
    """Whether torch has the type. It has no float of more than 64 bits."""
    return dtype.kind in "bui" or (dtype.kind == "f" and dtype.itemsize <= 8)


class SplitArrays(ArrayDataset):
    """Arrays as rows, with a column that decides the split: see `Reader`. Rows without a value in it are broken."""

    def __init__(
        self, name: str, arrays: Mapping[str, Any], fields: Mapping[str, Field], *, by: str, values: np.ndarray
    ):
        """by, values: the name of the column, and its values (rows,)."""
        super().__init__(name, arrays, fields=fields)
        self.split_by = values
        is_missing = values == "" if values.dtype.kind == "U" else np.isnan(values)
        self.broken = {row: f"{name}: row {row}: {by} is missing" for row in np.flatnonzero(is_missing).tolist()}
        self.known_broken = dict(self.broken)


def open_arrays(
    sources: Sequence[str], *, channels_last: bool = False, split_by: str = "", dtype: str | None = None
) -> ArrayDataset:
    """Fields of equal length from any number of

        name=file.npy            mapped into memory, not read
        file.npz                 all named arrays, read into memory; or file.h5::/group
        name=file.npz::array     one of these arrays
        name=file.npz            a sparse matrix (scipy.sparse.save_npz): ragged rows of column numbers, and of values
        name=file.h5::/dataset   a dataset of any HDF5 file; `convert.py repack` takes groups of CSR matrices
        name=file.bin            raw numbers, if dtype names their type: mapped into memory, not read

    channels_last: arrays of four axes are (N, H, W, C) and become (N, C, H, W). split_by: the name of the array that
    decides the split; it may hold text. Raises UserError if the arrays hold no numbers, or differ in length.
    """
    columns: dict[str, Any] = {}
    fields: dict[str, Field] = {}
    for source in sources:
        name, path = split_name(source)
        content = map_numbers(path, dtype) if dtype else load(path)
        if isinstance(content, dict) == bool(name):
            allowed = "name=file.npy, name=file.npz::array, name=file.npz of a sparse matrix, or file.npz alone"
            arrays = f"; its arrays are {list_first([*content])}" if name else ""
            raise UserError(f"{source} should be {allowed}{arrays}")
        if isinstance(content, dict):
            columns |= content
        elif not hasattr(content, "indptr"):
            columns[name] = content
        else:
            values, offsets = content.data, content.indptr.astype(np.int64)
            columns[name] = RaggedArray(content.indices.astype(np.int32), offsets)
            fields[name] = Field(OFFSET_DTYPE, (), n_items=content.shape[1])
            if not (values == 1).all():
                columns[f"{name}_values"] = RaggedArray(values, offsets)
                found = f"{path} has values from {values.min():g} to {values.max():g}, which become {name}_values"
                warn(f"{found}; of ratings, keep those that count before: matrix = matrix > 3")
    values = _take_values(columns, split_by) if split_by else None
    dense = {name: column for name, column in columns.items() if not isinstance(column, RaggedArray)}
    images = [name for name, column in dense.items() if channels_last and column.ndim == 4]
    if channels_last and not images:
        raise UserError("--layout nhwc has no effect: no field has four axes (N, H, W, C); leave it out")
    wrong = [
        f"{name} is {column.dtype} {column.shape}"
        for name, column in dense.items()
        if column.ndim == 0 or 0 in column.shape[1:] or not is_number(column.dtype)
    ]
    if wrong:
        allowed = 'rows of bool, integers and floats of at most 64 bits, such as x.astype("float64")'
        raise UserError(f"{list_first(wrong)}; allowed are {allowed}")
    columns |= {name: np.moveaxis(columns[name][:], 3, 1) for name in images}
    lengths = {name: len(column) for name, column in columns.items()}
    if values is not None:
        lengths[split_by] = len(values)
    if len({*lengths.values()}) > 1 or 0 in lengths.values():
        raise UserError(f"the arrays have lengths {lengths}; give all as many rows, and at least one")
    name = ", ".join(sources)
    if values is None:
        return ArrayDataset(name, columns, fields=fields)
    return SplitArrays(name, columns, fields, by=split_by, values=values)


def _take_values(columns: dict[str, Any], name: str) -> np.ndarray:
    """Take the values of the array that decides the split, (rows,). An array of text is not kept as a field."""
    if name not in columns:
        raise UserError(f"--split-by: there is no array {name}, but {list_first([*columns])}")
    array = columns[name]
    shape = getattr(array, "shape", "ragged")
    if len(shape) != 1:
        raise UserError(f"--split-by: {name} is {shape}; name an array with one value for each row")
    values = np.asarray(array[:])
    if values.dtype.kind in "SO":  # as HDF5 keeps text
        values = np.array([each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in values])
    if values.dtype.kind == "U":
        print(f"{name} is text, which rows cannot hold: it decides the split, and is not written")
        del columns[name]
    return values


def load(path: str) -> Any:
    """An array, {name: array}, or a SciPy matrix in CSR format, without duplicate entries or stored zeros."""
    file, _, member = path.partition("::")
    with explain_errors(path, 'NumPy arrays of numbers, or a sparse matrix (save objects as x.astype("float64"))'):
        open_regular(Path(file)).close()  # is_hdf5 would wait for a FIFO
        is_h5 = h5py.is_hdf5(file)
        kind = describe_content(file)
        if not is_h5 and not kind.removeprefix("a ").startswith("NumPy"):
            cure = "" if kind else ", or --dtype should name the type of its numbers, such as uint16"
            raise UserError(f"{file} is {kind or 'of no known format'}; it should be .npy, .npz or HDF5{cure}")
        content = (
            look_up(open_to_read(file), member or "/", file)
            if is_h5
            else np.load(file, mmap_mode="r", allow_pickle=False)
        )
        if member and not is_h5:
            if isinstance(content, np.ndarray):
                raise UserError(f"{file} is one array: name it without ::{member}")
            if member not in content:
                raise UserError(f"{file} has no array {member}; its arrays are {list_first([*content])}")
            _check_memory(file, content.zip.infolist(), f"{member}.npy")
            content = content[member]
        if content is None:
            raise KeyError(f"it has no {member}")
        if isinstance(content, h5py.Group):
            content = {name: look_up(content, name, file) for name in content}
        if hasattr(content, "keys") and {"indptr", "indices"} <= {*content} and "format" not in content:
            cure = 'sparse.save_npz("x.npz", sparse.csr_array((data, indices, indptr), shape)) of scipy'
            cure = "`python convert.py repack` takes CSR matrices of HDF5 files" if is_h5 else cure
            raise UserError(f"{path} has the parts of a sparse matrix, which are no rows: {cure}")
        if hasattr(content, "dtype"):  # TypeError: HDF5 has types that NumPy does not have
            return content
        if not is_h5:
            _check_memory(file, content.zip.infolist())
        if is_h5 or not {"shape", "data", "format"} <= {*content}:
            return {name: np.asarray(member) for name, member in content.items()}  # a damaged member is bytes
        from scipy import sparse  # of the extra `convert`

        matrix = sparse.load_npz(path).tocsr()
        matrix.check_format(full_check=True)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
    if matrix.shape[1] > np.iinfo(np.int32).max or not is_number(matrix.dtype) or not matrix.nnz:
        found = f"{path} is {matrix.dtype} {matrix.shape} with {matrix.nnz:,} values"
        raise UserError(f"{found}; allowed are real numbers, fewer than 2^31 columns and at least one value")
    return matrix


def map_numbers(path: str, dtype: str) -> Any:
    """(N,) numbers of a raw binary file without a header, as `tofile` of NumPy writes it, mapped into memory."""
    file, _, member = path.partition("::")
    with explain_errors(path, f"raw numbers of {dtype}"):
        with open_regular(Path(file)) as opened:
            head, n_bytes = opened.read(8), opened.seek(0, os.SEEK_END)
        if head.startswith((b"\x93NUMPY", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n")):
            raise UserError(f"--dtype {dtype} is for raw numbers, and {file} has a type of its own; leave --dtype out")
        if member:
            raise UserError(f"{file} is one array: name it without ::{member}")
        if not n_bytes or n_bytes % np.dtype(dtype).itemsize:
            found = f"{file} has {n_bytes:,} bytes, and {dtype} has {np.dtype(dtype).itemsize} for each number"
            raise UserError(f"{found}; is the file whole, and of this type?")
        return np.memmap(file, dtype, "r")


def read_ones(source: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of the entries of a sparse matrix, (N,) each. Raises UserError if an entry is not 1."""
    matrix = load(source)
    if not hasattr(matrix, "indptr") or (matrix.data != 1).any():
        raise UserError(f"{source} is no sparse matrix of ones; save one, such as matrix = matrix > 3")
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices


def _check_memory(file: str, members: Sequence[ZipInfo], name: str = "") -> None:
    """Raise UserError if the members of an archive, or the named member, do not fit into the free memory."""
    size, free = sum(each.file_size for each in members if name in ("", each.filename)), free_host_bytes()
    if size > free:
        found = f"{file} holds {size / 1e9:,.1f} GB of arrays, and {free / 1e9:,.1f} GB of memory are free"
        raise UserError(f"{found}; save them by np.save, as files of their own, which are not read as a whole")
