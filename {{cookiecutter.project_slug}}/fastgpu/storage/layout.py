"""Where the rows of one HDF5 dataset lie in its file, and the ways to read them.

    rows in the file                       how they are read
    plain, 1 KiB a row, a pool in the cache one gather out of a mapping of the file, in the order of the pool
    plain, in the page cache               one indexed copy out of that mapping: each byte is touched once, too
    plain, 8 KiB a row and more            one preadv per block scatters its rows to their places: touched once, too
    plain, less than 8 KiB a row           one preadv into scratch memory, then one indexed copy
    compressed by a filter of codecs.py    as above, decoded in between by the thread that reads
    with checksums to verify               as above, checked in between
    all others                             through h5py, under the one lock of the HDF5 library

A mapping is never read where its pages are not in memory: page faults one by one are far slower than one preadv per
block.
"""

import hashlib
import math
from collections.abc import Iterable
from functools import cached_property

import h5py
import numpy as np

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.rows import Field
from fastgpu.storage import codecs
from fastgpu.storage.columns import Range, index_of
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


_Piece = tuple[int, int, np.ndarray | range, int, int, np.ndarray | None]
"""(chunk, its first row that is read, places, first byte, number of bytes, the bytes if they are in memory)"""


class Layout:
    """The rows of one dataset. They are found in the file as chunks, or left to h5py.

    A dataset without chunks is cut into chunks of about BLOCK_BYTES. Holds no h5py object.
    """

    def __init__(
        self, name: str, data: h5py.Dataset, file: OpenFile, *, verify: bool = False, n_items: int | None = None
    ):
        """name: of the dataset, for messages. file: the one that has `data`. verify: compare each chunk that is read
        with its checksum. n_items: a whole number outside of range(n_items) is damage.

        Raises UserError if the dataset is no rows of numbers, cannot be read to its end, or lacks checksums to verify.
        """
        if data.ndim == 0:
            raise UserError(f"{name} is a single value; a field needs a first dimension of rows")
        if data.dtype.kind not in "buif":
            raise UserError(f"{name} is of type {data.dtype}; allowed are bool, integers and floats")
        self.field = Field(data.dtype.newbyteorder("="), data.shape[1:])
        self.chunk_rows = data.chunks[0] if data.chunks else max(1, BLOCK_BYTES // max(1, self.field.row_bytes))
        self._name = name
        self._path = data.name
        self._file = file
        self._n_items = n_items
        self._n_rows = len(data)
        self._dtype = data.dtype
        self._filters = codecs.filters_of(data)
        splits_rows = bool(data.chunks) and data.chunks[1:] != data.shape[1:]
        self._needs_h5py = splits_rows or not codecs.can_decode(self._filters) or not self.field.row_bytes
        """Whether only the HDF5 library can find or decode the rows."""
        for each in self._filters:
            if self._needs_h5py and not h5py.h5z.filter_avail(each.code):
                raise UserError(f"{name} is compressed by {each.name}: pip install hdf5plugin, which can undo that")
        self._chunks = self._find_chunks(data)
        """(chunks, 3) int64: first byte, number of bytes in the file, and skipped filters (see `codecs.decode`)."""
        digests = data.parent.get(f"{DIGESTS}/{data.name.rpartition('/')[2]}")
        self._digests: np.ndarray | None = digests[:] if isinstance(digests, h5py.Dataset) else None
        """(chunks, 32) uint8: the SHA-256 of each chunk; None if the file has none."""
        self._expected_digests = self._digests if verify else None
        if verify and self._digests is None:
            raise UserError(f"{name} has no checksums; `python convert.py repack` writes them")
        self._takes_whole_chunks = self._needs_h5py or bool(self._filters) or verify
        self._is_plain = not self._takes_whole_chunks and n_items is None and data.dtype.isnative
        self._scatters = self._is_plain and self.field.row_bytes >= SCATTER_BYTES and not file.is_direct

    def __len__(self) -> int:
        return self._n_rows

    def fingerprint(self) -> bytes:
        """The SHA-256 of the file's size and the checksums of all rows; without them, of a few rows of all parts."""
        content = self._digests
        if content is None:
            rows = np.linspace(0, self._n_rows - 1, min(SAMPLED_ROWS, self._n_rows)).astype(np.int64)
            content = np.empty((len(rows), *self.field.shape), self.field.dtype)
            self.read([(row, range(place, place + 1)) for place, row in enumerate(rows.tolist())], content)
        return hashlib.sha256(b"%d" % self._file.size + content.tobytes()).digest()

    def _find_chunks(self, data: h5py.Dataset) -> np.ndarray:
        """See `_chunks`. Without filters, the unused end of the last chunk does not count."""
        if data.chunks:
            n_chunks = math.prod(-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True))
            n_missing = n_chunks - data.id.get_num_chunks()
            if n_missing:
                raise UserError(f"{self._name}: {n_missing} of {n_chunks} chunks were never written")
        elif data.id.get_offset() is None and self._n_rows:
            raise UserError(f"{self._name} was never written")
        first_rows = np.arange(0, self._n_rows, self.chunk_rows)
        chunks = np.zeros((len(first_rows), 3), np.int64)
        if self._needs_h5py:
            return chunks

        def note(chunk: h5py.h5d.StoreInfo) -> None:
            chunks[chunk.chunk_offset[0] // self.chunk_rows] = chunk.byte_offset, chunk.size, chunk.filter_mask

        if data.chunks:
            data.id.chunk_iter(note)
        else:
            chunks[:, 0] = (data.id.get_offset() or 0) + first_rows * self.field.row_bytes
        if not self._filters:
            chunks[:, 1] = np.diff(first_rows, append=self._n_rows) * self.field.row_bytes
        if (chunks[:, 0] + chunks[:, 1]).max(initial=0) > self._file.size:
            raise UserError(f"{self._name}: the file is truncated: copy or write it again")
        return chunks

    # ------------------------------------------------------------------------------------------ reading

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Copy the rows of each range to their places in `out`, (rows, *shape), C-contiguous. Thread-safe.

        The kernel is told first about all bytes that are not in memory, so that few threads keep a disk busy. The
        copies out of the mapping come last, in one go: each of them displaces code and data from the CPU's caches.
        Raises OSError or RankError if the bytes cannot be had, are damaged, or were changed meanwhile.
        """
        self._file.check_unchanged()
        row_bytes = self.field.row_bytes
        missing: list[_Piece] = []
        cached: list[_Piece] = []
        for start, places in ranges:
            done = 0
            while done < len(places):
                chunk, row = divmod(start + done, self.chunk_rows)
                of_chunk = places[done : done + self.chunk_rows - row]
                offset, n_bytes, _ = self._chunks[chunk].tolist()
                if not self._takes_whole_chunks:
                    offset += row * row_bytes
                    n_bytes = len(of_chunk) * row_bytes
                data = self._file.cached(offset, n_bytes) if n_bytes else None
                if data is None:
                    self._file.will_need(offset, n_bytes)
                (missing if data is None else cached).append((chunk, row, of_chunk, offset, n_bytes, data))
                done += len(of_chunk)
        current = -1
        for chunk, row, of_chunk, offset, n_bytes, data in (*missing, *cached):
            if data is None and self._scatters:
                self._scatter(offset, of_chunk, out)
                continue
            if self._takes_whole_chunks:
                if chunk != current:  # once for all pieces of it that come one after the other
                    whole = self._read_chunk(chunk, offset, n_bytes, data)
                    current = chunk
                rows = whole[row : row + len(of_chunk)]
            else:
                rows = self._as_rows(self._file.read(offset, n_bytes) if data is None else data)
            if self._n_items is not None and not 0 <= rows.min() <= rows.max() < self._n_items:
                raise RankError(  # such a number would crash the device much later
                    f"{self._name}: item numbers {rows.min()} to {rows.max()} are not in 0 to {self._n_items - 1}, as "
                    f"the attribute shape has it; {RESTORE}"
                )
            out[index_of(of_chunk)] = rows
        self._file.check_unchanged()

    def is_in_memory(self, start: int, n_rows: int) -> bool:
        """Whether `gather` can copy the rows start, start + 1, ...: they are in the page cache, and all rows lie in one
        piece."""
        if self._first_byte is None:
            return False
        row_bytes = self.field.row_bytes
        return self._file.cached(self._first_byte + start * row_bytes, n_rows * row_bytes) is not None

    def gather(self, row_ids: np.ndarray, out: np.ndarray) -> None:
        """Copy rows that are in memory to `out`, (n, *shape), in the order of `row_ids`. Thread-safe.

        Bytes are copied, because NumPy would first copy the whole file if its values did not lie at multiples of their
        size; and mode="raise" would copy `out`.
        """
        assert self._first_byte is not None
        self._file.check_unchanged()
        row_bytes = self.field.row_bytes
        rows = self._file.mapped(self._first_byte, self._n_rows * row_bytes).reshape(-1, row_bytes)
        np.take(rows, row_ids, axis=0, out=out.reshape(-1).view(np.uint8).reshape(-1, row_bytes), mode="clip")
        self._file.check_unchanged()

    @cached_property
    def _first_byte(self) -> int | None:
        """Where the rows begin in the file, if they are to be gathered: they lie there as they are, in one piece."""
        if not self._is_plain or self.field.row_bytes < GATHER_BYTES:
            return None
        is_one_piece = np.all(np.diff(self._chunks[:, 0]) == self.chunk_rows * self.field.row_bytes)
        return int(self._chunks[0, 0]) if is_one_piece else None

    def read_all(self, dtype: np.dtype) -> np.ndarray:
        """All rows, (rows, *shape), as `dtype`. For small fields that are kept in memory."""
        out = np.empty((self._n_rows, *self.field.shape), dtype)
        self.read([(0, range(self._n_rows))], out)
        return out

    def _scatter(self, offset: int, places: np.ndarray | range, out: np.ndarray) -> None:
        """Read neighbouring rows to their places by system calls."""
        row_bytes = self.field.row_bytes
        memory = out.reshape(-1).view(np.uint8).data
        targets = [memory[start : start + row_bytes] for start in (np.asarray(places) * row_bytes).tolist()]
        for i in range(0, len(targets), IOV_MAX):
            self._file.preadv(targets[i : i + IOV_MAX], offset + i * row_bytes)

    def _read_chunk(self, chunk: int, offset: int, n_bytes: int, data: np.ndarray | None) -> np.ndarray:
        """(rows, *shape): the rows of a chunk, decoded, and checked if `verify` is set. Valid until the next read."""
        n_rows = min(self.chunk_rows, self._n_rows - chunk * self.chunk_rows)
        if self._needs_h5py:
            rows = np.empty((n_rows, *self.field.shape), self._dtype)
            self._file.read_h5(self._path, chunk * self.chunk_rows, rows)
        else:
            data = self._file.read(offset, n_bytes) if data is None else data
            size = self.chunk_rows * self.field.row_bytes if self._filters else n_bytes
            try:
                decoded = codecs.decode(data.data, self._filters, int(self._chunks[chunk, 2]), size)
            except ValueError as error:
                raise RankError(f"{self._name}: block {chunk} is damaged: it {error}; {RESTORE}") from None
            rows = self._as_rows(np.frombuffer(decoded, np.uint8))[:n_rows]
        expected = self._expected_digests
        if expected is not None and hashlib.sha256(rows.data).digest() != expected[chunk].tobytes():
            raise RankError(f"{self._name}: block {chunk} is damaged: its SHA-256 is another one; {RESTORE}")
        return rows

    def _as_rows(self, data: np.ndarray) -> np.ndarray:
        return data.view(self._dtype).reshape(-1, *self.field.shape)
