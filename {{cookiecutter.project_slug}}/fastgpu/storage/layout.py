"""Where the rows of one HDF5 dataset lie in its file, and the ways to read them.

plain bytes in the page cache          one indexed copy out of a mapping of the file: a byte is touched once
plain bytes, rows of 8 KiB and more    one preadv a block scatters its rows to their places: once, too
plain bytes, smaller rows              one preadv into scratch memory, one indexed copy
filters with a codec, checksums        the same, decoded and checked in between, in the reader's own thread
the rest                               through h5py, under the HDF5 library's one lock

A mapping is never read where its pages are not in memory: a page fault at a time is far slower than one preadv a block.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.field import Field
from fastgpu.storage import codecs
from fastgpu.storage.file import RESTORE, OpenFile

BLOCK_BYTES = 2 << 20  # random pieces of 2 MiB read as fast as a cold disk can
MIN_BLOCKS = 256  # of a small file: enough to shuffle, and to share among ranks
COLUMN_BYTES = 1 << 30  # a field beside the largest one is held in memory up to this size
SCATTER_BYTES = 8192  # rows from here on are scattered by the kernel; smaller ones by one indexed copy
IOV_MAX = 1024  # Linux: destinations of one preadv
DIGESTS = "fastgpu_sha256"  # group beside the datasets: (blocks, 32) uint8 for each, of the rows' bytes as stored


class RowRange(NamedTuple):
    """Rows start, start + 1, ... of a dataset go to `places`: (n,) int64."""

    start: int
    places: np.ndarray


class ReadOptions(NamedTuple):
    """How to read; see `store.open_store`."""

    verify: bool = False
    trust_links: bool = False
    chunk_cache: Mapping[str, float] = {}


class Layout:
    """Where the rows of one dataset lie in its file: chunk after chunk, or left to h5py."""

    def __init__(self, what: str, data: h5py.Dataset, options: ReadOptions, n_items: int | None = None):
        """what: names the dataset in messages. below: whole numbers that are not 0 to below - 1 are damage."""
        self._what, self.dataset, self._below = what, data.name, n_items
        self._dtype = data.dtype
        self.field = Field(data.dtype.newbyteorder("="), data.shape[1:])
        self._file = OpenFile(data.file.filename, options.chunk_cache)  # the file that a trusted link leads to
        self._rows, row_bytes = len(data), self.field.row_bytes
        self.chunk_rows = data.chunks[0] if data.chunks else max(1, BLOCK_BYTES // max(1, row_bytes))
        plan = data.id.get_create_plist()
        self._filters = codecs.filters_of(plan)
        self._offsets: np.ndarray | None = None  # (chunks,) int64: first byte of each; None: read through h5py
        if not self._rows:
            self._offsets = self._sizes = np.empty(0, np.int64)
        elif data.is_virtual or data.external:
            pass
        elif data.chunks:
            self._find_chunks(data)
        elif (offset := data.id.get_offset()) is None:
            raise UserError(f"{what} was never written")
        else:
            self._offsets = offset + np.arange(0, self._rows, self.chunk_rows) * row_bytes
            self._sizes = self._chunk_counts() * row_bytes
        if self._offsets is not None and self._rows and int((self._offsets + self._sizes).max()) > self._file.size:
            raise UserError(f"{what}: the file is truncated: copy or write it again")
        if self._offsets is None:
            for code, _ in self._filters:
                if not h5py.h5z.filter_avail(code):
                    name = codecs.NAMES.get(code, f"HDF5 filter {code}")
                    raise UserError(f"{what} is compressed by {name}, which is not installed; pip install hdf5plugin")
        self._digests: np.ndarray | None = None
        if options.verify:
            found = data.parent.get(f"{DIGESTS}/{self.dataset.rpartition('/')[2]}")
            if not isinstance(found, h5py.Dataset) or found.shape != (-(-self._rows // self.chunk_rows), 32):
                raise UserError(f"{what} has no checksums for data.verify; `python convert.py repack` writes them")
            self._digests = found[:]

    @property
    def filters(self) -> str:
        """Names of those that the chunks went through, joined by +."""
        return " + ".join(codecs.NAMES.get(code, f"filter {code}") for code, _ in self._filters)

    @property
    def is_direct(self) -> bool:
        """Whether the bytes come past the HDF5 library."""
        return self._offsets is not None

    def _find_chunks(self, data: h5py.Dataset) -> None:
        """The table of chunks, unless they split rows or cannot be decoded here."""
        wanted = int(np.prod([-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True)]))
        missing = wanted - data.id.get_num_chunks()
        if missing:
            raise UserError(f"{self._what}: {missing} of {wanted} chunks were never written")
        if data.chunks[1:] != data.shape[1:] or not codecs.can_decode(self._filters) or not self.field.row_bytes:
            return
        table = np.empty((3, wanted), np.int64)
        offsets, self._sizes, self._skipped = table

        def note(chunk: h5py.h5d.StoreInfo) -> None:
            table[:, chunk.chunk_offset[0] // self.chunk_rows] = chunk.byte_offset, chunk.size, chunk.filter_mask

        data.id.chunk_iter(note)
        self._offsets = offsets
        if not self._filters:  # the rows behind the last one are there, but not wanted
            self._sizes = self._chunk_counts() * self.field.row_bytes

    def _chunk_counts(self) -> np.ndarray:
        """(chunks,) rows of each."""
        return np.diff(np.arange(0, self._rows, self.chunk_rows), append=self._rows)

    def read(self, runs: Iterable[RowRange], out: np.ndarray) -> None:
        """Rows -> out, each run to its places; all of them are there when it returns.

        What is not in memory is announced to the kernel first, so that few threads keep a disk busy. Copies out of the
        mapping come last, in one go: each empties the CPU's caches, of the code between them too.
        """
        self._file.check_unchanged()
        size, takes_whole = self.field.row_bytes, bool(self._filters) or self._digests is not None
        reads, copies = [], []
        for chunk, row, places in self._by_chunk(runs):
            data = None
            if self._offsets is not None:
                offset, count = int(self._offsets[chunk]) + row * size, len(places) * size
                if takes_whole:
                    offset, count = int(self._offsets[chunk]), int(self._sizes[chunk])
                data = self._file.cached(offset, count)
                if data is None:
                    self._file.will_need(offset, count)
            if data is None or takes_whole:
                reads.append((chunk, row, places))
            else:
                copies.append((places, self._rows_of(data)))
        for chunk, row, places in reads:
            if self._offsets is None or takes_whole:
                out[places] = self._checked(self._whole_chunk(chunk)[row : row + len(places)])
            else:
                self._read_rows(int(self._offsets[chunk]) + row * size, places, out)
        for places, rows in copies:
            out[places] = self._checked(rows)
        self._file.check_unchanged()

    def read_all(self, dtype: np.dtype) -> np.ndarray:
        """All rows, (rows, *shape), for what is held in memory; a few chunks at a time, since a place takes 8 bytes."""
        out = np.empty((self._rows, *self.field.shape), dtype)
        step = self.chunk_rows * max(1, BLOCK_BYTES // max(1, self.chunk_rows * self.field.row_bytes))
        for start in range(0, self._rows, step):
            some = out[start : start + step]
            self.read([RowRange(start, np.arange(len(some)))], some)
        return out

    def _by_chunk(self, runs: Iterable[RowRange]) -> Iterator[tuple[int, int, np.ndarray]]:
        """(chunk, first row in it, places) of every part of a run that lies in one chunk."""
        for start, places in runs:
            at = 0
            while at < len(places):
                chunk, row = divmod(start + at, self.chunk_rows)
                some = places[at : at + self.chunk_rows - row]
                yield chunk, row, some
                at += len(some)

    def _read_rows(self, offset: int, places: np.ndarray, out: np.ndarray) -> None:
        """Neighbouring rows of plain bytes, by system calls."""
        size = self.field.row_bytes
        if size < SCATTER_BYTES or not self._dtype.isnative:
            out[places] = self._checked(self._rows_of(self._file.read(offset, len(places) * size)))
        else:
            flat = out.reshape(-1).view(np.uint8).data
            targets = [flat[place : place + size] for place in (places * size).tolist()]
            for i in range(0, len(targets), IOV_MAX):
                self._file.preadv(targets[i : i + IOV_MAX], offset + i * size)

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        """The same rows. An item number that is too large would be a crash on the device, far from its cause."""
        if self._below is not None and len(rows):
            least, most = int(rows.min()), int(rows.max())
            if least < 0 or most >= self._below:
                wrong = least if least < 0 else most
                raise RankError(
                    f"{self._what}: {wrong} is none of 0 to {self._below - 1}, as its shape says; {RESTORE}"
                )
        return rows

    def _whole_chunk(self, chunk: int) -> np.ndarray:
        """The rows of a chunk, read, decoded and checked as far as the file and the options want it."""
        count = min(self.chunk_rows, self._rows - chunk * self.chunk_rows)
        if self._offsets is None:
            rows = np.empty((count, *self.field.shape), self._dtype)
            self._file.read_h5(self.dataset, chunk * self.chunk_rows, rows)
        else:
            where = int(self._offsets[chunk]), int(self._sizes[chunk])
            data = self._file.cached(*where)
            data = self._file.read(*where) if data is None else data
            if self._filters:
                data = self._decode(chunk, data)[: count * self.field.row_bytes]
            rows = self._rows_of(data)
        if self._digests is not None and hashlib.sha256(rows.data).digest() != self._digests[chunk].tobytes():
            raise RankError(f"{self._what}: block {chunk} is damaged: its SHA-256 is not the recorded one; {RESTORE}")
        return rows

    def _decode(self, chunk: int, data: np.ndarray) -> np.ndarray:
        try:
            size = self.chunk_rows * self.field.row_bytes
            return np.frombuffer(codecs.decode(data.data, self._filters, int(self._skipped[chunk]), size), np.uint8)
        except ValueError as error:
            raise RankError(f"{self._what}: block {chunk} is damaged: it {error}; {RESTORE}") from None

    def _rows_of(self, data: np.ndarray) -> np.ndarray:
        return data.view(self._dtype).reshape(-1, *self.field.shape)
