"""The places of the chunks of an HDF5 dataset in its file, and their checksums."""

import math

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import look_up, refuse_large

CHECKSUMS = "fastgpu_sha256"
"""Group beside the datasets. For each dataset it has (blocks, 32) uint8: the SHA-256 of the rows of each block."""


def find_chunks(name: str, data: h5py.Dataset, chunk_rows: int, file_size: int) -> np.ndarray:
    """(chunks, 3) int64: first byte, number of bytes in the file, and skipped filters (see `decode`) of each chunk.

    name: of the dataset, for messages. chunk_rows: rows of a chunk; a dataset without chunks is treated as cut into
    them. Raises UserError if the file ends before its chunks.
    """
    refuse_large(name, 64 * (len(data) // chunk_rows))
    first_rows = np.arange(0, len(data), chunk_rows)
    chunks = np.zeros((len(first_rows), 3), np.int64)
    value_bytes = data.id.get_type().get_size()
    has_filters = data.id.get_create_plist().get_nfilters() > 0
    truncated = UserError(f"{name}: the file is truncated: copy or write it again")

    def note(chunk: h5py.h5d.StoreInfo) -> None:
        # In a damaged file these numbers may be anything, or missing.
        if chunk.byte_offset is None:
            raise truncated
        offset = min(chunk.byte_offset, file_size)
        n_bytes = chunk.size if has_filters else math.prod(data.chunks) * value_bytes
        chunks[chunk.chunk_offset[0] // chunk_rows] = offset, n_bytes, chunk.filter_mask

    if data.chunks:
        data.id.chunk_iter(note)
    elif (offset := data.id.get_offset()) is not None:  # otherwise only the HDF5 library can find the rows
        row_bytes = math.prod(data.shape[1:]) * value_bytes
        chunks[:, 0] = offset + first_rows * row_bytes
        chunks[:, 1] = np.diff(first_rows, append=len(data)) * row_bytes
    if (chunks[:, 0] + chunks[:, 1]).max(initial=0) > file_size:
        raise truncated
    return chunks


def read_checksums(name: str, data: h5py.Dataset, n_chunks: int) -> np.ndarray | None:
    """(chunks, 32) uint8: the SHA-256 of the rows of each chunk; None if the file has none. Raises UserError."""
    checksums = look_up(data.parent, f"{CHECKSUMS}/{data.name.rpartition('/')[2]}", name)
    if not isinstance(checksums, h5py.Dataset):
        return None
    expected = (n_chunks, 32)
    if checksums.shape != expected or checksums.dtype != np.uint8:
        found = f"are {checksums.dtype} {checksums.shape} instead of uint8 {expected}"
        raise UserError(f"{name}: its checksums {found}; delete {checksums.name}, or write the file again")
    return checksums[:]
