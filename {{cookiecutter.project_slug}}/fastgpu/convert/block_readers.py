"""Rows that are read in blocks: HDF5 files, NumPy arrays, sparse matrices, and Datasets of the user's own."""

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import h5py
import numpy as np
import torch

from fastgpu.convert.messages import explain_errors
from fastgpu.convert.reader import Columns, Reader
from fastgpu.convert.summary import damaged, fields_of, inspect
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import OFFSET_DTYPE, Field, RaggedArray
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import expand, open_store


class FeedReader(Reader):
    """The rows of a source that can be trained on, by the feed that training has.

    It reads files in whole blocks, and Datasets in worker processes, since their code may be unsafe in threads.
    """

    def __init__(self, rows: Dataset, name: str = ""):
        """name: for messages, if not that of `rows`."""
        self.name = name or rows.name
        self.attributes = rows.attributes
        self.fields = rows.fields
        self.block_rows = rows.block_rows
        labels = rows.column("labels")
        if labels is not None:
            self.labels = labels
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, order: BlockSampler, broken: dict[int, str]) -> Generator[Columns]:
        """All rows of an order. Raises RankError if one cannot be read."""
        placement = Placement("disk", torch.device("cpu"), available_cpus())
        with closing(make_feed(self._rows, order, placement, Loader(prefetch_pools=1))) as feed:
            for pool in feed.pools(0):
                for rows in pool.rows.batches(order.batch_size):
                    yield rows.numpy()


def open_files(paths: Sequence[str], fields: dict[str, str]) -> FeedReader:
    """The rows of HDF5 files. Those with checksums are read once before, or the new file would vouch for their damage.

    fields: {field: dataset}; empty for all datasets of the group. Raises UserError if the group has no rows.
    """
    file, group = expand("SOURCE", paths[0])[0]
    stored = inspect(f"{file}::{group}")
    groups = fields_of(stored)
    group = f"/{group.strip('/')}"
    if not fields and group not in groups:
        raise UserError(f"{paths[0]} has no rows in {group}, but {', '.join(sorted(groups)) or 'no numbers'}")
    fields = fields or groups[group]
    for each in (f"{file}::{group}" for path in paths for file, group in expand("SOURCE", path)):
        if any(data.has_digests for data in inspect(each)) and (damages := damaged(each)):
            raise UserError(f"{damages[0]}; `python convert.py check` lists all damaged blocks")
    return FeedReader(open_store("SOURCE", paths, fields))


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
    columns: dict[str, Any] = {}
    fields: dict[str, Field] = {}
    for source in sources:
        name, _, path = source.rpartition("=")
        content = load(path)
        if isinstance(content, dict) == bool(name):
            raise UserError(f"{source} should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone")
        if hasattr(content, "indptr"):
            columns |= _ragged_columns(name, path, content)
            fields[name] = Field(OFFSET_DTYPE, (), n_items=content.shape[1])
        else:
            columns |= content if isinstance(content, dict) else {name: content}
    dense = {name: column for name, column in columns.items() if not isinstance(column, RaggedArray)}
    if channels_last and not any(column.ndim == 4 for column in dense.values()):
        raise UserError("--layout nhwc has no effect: no field has four axes (N, H, W, C); leave it out")
    for name, column in dense.items():
        if column.ndim == 0 or 0 in column.shape[1:] or column.dtype.kind not in "buif":
            raise UserError(f"{name} is {column.dtype} {column.shape}; allowed are rows of bool, integers and floats")
        if channels_last and column.ndim == 4:
            columns[name] = np.moveaxis(column[:], 3, 1)
    lengths = {name: len(column) for name, column in columns.items()}
    if len({*lengths.values()}) > 1 or 0 in lengths.values():
        raise UserError(f"the arrays have lengths {lengths}; give all as many rows, and at least one")
    return ArrayDataset(", ".join(sources), columns, fields=fields)


def load(path: str) -> Any:
    """An array, {name: array}, or a sparse matrix of scipy in CSR format, each place of it once and none of 0."""
    file, is_h5, name = path.partition("::")
    with explain_errors(path, "a file of NumPy arrays of numbers, or a whole sparse matrix"):
        if is_h5:
            content = h5py.File(file)[name]
            if isinstance(content, h5py.Dataset):
                return content
        else:
            content = np.load(path, mmap_mode="r", allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content
            content = {name: np.asarray(member) for name, member in content.items()}  # a damaged member is bytes
            if not {"shape", "data", "format"} <= {*content}:
                return content
        matrix = _open_matrix(path, content)
        matrix.check_format(full_check=True)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
    if matrix.shape[1] > np.iinfo(np.int32).max or matrix.dtype.kind not in "buif" or not matrix.nnz:
        found = f"{path} is {matrix.dtype} {matrix.shape} with {matrix.nnz:,} values"
        raise UserError(f"{found}; allowed are real numbers, fewer than 2^31 columns and at least one value")
    return matrix


def _open_matrix(path: str, content: Any) -> Any:
    """The matrix of a file of scipy, or of a group as anndata writes it."""
    from scipy import sparse  # of the extra `convert`

    if isinstance(content, dict):
        return sparse.load_npz(path).tocsr()
    make = {"csr_matrix": sparse.csr_matrix, "csc_matrix": sparse.csc_matrix}[content.attrs["encoding-type"]]
    members = tuple(content[member][:] for member in ("data", "indices", "indptr"))
    return make(members, shape=tuple(content.attrs["shape"])).tocsr()


def _ragged_columns(name: str, path: str, matrix: Any) -> Columns:
    """The rows of a CSR matrix: for each row the columns whose value is not 0, ascending; and the values."""
    offsets = matrix.indptr.astype(np.int64)
    columns: Columns = {name: RaggedArray(matrix.indices.astype(np.int32), offsets)}
    values = matrix.data
    if not (values == 1).all():
        columns[f"{name}_values"] = RaggedArray(values, offsets)
        found = f"{path} has values from {values.min():g} to {values.max():g}, which become {name}_values"
        warn(f"{found}; of ratings, keep those that count before: matrix = matrix > 3")
    return columns
