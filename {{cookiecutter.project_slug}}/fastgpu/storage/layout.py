"""Where the rows of one HDF5 dataset lie in its file, and how they are read: docs/data-path.md has a table of the ways.

Bytes in the page cache come out of a mapping of the file, others by one preadv per block: page faults are far slower.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.rows import Field
from fastgpu.storage import codecs
from fastgpu.storage.file import RESTORE, OpenFile

BLOCK_BYTES = 2 << 20
"""Size of a block: random pieces of 2 MiB are read as fast as a cold disk can."""
MIN_BLOCKS = 256
"""Minimum number of blocks in a small file, so that they can be shuffled and shared among ranks."""
COLUMN_BYTES = 1 << 30
"""A field beside the largest one is kept in memory up to this size."""
SCATTER_BYTES = 8192
"""Rows of this size or more are scattered by the kernel, smaller ones by one indexed copy."""
GATHER_BYTES = 1024
"""Rows of this size or more are gathered from the page cache. Smaller ones would touch too many pages in turn."""
IOV_MAX = 1024
"""Maximum number of targets of one preadv on Linux."""
DIGESTS = "fastgpu_sha256"
"""Group beside the datasets. It has (blocks, 32) uint8 for each of them: the SHA-256 of the rows of each block."""
SAMPLED_ROWS = 16
"""Rows that stand for the content of a file without these."""

Range = tuple[int, np.ndarray | range]
"""(first row, places): neighbouring rows of a column, and where each of them goes; a range if these are neighbours."""


class Layout:
    """The rows of one dataset. They are found in the file as chunks, or left to h5py.

    A dataset without chunks is cut into chunks of about BLOCK_BYTES. Holds no h5py object.
    """

    def __init__(self, name: str, data: h5py.Dataset, file: OpenFile, n_items: int | None = None):
        """name: of the dataset, for messages. file: the one that has `data`. n_items: a whole number outside of
        range(n_items) is damage.

        Raises UserError if the dataset is no rows of numbers, or cannot be read to its end.
        """
        if not data.ndim or data.dtype.kind not in "buif":
            raise UserError(f"{name} is {data.dtype} {data.shape}; allowed are rows of bool, integers and floats")
        self.name = name
        self.field = Field(data.dtype.newbyteorder("="), data.shape[1:])
        row_bytes = self.field.row_bytes
        self.chunk_rows = data.chunks[0] if data.chunks else max(1, BLOCK_BYTES // max(1, row_bytes))
        self._path = data.name
        self._file = file
        self._n_items = n_items
        self._n_rows = len(data)
        self._dtype = data.dtype
        self._filters = codecs.filters_of(data)
        splits_rows = bool(data.chunks) and data.chunks[1:] != data.shape[1:]
        is_known = all(code in codecs.DECODERS for code, _, _ in self._filters)
        self._needs_h5py = splits_rows or not is_known or not row_bytes
        """Whether only the HDF5 library can find or decode the rows."""
        for code, _, filter_name in self._filters:
            if self._needs_h5py and not h5py.h5z.filter_avail(code):
                raise UserError(f"{name} is compressed by {filter_name}: pip install hdf5plugin, which can undo that")
        self._chunks = self._find_chunks(data)
        """(chunks, 3) int64: first byte, number of bytes in the file, and skipped filters (see `codecs.decode`)."""
        digests = data.parent.get(f"{DIGESTS}/{data.name.rpartition('/')[2]}")
        self.digests: np.ndarray | None = digests[:] if isinstance(digests, h5py.Dataset) else None
        """(chunks, 32) uint8: the SHA-256 of each chunk; None if the file has none."""
        self._takes_whole_chunks = self._needs_h5py or bool(self._filters)
        is_plain = not self._takes_whole_chunks and n_items is None and data.dtype.isnative
        self._scatters = is_plain and row_bytes >= SCATTER_BYTES and not file.is_direct
        is_one_piece = np.all(np.diff(self._chunks[:, 0]) == self.chunk_rows * row_bytes)
        self._gathers = is_plain and row_bytes >= GATHER_BYTES and bool(is_one_piece)

    def __len__(self) -> int:
        return self._n_rows

    def fingerprint(self) -> bytes:
        """The SHA-256 of the file's size and the checksums of all rows; without them, of a few rows of all parts."""
        content = self.digests
        if content is None:
            rows = np.linspace(0, self._n_rows - 1, min(SAMPLED_ROWS, self._n_rows)).astype(np.int64)
            content = np.empty((len(rows), *self.field.shape), self.field.dtype)
            self.read([(row, range(place, place + 1)) for place, row in enumerate(rows.tolist())], content)
        return hashlib.sha256(b"%d" % self._file.size + content.tobytes()).digest()

    def _find_chunks(self, data: h5py.Dataset) -> np.ndarray:
        """See `_chunks`."""
        offset = None if data.chunks else data.id.get_offset()
        if data.chunks:
            n_chunks = math.prod(-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True))
            n_missing = n_chunks - data.id.get_num_chunks()
            if n_missing:
                raise UserError(f"{self.name}: {n_missing} of {n_chunks} chunks were never written")
        elif offset is None and self._n_rows:
            raise UserError(f"{self.name} was never written, or takes its bytes from other files; name those files")
        first_rows = np.arange(0, self._n_rows, self.chunk_rows)
        chunks = np.zeros((len(first_rows), 3), np.int64)
        if self._needs_h5py:
            return chunks

        def note(chunk: h5py.h5d.StoreInfo) -> None:
            chunks[chunk.chunk_offset[0] // self.chunk_rows] = chunk.byte_offset, chunk.size, chunk.filter_mask

        if data.chunks:
            data.id.chunk_iter(note)
        else:
            chunks[:, 0] = (offset or 0) + first_rows * self.field.row_bytes
            chunks[:, 1] = np.diff(first_rows, append=self._n_rows) * self.field.row_bytes
        if (chunks[:, 0] + chunks[:, 1]).max(initial=0) > self._file.size:
            raise UserError(f"{self.name}: the file is truncated: copy or write it again")
        return chunks

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Copy the rows of each range to their places in `out`, (rows, *shape), C-contiguous. Thread-safe.

        The kernel is told first about all bytes that are missing in memory, so that few threads keep a disk busy. The
        copies out of the mapping come last, in one go: each of them displaces code and data from the CPU's caches.
        Raises OSError or UserError if the bytes cannot be had, are damaged, or were changed meanwhile.
        """
        self._file.check_unchanged()
        row_bytes = self.field.row_bytes
        pieces: tuple[list[Any], list[Any]] = ([], [])  # missing in memory, or there
        for start, places in ranges:
            done = 0
            while done < len(places):
                chunk, row = divmod(start + done, self.chunk_rows)
                of_chunk = places[done : done + self.chunk_rows - row]
                done += len(of_chunk)
                offset, n_bytes, _ = self._chunks[chunk].tolist()
                if not self._takes_whole_chunks:
                    offset += row * row_bytes
                    n_bytes = len(of_chunk) * row_bytes
                data = self._file.cached(offset, n_bytes) if n_bytes else None
                if data is None:
                    self._file.will_need(offset, n_bytes)
                pieces[data is not None].append((data, (chunk, offset, n_bytes), row, of_chunk))
        current = None
        for data, where, row, of_chunk in (*pieces[0], *pieces[1]):
            if data is None and self._scatters:
                self._scatter(where[1], of_chunk, out)
                continue
            if where != current:  # a whole chunk is decoded once for all pieces of it that come one after the other
                stored = self._decode(where[0], self._file.read(*where[1:]) if data is None else data)
                current = where
            rows = stored[row : row + len(of_chunk)] if self._takes_whole_chunks else stored
            if self._n_items is not None and not 0 <= rows.min() <= rows.max() < self._n_items:
                raise UserError(  # such a number would crash the device much later
                    f"{self.name}: item numbers {rows.min()} to {rows.max()} are not in 0 to {self._n_items - 1}, as "
                    f"the attribute shape has it; {RESTORE}"
                )
            out[index_of(of_chunk)] = rows
        self._file.check_unchanged()

    def _decode(self, chunk: int, data: np.ndarray) -> np.ndarray:
        """(rows, *shape): those of the bytes, which are a whole chunk if it has filters. Valid until the next read."""
        if self._needs_h5py:
            return self._file.read_h5(self._path, chunk * self.chunk_rows, self.chunk_rows)
        content: codecs.Bytes = data.data
        if self._filters:
            size = self.chunk_rows * self.field.row_bytes
            try:
                content = codecs.decode(content, self._filters, int(self._chunks[chunk, 2]), size)
            except ValueError as error:
                raise UserError(f"{self.name}: block {chunk} is damaged: it {error}; {RESTORE}") from None
        return np.frombuffer(content, self._dtype).reshape(-1, *self.field.shape)

    def _scatter(self, offset: int, places: np.ndarray | range, out: np.ndarray) -> None:
        """Read neighbouring rows to their places by system calls."""
        row_bytes = self.field.row_bytes
        memory = out.reshape(-1).view(np.uint8).data
        targets = [memory[start : start + row_bytes] for start in (np.asarray(places) * row_bytes).tolist()]
        for i in range(0, len(targets), IOV_MAX):
            self._file.preadv(targets[i : i + IOV_MAX], offset + i * row_bytes)

    def read_all(self, dtype: np.dtype) -> np.ndarray:
        """All rows, (rows, *shape), as `dtype`. For small fields that are kept in memory."""
        out = np.empty((self._n_rows, *self.field.shape), dtype)
        self.read([(0, range(self._n_rows))], out)
        return out

    def in_memory(self, ranges: Iterable[Range]) -> np.ndarray | None:
        """(rows, bytes) uint8: all rows in the mapped file, if they lie there in one piece and as they are, and those
        of the ranges are in the page cache. Bytes, because values may lie at odd places."""
        row_bytes = self.field.row_bytes
        first = int(self._chunks[0, 0])
        if not self._gathers or any(
            self._file.cached(first + start * row_bytes, len(places) * row_bytes) is None for start, places in ranges
        ):
            return None
        return self._file.mapped[first : first + self._n_rows * row_bytes].reshape(-1, row_bytes)


def index_of(places: np.ndarray | range) -> np.ndarray | slice:
    """The places as an index of an array."""
    return slice(places.start, places.stop) if isinstance(places, range) else places
