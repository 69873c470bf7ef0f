"""Rows -> HDF5 file(s) that are read fastest: blocks of whole rows, aligned, checksummed; whole or absent.

    images (N, C, H, W), labels (N,)     datasets of equal length; a block is an HDF5 chunk of about 2 MiB of whole rows
    fastgpu_sha256/images (blocks, 32)   SHA-256 of each block's rows as they are before compression
    items/indptr (N + 1,), items/indices ragged rows of item numbers, a CSR matrix as anndata writes it: those of row n
                                         are indices[indptr[n] : indptr[n + 1]]; its `data` is ones that take no room
    weights/indptr, weights/values       ragged rows of other values
    attributes                           fastgpu_format = 1, and what the caller knows of the rows

Any HDF5 tool reads them. Blocks of 64 KiB and more begin at a multiple of 4 KiB. They are hashed and compressed by
threads, which also write those that are not compressed; the library writes the others, in order.
"""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np

from fastgpu.process.atomic import atomic_replace
from fastgpu.process.launch import UserError
from fastgpu.rows.field import Field
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import codecs
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, DIGESTS, MIN_BLOCKS

FORMAT = 1
RAGGED_BLOCK_BYTES = BLOCK_BYTES // 8  # blocks of ragged rows begin and end inside of chunks, which are decoded whole
MIN_CHUNK_BYTES = 16 << 10
INDPTR = np.dtype(np.int64)
STATISTICS_PIXELS = 1024  # at least so many of a row's channel, if it has them: the rows differ more than its pixels
STATISTICS_ROWS = 10_000  # at most so many give `mean` and `std`: their error is below 1 % of the pixels' spread
Compression = Literal["none", "gzip", "lz4", "zstd"]


class Block(NamedTuple):
    """What a thread made of one block."""

    data: codecs.Bytes
    digest: bytes


class Writer:
    """Takes rows in their final order; a context manager that leaves every file whole, or none at all.

        with Writer(Path("train.h5"), rows=1000, fields=fields) as writer:
            writer.append({"images": images, "labels": labels})

    target: with `shards` > 1, train.h5 becomes train-00000-of-00008.h5 and so on. rows: how many will come; fewer or
    more raise ValueError at the end. at_most: there may be fewer, and the last file is shorter then. attributes: of the
    rows (class_names, mean, std, source); `mean` and `std` (a channel) are added for uint8 images that have none.
    replace: overwrite what is there. Raises UserError for a target that exists, a codec that is not installed, or too
    small a disk.
    """

    def __init__(
        self,
        target: Path,
        rows: int,
        fields: Mapping[str, Field],
        attributes: Mapping[str, Any] | None = None,
        *,
        shards: int = 1,
        at_most: bool = False,
        compression: Compression = "none",
        threads: int = 2,
        replace: bool = False,
    ):
        self.targets = shard_names(target, shards)
        if not 1 <= shards <= rows:
            raise UserError(f"{shards} shards of {rows:,} rows: use 1 to {rows}")
        if not replace and (found := next((path for path in self.targets if path.exists()), None)):
            raise UserError(f"{found} exists; choose another name, or --force")
        others = set(target.parent.glob(f"{target.stem}-?????-of-?????{target.suffix}")) - set(self.targets)
        if shards > 1 and others:
            raise UserError(f"{min(others)} is a shard of another writing; remove it, or choose another name")
        need, free = rows * sum(field.row_bytes for field in fields.values()), _free_bytes(target.parent)
        if compression == "none" and need > free:
            raise UserError(
                f"{target} needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free in {target.parent.absolute()}; "
                "make room, or write it elsewhere"
            )
        filters = _filters(compression)
        self.announced_rows, self._at_most, self._fields = rows, at_most, fields
        self._borders = [number * rows // shards for number in range(shards + 1)]  # first row of each shard
        self._attributes, self._filters = dict(attributes or {}), filters
        self._statistics = _Statistics(fields, rows) if "mean" not in self._attributes else None
        self.rows = 0  # so far
        self._shards: list[_Shard] = []
        self._threads = ThreadPoolExecutor(threads, "writer")

    def append(self, rows: Mapping[str, Any]) -> None:
        """The next rows, {field: (n, *shape) or RaggedArray}, n the same for all; their memory is free afterwards."""
        count = len(next(iter(rows.values())))
        if self.rows + count > self.announced_rows:
            raise ValueError(f"{self.rows + count} rows came where {self.announced_rows} were announced")
        if self._statistics:
            self._statistics.add(rows, self.rows)
        start = 0
        while start < count:
            if self.rows == self._borders[len(self._shards)]:
                self._open_next()
            border = self._borders[len(self._shards)]
            stop = min(count, start + border - self.rows)
            self._shards[-1].append({name: _part(column, start, stop) for name, column in rows.items()})
            self.rows += stop - start
            start = stop
            if self.rows == border:
                self._shards[-1].finish()

    def _end_early(self) -> None:
        if not self._at_most:
            raise ValueError(f"{self.rows} rows came where {self.announced_rows} were announced")
        if len(self._shards) < len(self.targets):
            raise UserError(f"{self.rows:,} rows do not fill {len(self.targets)} shards; use fewer")
        self._shards[-1].finish()

    def _open_next(self) -> None:
        number = len(self._shards)
        rows = self._borders[number + 1] - self._borders[number]
        self._shards.append(_Shard(self.targets[number]))  # known before there is a file, or an interrupt leaves one
        self._shards[-1].open(rows, self._fields, self._filters, self._threads)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.rows != self.announced_rows:
                self._end_early()
            if kind is None:
                found = self._statistics.found() if self._statistics else {}
                for shard in self._shards:
                    shard.publish(self._attributes | found | {"fastgpu_format": FORMAT})
        finally:
            self._threads.shutdown(cancel_futures=True)
            for shard in self._shards:
                shard.abandon()


def _part(rows: np.ndarray | RaggedArray, start: int, stop: int) -> np.ndarray | RaggedArray:
    if isinstance(rows, np.ndarray):
        return rows[start:stop]
    offsets = rows.offsets[start : stop + 1]
    return RaggedArray(rows.values[offsets[0] :], offsets - offsets[0])


def shard_names(target: Path, shards: int) -> list[Path]:
    """train.h5 -> [train.h5], or [train-00000-of-00002.h5, train-00001-of-00002.h5]."""
    if shards == 1:
        return [target]
    return [target.with_name(f"{target.stem}-{i:05d}-of-{shards:05d}{target.suffix}") for i in range(shards)]


def block_rows_of(rows: int, fields: Mapping[str, Field]) -> dict[str, int]:
    """{field: rows of a block}: about 2 MiB of whole rows.

    A field that readers hold in memory has blocks of its own; the others share those of the largest. They are smaller
    where a file would have few: a run needs a block for each of its ranks, and many to shuffle.
    """
    widest = max(fields.values(), key=lambda field: field.row_bytes)
    shared = max(1, min(BLOCK_BYTES // max(1, widest.row_bytes), rows // MIN_BLOCKS))
    held = {name for name, field in fields.items() if field is not widest and rows * field.row_bytes <= COLUMN_BYTES}
    return {
        name: max(1, min(rows, BLOCK_BYTES // max(1, field.row_bytes))) if name in held else shared
        for name, field in fields.items()
        if not field.is_ragged
    }


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except FileNotFoundError:
        raise UserError(f"{folder} does not exist; make it first") from None


def _filters(compression: Compression) -> dict[str, Any]:
    """Arguments of h5py's create_dataset; shuffling bytes of equal weight together helps numbers, and not bytes."""
    if compression == "none":
        return {}
    if compression == "gzip":
        return {"compression": "gzip", "compression_opts": 1}
    if not (codecs.imagecodecs and find_spec("hdf5plugin")):
        raise UserError(f'compression {compression} needs: pip install ".[codecs]"; or use gzip')
    plugin = import_module("hdf5plugin")
    return dict(plugin.LZ4() if compression == "lz4" else plugin.Zstd(clevel=1))


class _Shard:
    """One file, under a temporary name."""

    def __init__(self, target: Path):
        self.target, self.partial = target, target.with_name(f".{target.name}.partial")
        self._file: h5py.File | None = None

    def open(
        self, rows: int, fields: Mapping[str, Field], filters: Mapping[str, Any], threads: ThreadPoolExecutor
    ) -> None:
        self._file = h5py.File(self.partial, "w", libver="latest", alignment_threshold=65536, alignment_interval=4096)
        block_rows = block_rows_of(rows, fields)
        self._columns: dict[str, _Column | _RaggedColumn] = {
            name: _RaggedColumn(self._file, name, field, rows, filters, threads)
            if field.is_ragged
            else _Column(self._file, name, field, rows, block_rows[name], filters, threads)
            for name, field in fields.items()
        }

    def append(self, rows: Mapping[str, Any]) -> None:
        for name, column in self._columns.items():
            column.append(rows[name])

    def finish(self) -> None:
        assert self._file
        for column in self._columns.values():
            column.finish()
        self._file.close()

    def publish(self, attributes: Mapping[str, Any]) -> None:
        with h5py.File(self.partial, "r+", libver="latest") as file:
            file.attrs.update(attributes)
        atomic_replace(self.partial, self.target)

    def abandon(self) -> None:
        """Remove what has not got its name yet."""
        if self._file:
            with suppress(OSError, RuntimeError):  # of a full disk once more
                self._file.close()
        self.partial.unlink(missing_ok=True)


class _Column:
    """One dataset: whole blocks go out in order, the rest waits for more rows. rows: None if nobody knows how many."""

    def __init__(
        self,
        file: h5py.File,
        name: str,
        field: Field,
        rows: int | None,
        block_rows: int,
        filters: Mapping[str, Any],
        threads: ThreadPoolExecutor,
    ):
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if rows and not filters:
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._data = file.create_dataset(
            name,
            (rows or 0, *field.shape),
            field.dtype,
            maxshape=(rows, *field.shape),
            chunks=(block_rows, *field.shape),
            fill_time="never",
            shuffle=bool(filters) and field.dtype.itemsize > 1,
            dcpl=plan,
            **filters,
        )
        self._filters = codecs.filters_of(self._data.id.get_create_plist())
        self._offsets = _chunk_offsets(self._data) if rows and not filters else None
        self._descriptor = self._data.file.id.get_vfd_handle()
        self._threads = threads
        self._block = np.zeros((block_rows, *field.shape), field.dtype)
        self._held = 0  # rows of it that are filled
        self._digests: list[bytes] = []  # of the blocks written so far

    def append(self, rows: np.ndarray) -> None:
        making = deque[Future[Block]]()
        for block in self._blocks(np.ascontiguousarray(rows, self._block.dtype)):
            making.append(self._threads.submit(self._make, len(self._digests) + len(making), block, len(block)))
            if len(making) > 8:
                self._write(making.popleft().result())
        while making:
            self._write(making.popleft().result())

    def _blocks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Views of `rows` where a whole block lies in them."""
        size = len(self._block)
        while len(rows):
            if self._held == 0 and len(rows) >= size:
                yield rows[:size]
                rows = rows[size:]
            else:
                count = min(len(rows), size - self._held)
                self._block[self._held : self._held + count] = rows[:count]
                self._held, rows = (self._held + count) % size, rows[count:]
                if self._held == 0:
                    yield self._block.copy()

    def finish(self) -> None:
        """The last block, which may be short: HDF5 stores it in full length, the checksum is of the rows alone."""
        rows = len(self._digests) * len(self._block) + self._held
        if self._held:
            self._block[self._held :] = 0
            self._write(self._make(len(self._digests), self._block, self._held))
        if rows < len(self._data):
            self._data.resize(rows, axis=0)
        digests = np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, 32)
        self._data.parent.create_dataset(f"{DIGESTS}/{self._data.name.rpartition('/')[2]}", data=digests)

    def _make(self, number: int, block: np.ndarray, rows: int) -> Block:
        """In a thread: hash a block and encode it; or write it, where its place in the file is known.

        The HDF5 library writes with Python's lock held, which stops the threads that decode.
        """
        digest, data = hashlib.sha256(block[:rows].data).digest(), block.reshape(-1).view(np.uint8).data
        if self._offsets is None:
            return Block(codecs.encode(data, self._filters), digest)
        start = at = int(self._offsets[number])
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written
        if hasattr(os, "posix_fadvise"):  # Linux then begins to write it to the disk: the last fsync finds little left
            os.posix_fadvise(self._descriptor, start, at - start, os.POSIX_FADV_DONTNEED)
        return Block(b"", digest)

    def _write(self, block: Block) -> None:
        start = len(self._digests) * len(self._block)
        if self._offsets is None:
            if start >= len(self._data):
                self._data.resize(start + len(self._block), axis=0)
            self._data.id.write_direct_chunk((start, *[0] * (self._data.ndim - 1)), block.data)
        self._digests.append(block.digest)


def _chunk_offsets(data: h5py.Dataset) -> np.ndarray:
    """(chunks,) int64: first byte of each in the file, which has room for all of them."""
    found = np.empty(data.id.get_num_chunks(), np.int64)

    def note(chunk: h5py.h5d.StoreInfo) -> None:
        found[chunk.chunk_offset[0] // data.chunks[0]] = chunk.byte_offset

    data.id.chunk_iter(note)
    return found


class _RaggedColumn:
    """Ragged rows: their values as a column of their own, one row after the other, and where each row's begin."""

    def __init__(
        self,
        file: h5py.File,
        name: str,
        field: Field,
        rows: int,
        filters: Mapping[str, Any],
        threads: ThreadPoolExecutor,
    ):
        self._group, self._below = file.create_group(name), field.n_items
        block_bytes = field.row_bytes * max(1, min(BLOCK_BYTES // field.row_bytes, rows // MIN_BLOCKS))
        chunk = max(MIN_CHUNK_BYTES, min(RAGGED_BLOCK_BYTES, block_bytes)) // field.dtype.itemsize
        what = "indices" if field.n_items else "values"
        self._values = _Column(self._group, what, field._replace(mean_values=None), None, chunk, filters, threads)
        chunk = min(RAGGED_BLOCK_BYTES // INDPTR.itemsize, rows + 1)
        self._indptr = _Column(self._group, "indptr", Field(INDPTR, ()), rows + 1, chunk, filters, threads)
        self._indptr.append(np.zeros(1, INDPTR))
        self._count = 0  # values so far

    def append(self, rows: RaggedArray) -> None:
        self._values.append(rows.values[: rows.offsets[-1]])
        self._indptr.append(self._count + rows.offsets[1:].astype(INDPTR))
        self._count += int(rows.offsets[-1])

    def finish(self) -> None:
        self._values.finish()
        self._indptr.finish()
        if self._below:  # what anndata asks for; a dataset that was never written reads as its fill value
            size = {"shape": (self._count,), "maxshape": (None,), "chunks": (1 << 16,)}
            self._group.create_dataset("data", dtype=np.float32, fillvalue=1, **size)
            shape = (len(self._group["indptr"]) - 1, self._below)
            self._group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})


class _Statistics:
    """Mean and standard deviation of each channel of uint8 images (C, H, W), from rows spread over the whole."""

    def __init__(self, fields: Mapping[str, Field], rows: int):
        self._names = [n for n, f in fields.items() if f.dtype == np.uint8 and len(f.shape) == 3][:1]
        self._step = -(-rows // STATISTICS_ROWS)
        self._sums: list[np.ndarray] = []  # (3, C) of a row: pixels, their sum, the sum of their squares

    def add(self, rows: Mapping[str, np.ndarray], start: int) -> None:
        """rows: the ones from number `start` on."""
        for name in self._names:
            for row in rows[name][-start % self._step :: self._step]:
                step = row[0].size // STATISTICS_PIXELS | 1  # odd: not one column of the image again and again
                pixels = row.reshape(len(row), -1)[:, ::step].astype(np.float32)
                squares = np.einsum("cp,cp->c", pixels, pixels)
                self._sums.append(np.stack([np.full(len(row), pixels.shape[1]), pixels.sum(1), squares]))

    def found(self) -> dict[str, list[float]]:
        if not self._sums:
            return {}
        pixels, total, squares = np.stack(self._sums).sum(0, dtype=np.float64)
        mean = total / pixels
        std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
        return {"mean": mean.round(4).tolist(), "std": np.maximum(std, 1e-3).round(4).tolist()}
