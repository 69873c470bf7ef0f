"""One field of the rows in an HDF5 file: cut into blocks, which threads hash, compress and write.

A block is an HDF5 chunk of whole rows. Its SHA-256 is that of the rows before compression.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.field import Field
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import codecs
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, DIGESTS, MIN_BLOCKS

Compression = Literal["none", "gzip", "lz4", "zstd"]

RAGGED_BLOCK_BYTES = BLOCK_BYTES // 8
"""Blocks of ragged values are smaller: rows begin and end inside of them, and a block is decoded as a whole."""
MIN_CHUNK_BYTES = 16 << 10
INDPTR = Field(np.dtype(np.int64), ())
MAX_PENDING = 8
"""Blocks of one column that may wait for a thread."""


class Encoder(NamedTuple):
    """How blocks are compressed, and by which threads."""

    filters: Mapping[str, Any]
    """Arguments of h5py's create_dataset. Empty: no compression."""
    threads: ThreadPoolExecutor


class Block(NamedTuple):
    """A block that a thread has finished."""

    data: codecs.Bytes
    """The bytes to write; empty if the thread has written them."""
    digest: bytes
    """SHA-256 of its rows."""


def compression_filters(compression: Compression) -> dict[str, Any]:
    """Arguments of h5py's create_dataset. Raises UserError if the codec is not installed."""
    if compression == "none":
        return {}
    if compression == "gzip":
        return {"compression": "gzip", "compression_opts": 1}
    if not (codecs.imagecodecs and find_spec("hdf5plugin")):
        raise UserError(f'--compression {compression} needs: pip install ".[codecs]"; or use gzip')
    plugin = import_module("hdf5plugin")
    if compression == "lz4":
        return dict(plugin.LZ4())
    return dict(plugin.Zstd(clevel=1))


def choose_block_rows(n_rows: int, fields: Mapping[str, Field]) -> dict[str, int]:
    """{field: rows of a block} for the fields that are not ragged: about 2 MiB of whole rows.

    All fields share the blocks of the largest field, except those that readers keep in memory as a whole. The blocks
    of a small file are smaller: a run needs one for each rank, and many to shuffle.
    """
    widest = max(fields.values(), key=lambda field: field.row_bytes)
    shared = max(1, min(BLOCK_BYTES // max(1, widest.row_bytes), n_rows // MIN_BLOCKS))
    block_rows = {}
    for name, field in fields.items():
        is_kept_in_memory = field is not widest and n_rows * field.row_bytes <= COLUMN_BYTES
        if field.is_ragged:
            continue
        if is_kept_in_memory:
            block_rows[name] = max(1, min(n_rows, BLOCK_BYTES // max(1, field.row_bytes)))
        else:
            block_rows[name] = shared
    return block_rows


class Column:
    """One dataset. Whole blocks are written in order; the other rows wait until they fill one."""

    def __init__(
        self, group: h5py.Group, name: str, field: Field, *, n_rows: int | None, block_rows: int, encoder: Encoder
    ):
        """n_rows: None if it is not known before the last row."""
        filters = encoder.filters
        self._is_written_by_threads = bool(n_rows) and not filters
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if self._is_written_by_threads:
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._data = group.create_dataset(
            name,
            (n_rows or 0, *field.shape),
            field.dtype,
            maxshape=(n_rows, *field.shape),
            chunks=(block_rows, *field.shape),
            fill_time="never",
            shuffle=bool(filters) and field.dtype.itemsize > 1,  # sorting bytes by their place helps numbers only
            dcpl=plan,
            **filters,
        )
        self._filters = codecs.filters_of(self._data.id.get_create_plist())
        self._offsets = np.empty(0, np.int64)
        if self._is_written_by_threads:
            self._offsets = _chunk_offsets(self._data)
        self._descriptor = self._data.file.id.get_vfd_handle()
        self._threads = encoder.threads
        self._waiting = np.zeros((block_rows, *field.shape), field.dtype)
        self._n_waiting = 0
        self._digests: list[bytes] = []  # of the blocks that are written

    def append(self, rows: np.ndarray) -> None:
        """The next rows, (n, *shape). Their memory may be used again afterwards."""
        pending = deque[Future[Block]]()
        for block in self._cut(np.ascontiguousarray(rows, self._waiting.dtype)):
            number = len(self._digests) + len(pending)
            pending.append(self._threads.submit(self._finish_block, number, block, len(block)))
            if len(pending) > MAX_PENDING:
                self._write(pending.popleft().result())
        while pending:
            self._write(pending.popleft().result())

    def finish(self) -> None:
        """Write the last block, which may be short, and the checksums.

        HDF5 stores a short block at full length. Its checksum covers the rows only.
        """
        n_rows = len(self._digests) * len(self._waiting) + self._n_waiting
        if self._n_waiting:
            self._waiting[self._n_waiting :] = 0
            self._write(self._finish_block(len(self._digests), self._waiting, self._n_waiting))
        if n_rows < len(self._data):
            self._data.resize(n_rows, axis=0)
        digests = np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, 32)
        name = self._data.name.rpartition("/")[2]
        self._data.parent.create_dataset(f"{DIGESTS}/{name}", data=digests)

    def _cut(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Whole blocks; they are views of `rows` where a block lies in them completely."""
        block_rows = len(self._waiting)
        while len(rows):
            if self._n_waiting == 0 and len(rows) >= block_rows:
                yield rows[:block_rows]
                rows = rows[block_rows:]
                continue
            count = min(len(rows), block_rows - self._n_waiting)
            self._waiting[self._n_waiting : self._n_waiting + count] = rows[:count]
            rows = rows[count:]
            self._n_waiting += count
            if self._n_waiting == block_rows:
                self._n_waiting = 0
                yield self._waiting.copy()

    def _finish_block(self, number: int, block: np.ndarray, n_rows: int) -> Block:
        """Runs in a thread: hash a block, and either compress it or write it.

        A block that is not compressed has its place in the file already. It is written here because the HDF5 library
        holds Python's lock while it writes, which would stop the threads that decode.
        """
        digest = hashlib.sha256(block[:n_rows].data).digest()
        data = block.reshape(-1).view(np.uint8).data
        if not self._is_written_by_threads:
            return Block(codecs.encode(data, self._filters), digest)
        start = int(self._offsets[number])
        offset = start
        while data:
            n_written = os.pwrite(self._descriptor, data, offset)
            data = data[n_written:]
            offset += n_written
        if hasattr(os, "posix_fadvise"):  # Linux begins to write to the disk now, so the last fsync finds little to do
            os.posix_fadvise(self._descriptor, start, offset - start, os.POSIX_FADV_DONTNEED)
        return Block(b"", digest)

    def _write(self, block: Block) -> None:
        if not self._is_written_by_threads:
            start = len(self._digests) * len(self._waiting)
            if start >= len(self._data):
                self._data.resize(start + len(self._waiting), axis=0)
            self._data.id.write_direct_chunk((start, *[0] * (self._data.ndim - 1)), block.data)
        self._digests.append(block.digest)


class RaggedColumn:
    """Ragged rows: a group with two columns, the values of all rows and `indptr`, where each row begins."""

    def __init__(self, file: h5py.File, name: str, field: Field, *, n_rows: int, encoder: Encoder):
        self._group = file.create_group(name)
        self._n_items = field.n_items
        self._n_values = 0
        block_bytes = field.row_bytes * max(1, min(BLOCK_BYTES // field.row_bytes, n_rows // MIN_BLOCKS))
        block_values = max(MIN_CHUNK_BYTES, min(RAGGED_BLOCK_BYTES, block_bytes)) // field.dtype.itemsize
        self._values = Column(
            self._group,
            "indices" if field.n_items else "values",
            field._replace(mean_values=None),
            n_rows=None,
            block_rows=block_values,
            encoder=encoder,
        )
        block_rows = min(RAGGED_BLOCK_BYTES // INDPTR.dtype.itemsize, n_rows + 1)
        self._indptr = Column(self._group, "indptr", INDPTR, n_rows=n_rows + 1, block_rows=block_rows, encoder=encoder)
        self._indptr.append(np.zeros(1, INDPTR.dtype))

    def append(self, rows: RaggedArray) -> None:
        """The next rows. Their memory may be used again afterwards."""
        self._values.append(rows.values[: rows.offsets[-1]])
        self._indptr.append(self._n_values + rows.offsets[1:].astype(INDPTR.dtype))
        self._n_values += int(rows.offsets[-1])

    def finish(self) -> None:
        """Write what waits. Item numbers become a CSR matrix as anndata writes it, whose values are all 1."""
        self._values.finish()
        self._indptr.finish()
        if self._n_items:  # `data` is never written, so it takes no room and reads as its fill value
            self._group.create_dataset(
                "data",
                dtype=np.float32,
                fillvalue=1,
                shape=(self._n_values,),
                maxshape=(None,),
                chunks=(1 << 16,),
            )
            shape = (len(self._group["indptr"]) - 1, self._n_items)
            self._group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})


def _chunk_offsets(data: h5py.Dataset) -> np.ndarray:
    """(chunks,) int64: the first byte of each chunk in the file, which has room for all of them."""
    offsets = np.empty(data.id.get_num_chunks(), np.int64)

    def note(chunk: h5py.h5d.StoreInfo) -> None:
        offsets[chunk.chunk_offset[0] // data.chunks[0]] = chunk.byte_offset

    data.id.chunk_iter(note)
    return offsets
