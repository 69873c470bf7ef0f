"""The rows of one HDF5 dataset, and three ways to read them.

h5py is asked once for the places of the chunks (chunks.py). `open_layout` then chooses one of three classes:
`PlainRows`, `CompressedRows`, or `Layout`, which reads through the HDF5 library. docs/data-path.md has their costs.
"""

import hashlib
import math
from collections.abc import Iterable
from functools import cached_property, partial

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.process.project import install_command
from fastgpu.rows.contract import PoolPlan, Range
from fastgpu.rows.rows import Field
from fastgpu.storage.chunks import find_chunks, read_checksums
from fastgpu.storage.file import RESTORE, OpenFile, side_by_side
from fastgpu.storage.filters import DECODERS, DECODING, Bytes, decode, filters_of
from fastgpu.storage.hdf5 import dtype_of, refuse_large

BLOCK_BYTES = 2 << 20
"""Size of a block: a cold disk reads random pieces of 2 MiB at its full speed."""
MIN_BLOCKS = 256
"""Minimum number of blocks in a small file, so that blocks can be shuffled and shared among ranks."""
COLUMN_BYTES = 1 << 30
"""All fields but the largest are kept in memory, up to this size each."""
SCATTER_BYTES = 8192
"""Rows of this size or more are scattered by the kernel, or gathered from the page cache, one by one. Smaller rows are
read a block at a time, and copied by index."""
IOV_MAX = 1024
"""Maximum number of targets of one preadv on Linux."""


class Layout:
    """The rows of one HDF5 dataset, read in chunks by the HDF5 library. Subclasses read without the library's lock.

    No h5py object is kept, so threads and forks can share a layout.
    """

    def __init__(self, name: str, data: h5py.Dataset, file: OpenFile, n_items: int | None = None):
        """name: of the dataset, for messages. n_items: if given, a number outside range(n_items) counts as damage.

        Raises UserError if the file is truncated.
        """
        self.name = name
        self._dtype = dtype_of(data)
        self.field = Field(self._dtype.newbyteorder("="), data.shape[1:] + data.dtype.shape, n_items=n_items)
        # A dataset without chunks is cut into chunks of about BLOCK_BYTES.
        self.chunk_rows = data.chunks[0] if data.chunks else max(1, BLOCK_BYTES // max(1, self.field.row_bytes))
        self._file = file
        self._path = data.name
        self._n_rows = len(data)
        self._n_items = n_items
        self._filters = filters_of(data)
        self.chunks = find_chunks(name, data, self.chunk_rows, file.size)
        """(chunks, 3) int64: first byte, number of bytes in the file, and skipped filters of each chunk."""
        self.checksums = read_checksums(name, data, len(self.chunks))
        file.expect(self.chunks[:, :2])

    def __len__(self) -> int:
        return self._n_rows

    def fingerprint(self) -> bytes:
        """The SHA-256 of the file size and the checksums of all rows; if there are none, of the size and 16 rows."""
        content = self.checksums
        if content is None:
            rows = np.linspace(0, self._n_rows - 1, min(16, self._n_rows)).astype(np.int64)
            content = np.empty((len(rows), *self.field.shape), self.field.dtype)
            self.read([(row, range(place, place + 1)) for place, row in enumerate(rows.tolist())], content)
        return hashlib.sha256(b"%d" % self._file.size + content.tobytes()).digest()

    def read_all(self, dtype: np.dtype | None = None) -> np.ndarray:
        """All rows, (rows, *shape), as `dtype` if it is given. For small fields that are kept in memory."""
        dtype = dtype or self.field.dtype
        row_bytes = math.prod(self.field.shape) * dtype.itemsize
        refuse_large(self.name, self._n_rows * row_bytes + self.chunk_rows * self.field.row_bytes)
        out = np.empty((self._n_rows, *self.field.shape), dtype)

        def read_part(start: int) -> None:
            self.read([(start, range(start, min(start + part_rows, self._n_rows)))], out)

        part_rows = max(1, self._n_rows) if self._file.is_local else self.chunk_rows
        side_by_side(read_part, range(0, self._n_rows, part_rows))  # there are no reader threads yet
        return out

    def view(self, start: int, n_rows: int) -> np.ndarray | None:
        """(bytes,) uint8: a view of neighbouring rows in the mapped file, in the format of a pool. None: impossible.

        Call `check_unchanged` of the file after you have used the view.
        """
        return None

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Copy the rows of each range to their places in `out`, (rows, *shape), C-contiguous. Thread-safe.

        Raises OSError or UserError if reading fails, or if the bytes are damaged or were changed meanwhile.
        """
        self._file.check_unchanged()
        by_chunk: dict[int, list[Range]] = {}
        for start, places in ranges:
            done = 0
            while done < len(places):
                chunk, row = divmod(start + done, self.chunk_rows)
                of_chunk = places[done : done + self.chunk_rows - row]
                by_chunk.setdefault(chunk, []).append((row, of_chunk))
                done += len(of_chunk)
        self._read(by_chunk, out)
        self._file.check_unchanged()

    def _prepare(self, chunk: int) -> np.ndarray | None:
        """See `OpenFile.prepare`."""
        check = None if self.checksums is None else partial(self._check, chunk, self.checksums[chunk].tobytes())
        offset, n_bytes, _ = self.chunks[chunk].tolist()
        return self._file.prepare(offset, n_bytes, check)

    def _check(self, chunk: int, checksum: bytes, content: np.ndarray) -> None:
        """Raise UserError if the rows of a chunk do not match their SHA-256. content: the bytes of the chunk."""
        n_rows = min(self.chunk_rows, self._n_rows - chunk * self.chunk_rows)
        rows = self.read_chunk(chunk, content)[:n_rows].astype(self.field.dtype)
        if hashlib.sha256(rows.data).digest() != checksum:
            raise UserError(f"{self.name}: block {chunk} is damaged: checksum mismatch; {RESTORE}")

    def _read(self, by_chunk: dict[int, list[Range]], out: np.ndarray) -> None:
        """Copy rows to their places. by_chunk: {chunk: its ranges}, with rows numbered from the first row of the chunk.

        Each chunk is read as a whole, once for all its ranges. The kernel is asked for all chunks before the first is
        read, so that a few threads keep a disk busy.
        """
        contents = {chunk: self._content(chunk) for chunk in by_chunk}
        for chunk, ranges in by_chunk.items():
            rows = self.read_chunk(chunk, contents[chunk])
            for row, places in ranges:
                self._place(rows[row : row + len(places)], places, out)

    def _content(self, chunk: int) -> np.ndarray | None:
        """The bytes of a chunk, if they are in memory."""
        return None  # the HDF5 library reads the bytes itself

    def read_chunk(self, chunk: int, content: np.ndarray | None = None) -> np.ndarray:
        """The rows of a chunk, (rows, *shape), valid until the next call. content: the bytes, if they are in memory."""
        if content is None:  # otherwise the chunk is being prepared by the caller
            self._prepare(chunk)
        return self._file.read_h5(self._path, chunk * self.chunk_rows, self.chunk_rows)

    def _as_rows(self, content: Bytes | np.ndarray) -> np.ndarray:
        """The bytes as numbers, (rows, *shape)."""
        return np.frombuffer(content, self._dtype).reshape(-1, *self.field.shape)

    def _place(self, rows: np.ndarray, places: np.ndarray | range, out: np.ndarray) -> None:
        """Copy rows to their places. Raises UserError if they are item numbers out of range."""
        # Such a number would crash the device, much later.
        if self._n_items is not None and not 0 <= rows.min() <= rows.max() < self._n_items:
            raise UserError(
                f"{self.name}: item numbers {rows.min()} to {rows.max()} are not in 0 to {self._n_items - 1}, as the "
                f"attribute shape has it; {RESTORE}"
            )
        out[index_of(places)] = rows


class CompressedRows(Layout):
    """Rows in compressed chunks. Each reader thread decompresses chunks without a lock."""

    def _content(self, chunk: int) -> np.ndarray | None:
        content = self._prepare(chunk)
        return self._file.cached(*self.chunks[chunk, :2].tolist()) if content is None else content

    def read_chunk(self, chunk: int, content: np.ndarray | None = None) -> np.ndarray:
        offset, n_bytes, skipped = self.chunks[chunk].tolist()
        size = self.chunk_rows * self.field.row_bytes
        if n_bytes == size and not skipped and self._n_rows < (chunk + 1) * self.chunk_rows:
            # A last chunk that is not full may be stored without filters (H5Pset_chunk_opts). Only the library knows.
            return super().read_chunk(chunk, content)
        content = self._file.read(offset, n_bytes) if content is None else content
        try:
            with DECODING:
                decoded = decode(content.data, self._filters, skipped, size)
        except ValueError as error:
            raise UserError(f"{self.name}: block {chunk} is damaged: it {error}; {RESTORE}") from None
        return self._as_rows(decoded)


class PlainRows(Layout):
    """Rows that are plain bytes in the file: a row can be read without the other rows of its chunk."""

    @cached_property
    def _is_as_in_pools(self) -> bool:
        """Whether a row has the same bytes in the file and in a pool."""
        return self._dtype.isnative and self._n_items is None

    @cached_property
    def _is_one_piece(self) -> bool:
        return bool(np.all(np.diff(self.chunks[:, 0]) == self.chunk_rows * self.field.row_bytes))

    def read_chunk(self, chunk: int, content: np.ndarray | None = None) -> np.ndarray:
        return self._as_rows(self._file.read(*self.chunks[chunk, :2].tolist()) if content is None else content)

    def _read(self, by_chunk: dict[int, list[Range]], out: np.ndarray) -> None:
        """Copy rows to their places. Bytes in the page cache are copied out of a mapping of the file. Other bytes are
        read with one preadv for each range, because page faults are far slower."""
        row_bytes = self.field.row_bytes
        pieces: list[tuple[np.ndarray | None, int, np.ndarray | range]] = []
        for chunk, ranges in by_chunk.items():
            content = self._prepare(chunk)
            for row, places in ranges:
                begin, n_bytes = row * row_bytes, len(places) * row_bytes
                offset = int(self.chunks[chunk, 0]) + begin
                part = self._file.cached(offset, n_bytes) if content is None else content[begin : begin + n_bytes]
                pieces.append((part, offset, places))
        # Copies out of the mapping come last and together, because each displaces code and data from the CPU's caches.
        for content, offset, places in sorted(pieces, key=lambda piece: piece[0] is not None):
            if content is not None:
                self._place(self._as_rows(content), places, out)
            elif self._is_scattered(places) and not self._file.is_direct:
                self._scatter(offset, places, out)
            else:
                self._place(self._as_rows(self._file.read(offset, len(places) * row_bytes)), places, out)

    def _is_scattered(self, places: np.ndarray | range) -> bool:
        """Whether rows can be read directly to their places: each row is long, or the rows stay neighbours."""
        n_bytes = self.field.row_bytes * (len(places) if isinstance(places, range) else 1)
        return self._is_as_in_pools and n_bytes >= SCATTER_BYTES

    def _scatter(self, offset: int, places: np.ndarray | range, out: np.ndarray) -> None:
        """Let the kernel read neighbouring rows to their places."""
        row_bytes = self.field.row_bytes
        memory = out.reshape(-1).view(np.uint8).data
        if isinstance(places, range):
            self._file.preadv([memory[places.start * row_bytes : places.stop * row_bytes]], offset)
            return
        targets = [memory[start : start + row_bytes] for start in (places * row_bytes).tolist()]
        for i in range(0, len(targets), IOV_MAX):
            self._file.preadv(targets[i : i + IOV_MAX], offset + i * row_bytes)

    def view(self, start: int, n_rows: int) -> np.ndarray | None:
        if not (self._is_as_in_pools and self._is_one_piece):
            return None
        chunks = range(start // self.chunk_rows, (start + n_rows - 1) // self.chunk_rows + 1)
        if not all(self._file.is_prepared(int(self.chunks[chunk, 0])) for chunk in chunks):
            return None
        row_bytes = self.field.row_bytes
        return self._file.cached(int(self.chunks[0, 0]) + start * row_bytes, n_rows * row_bytes)

    def cached_rows(self, ranges: Iterable[Range]) -> np.ndarray | None:
        """All rows in the mapped file, (rows, bytes) uint8. Values may be unaligned.

        None unless rows are long and in one piece, and the rows of the ranges are in the page cache.
        """
        row_bytes = self.field.row_bytes
        is_one_piece = row_bytes >= SCATTER_BYTES and self._is_one_piece
        if not is_one_piece or any(self.view(start, len(places)) is None for start, places in ranges):
            return None
        first = int(self.chunks[0, 0])
        return self._file.mapped[first : first + self._n_rows * row_bytes].reshape(-1, row_bytes)


def open_layout(name: str, data: h5py.Dataset, file: OpenFile, n_items: int | None = None) -> Layout:
    """The rows of an HDF5 dataset; see `Layout` for the arguments. Raises UserError if the dataset cannot be read."""
    dtype = dtype_of(data)
    kind = data.id.get_create_plist().get_layout()
    if not data.ndim or dtype.kind not in "buif":
        raise UserError(f"{name} is {dtype} {data.shape}; allowed are rows of bool, integers and floats up to 64 bits")
    if data.chunks:
        n_chunks = math.prod(-(-length // chunk) for length, chunk in zip(data.shape, data.chunks, strict=True))
        n_missing = n_chunks - data.id.get_num_chunks()
        if n_missing:
            raise UserError(f"{name}: {n_missing} of {n_chunks} chunks were never written; write all, fill values too")
    elif len(data) and data.id.get_offset() is None and kind == h5py.h5d.CONTIGUOUS:
        raise UserError(f"{name} was never written; write all of it, fill values too")
    elif kind == h5py.h5d.VIRTUAL and data.file.driver == "fileobj":  # HDF5 opens the sources by their path
        raise UserError(f"{name} is a virtual dataset, which is read of files on this machine only: download it")
    filters = filters_of(data)
    # h5py converts some types: it shows bfloat16 as float32, for example. Such values cannot be read without h5py.
    is_as_shown = data.id.get_type() == h5py.h5t.py_create(data.dtype, logical=True)
    has_whole_rows = not data.chunks or data.chunks[1:] == data.shape[1:]
    has_place = kind in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)
    is_known = is_as_shown and has_place and all(code in DECODERS for code, _, _ in filters)
    if is_known and has_whole_rows and math.prod(data.shape[1:]):
        return (CompressedRows if filters else PlainRows)(name, data, file, n_items)
    for code, _, filter_name in filters:
        if not h5py.h5z.filter_avail(code):
            raise UserError(f"{name} is compressed by {filter_name}: {install_command('codecs')}")
    return Layout(name, data, file, n_items)


def index_of(places: np.ndarray | range) -> np.ndarray | slice:
    """The places as an index of an array: a slice for a range."""
    return slice(places.start, places.stop) if isinstance(places, range) else places
