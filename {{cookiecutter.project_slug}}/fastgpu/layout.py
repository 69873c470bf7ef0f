"""Where the rows of one HDF5 dataset lie in its file, and the ways to read them.

plain bytes in the page cache          one indexed copy out of a mapping of the file: a byte is touched once
plain bytes, rows of 8 KiB and more    one preadv a block scatters its rows to their places: once, too
plain bytes, smaller rows              one preadv into scratch memory, one indexed copy
filters with a codec, checksums        the same, decoded and checked in between, in the reader's own thread
the rest                               through h5py, under the HDF5 library's one lock

A mapping is never read where its pages are not in memory: a page fault at a time is far slower than one preadv a block.
"""

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from . import codecs
from .launch import RankError, UserError
from .rows import Field

BLOCK_BYTES = 2 << 20  # random pieces of 2 MiB read as fast as a cold disk can
LEAST_BLOCKS = 256  # of a small file: enough to shuffle, and to share among ranks
READ_AHEAD_BYTES = 128 << 10  # Linux fetches no more for one request
COLUMN_BYTES = 1 << 30  # a field beside the largest one is held in memory up to this size
SCATTER_BYTES = 8192  # rows from here on are scattered by the kernel; smaller ones by one indexed copy
SURE_AFTER, ASK_EVERY = 64, 8  # blocks in the page cache one after the other: then one in so many is asked for
IOV_MAX = 1024  # Linux: destinations of one preadv
DIGESTS = "fastgpu_sha256"  # group beside the datasets: (blocks, 32) uint8 for each, of the rows' bytes as stored
RESTORE = "restore the file, then go on with run.resume=auto"


class Run(NamedTuple):
    """Rows start, start + 1, ... of a dataset go to `places`: (n,) int64."""

    start: int
    places: np.ndarray


class Options(NamedTuple):
    """How to read; see `store.open_store`."""

    verify: bool = False
    trust_links: bool = False
    chunk_cache: Mapping[str, float] = {}


class Layout:
    """Where the rows of one dataset lie in its file: chunk after chunk, or left to h5py."""

    def __init__(self, what: str, data: h5py.Dataset, options: Options, below: int | None = None):
        """what: names the dataset in messages. below: whole numbers that are not 0 to below - 1 are damage."""
        self._what, self.dataset, self._below = what, data.name, below
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

    def read(self, runs: Iterable[Run], out: np.ndarray) -> None:
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
            self.read([Run(start, np.arange(len(some)))], some)
        return out

    def _by_chunk(self, runs: Iterable[Run]) -> Iterator[tuple[int, int, np.ndarray]]:
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


_of_thread = threading.local()


def _scratch(size: int) -> np.ndarray:
    """This thread's own `size` bytes, valid until it asks again: no allocation in the steady loop."""
    if getattr(_of_thread, "scratch", None) is None or len(_of_thread.scratch) < size:
        _of_thread.scratch = np.empty(size, np.uint8)
    return _of_thread.scratch[:size]


class OpenFile:
    """A file open for reading: by descriptor, which fork may share since preadv has no position, and by h5py."""

    def __init__(self, path: str, chunk_cache: Mapping[str, float]):
        self.path, self._chunk_cache = path, chunk_cache
        self._open()
        self._stamp = self._stamp_now()

    def _open(self) -> None:
        self._raw = Path(self.path).open("rb", buffering=0)  # noqa: SIM115
        self._mapped: np.ndarray | None = None
        self._hits = self._asked = 0  # blocks in the page cache since the last that was not; and how often that counted
        self._can_ask = hasattr(os, "RWF_NOWAIT")  # what lies in the page cache: Linux
        self._h5: h5py.File | None = None
        self._h5_pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_raw": None, "_h5": None, "_mapped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._open()

    @property
    def size(self) -> int:
        return self._stamp[0]

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._raw.fileno())
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raises RankError if somebody has written to the file since it was opened."""
        if self._stamp_now() != self._stamp:
            raise RankError(f"{self.path} was changed while in use; {RESTORE}")

    def preadv(self, targets: list[memoryview], offset: int) -> None:
        """Fill the targets, one after the other, with the bytes from `offset` on."""
        left = sum(target.nbytes for target in targets)
        while (n := os.preadv(self._raw.fileno(), targets, offset)) < left:
            if n == 0:
                raise RankError(f"{self.path} ends at byte {offset}: it was cut while in use; {RESTORE}")
            offset, left = offset + n, left - n
            while n >= targets[0].nbytes:  # a short read: a signal, or more than 2 GiB
                n -= targets.pop(0).nbytes
            targets[0] = targets[0][n:]

    def read(self, offset: int, count: int) -> np.ndarray:
        """(count,) uint8 in this thread's scratch memory, valid until it reads again."""
        scratch = _scratch(count)
        self.preadv([scratch.data], offset)
        return scratch

    def will_need(self, offset: int, count: int) -> None:
        """Have the kernel begin to fetch those bytes."""
        if hasattr(os, "posix_fadvise"):
            for start in range(offset, offset + count, READ_AHEAD_BYTES):
                os.posix_fadvise(self._raw.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def cached(self, offset: int, count: int) -> np.ndarray | None:
        """(count,) uint8, a view of the file, if its bytes are in memory; None where they are not, or nobody can tell.

        The last page is asked for: what is read together is evicted together, and reading ahead may have brought in the
        first ones only. After many blocks that were there, few are asked for: the answer costs a CPU 4 % of the copy,
        and a wrong guess a few page faults. File systems on a network do not tell, and are not mapped.
        """
        self._asked += 1
        if (self._hits < SURE_AFTER or self._asked % ASK_EVERY == 0) and not self._is_cached(offset + count - 1):
            self._hits = 0
            return None
        self._hits += 1
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return self._mapped[offset : offset + count]

    def _is_cached(self, offset: int) -> bool:
        if not self._can_ask:
            return False
        try:
            return os.preadv(self._raw.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # 0: cut just now
        except BlockingIOError:
            return False
        except OSError:
            self._can_ask = False
            return False

    def read_h5(self, dataset: str, start: int, out: np.ndarray) -> None:
        """Rows from `start` on through the HDF5 library, which decodes them under its lock."""
        if self._h5 is None or self._h5_pid != os.getpid():
            self._h5, self._h5_pid = h5py.File(self.path, "r", **self._chunk_cache), os.getpid()
        self._h5[dataset].read_direct(out, np.s_[start : start + len(out)])
