"""Rows -> HDF5 files that are read fastest: blocks of whole rows, aligned, with checksums; complete or absent.

    images (N, C, H, W), labels (N,)      datasets of equal length; a block is an HDF5 chunk of whole rows, about 2 MiB
    fastgpu_sha256/images (blocks, 32)    SHA-256 of the rows of each block, before compression
    items/indptr (N + 1,), items/indices  ragged rows of item numbers, a CSR matrix as anndata writes it: those of row n
                                          are indices[indptr[n] : indptr[n + 1]]; its `data`, all 1, takes no room
    weights/indptr, weights/values        ragged rows of other values
    attributes                            fastgpu_format = 1, and what the caller knows about the rows

Any HDF5 tool reads these files. Blocks of 64 KiB or more begin at a multiple of 4 KiB.
"""

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastgpu.convert.columns import (
    Column,
    Compression,
    Encoder,
    RaggedColumn,
    choose_block_rows,
    compression_filters,
)
from fastgpu.convert.statistics import ImageStatistics
from fastgpu.process.atomic import atomic_replace
from fastgpu.process.launch import UserError
from fastgpu.rows.field import Field
from fastgpu.rows.rows import RaggedArray

FORMAT = 1


class WriteOptions(NamedTuple):
    """How files are written."""

    shards: int = 1
    """Number of files. With more than one, train.h5 becomes train-00000-of-00008.h5 and so on."""
    compression: Compression = "none"
    threads: int = 2
    """Threads that hash, compress and write."""
    replace: bool = False
    """Overwrite existing files."""


class Writer:
    """Takes rows in their final order. A context manager that leaves all files complete, or none.

        with Writer(Path("train.h5"), 1000, fields) as writer:
            writer.append({"images": images, "labels": labels})

    n_rows: number of rows that will come; another number raises ValueError at the end. may_be_fewer: fewer rows are
    allowed, and the last file is then shorter. attributes: facts about the rows (class_names, mean, std, source); for
    uint8 images without `mean`, the mean and standard deviation of each channel are added. Raises UserError if the
    target exists, a codec is not installed, or the disk is too small.
    """

    def __init__(
        self,
        target: Path,
        n_rows: int,
        fields: Mapping[str, Field],
        attributes: Mapping[str, Any] | None = None,
        *,
        options: WriteOptions = WriteOptions(),  # noqa: B008 (an immutable tuple)
        may_be_fewer: bool = False,
    ):
        self.paths = shard_paths(target, options.shards)
        _check_target(target, self.paths, n_rows, options)
        if options.compression == "none":
            _check_space(target, n_rows * sum(field.row_bytes for field in fields.values()))
        filters = compression_filters(options.compression)
        self.options = options
        self._n_announced_rows = n_rows
        self.n_rows = 0
        """Rows written so far."""
        self._may_be_fewer = may_be_fewer
        self._fields = fields
        self._attributes = dict(attributes or {})
        self._statistics: ImageStatistics | None = None
        if "mean" not in self._attributes:
            self._statistics = ImageStatistics(fields, n_rows)
        self._borders = [number * n_rows // options.shards for number in range(options.shards + 1)]
        self._shards: list[_Shard] = []
        self._encoder = Encoder(filters, ThreadPoolExecutor(options.threads, "writer"))

    def append(self, rows: Mapping[str, Any]) -> None:
        """The next rows, {field: (n, *shape) or RaggedArray}. Their memory may be used again afterwards."""
        n_new = len(next(iter(rows.values())))
        if self.n_rows + n_new > self._n_announced_rows:
            raise ValueError(f"{self.n_rows + n_new} rows came, but {self._n_announced_rows} were announced")
        if self._statistics:
            self._statistics.add(rows, self.n_rows)
        start = 0
        while start < n_new:
            if self.n_rows == self._borders[len(self._shards)]:
                self._open_shard()
            border = self._borders[len(self._shards)]
            stop = min(n_new, start + border - self.n_rows)
            self._shards[-1].append({name: _slice(column, start, stop) for name, column in rows.items()})
            self.n_rows += stop - start
            start = stop
            if self.n_rows == border:
                self._shards[-1].finish()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._encoder.threads.shutdown(cancel_futures=True)
            for shard in self._shards:
                shard.abandon()

    def _open_shard(self) -> None:
        number = len(self._shards)
        n_rows = self._borders[number + 1] - self._borders[number]
        self._shards.append(_Shard(self.paths[number]))  # before the file exists, so that an interrupt cannot leave one
        self._shards[-1].open(n_rows, self._fields, self._encoder)

    def _publish(self) -> None:
        """Give all files their names."""
        if self.n_rows != self._n_announced_rows:
            self._end_early()
        attributes = dict(self._attributes)
        if self._statistics:
            attributes |= self._statistics.attributes()
        for shard in self._shards:
            shard.publish(attributes | {"fastgpu_format": FORMAT})

    def _end_early(self) -> None:
        if not self._may_be_fewer:
            raise ValueError(f"{self.n_rows} rows came, but {self._n_announced_rows} were announced")
        if len(self._shards) < len(self.paths):
            raise UserError(f"{self.n_rows:,} rows do not fill {len(self.paths)} shards; use fewer")
        self._shards[-1].finish()


class _Shard:
    """One file, under a temporary name."""

    def __init__(self, target: Path):
        self.target = target
        self.partial = target.with_name(f".{target.name}.partial")
        self._file: h5py.File | None = None
        self._columns: dict[str, Column | RaggedColumn] = {}

    def open(self, n_rows: int, fields: Mapping[str, Field], encoder: Encoder) -> None:
        self._file = h5py.File(self.partial, "w", libver="latest", alignment_threshold=65536, alignment_interval=4096)
        block_rows = choose_block_rows(n_rows, fields)
        for name, field in fields.items():
            if field.is_ragged:
                self._columns[name] = RaggedColumn(self._file, name, field, n_rows=n_rows, encoder=encoder)
            else:
                self._columns[name] = Column(
                    self._file, name, field, n_rows=n_rows, block_rows=block_rows[name], encoder=encoder
                )

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
        """Remove the temporary file, if it was not renamed."""
        if self._file:
            with suppress(OSError, RuntimeError):  # a full disk refuses the rest once more
                self._file.close()
        self.partial.unlink(missing_ok=True)


def shard_paths(target: Path, shards: int) -> list[Path]:
    """train.h5 -> [train.h5], or [train-00000-of-00002.h5, train-00001-of-00002.h5]."""
    if shards == 1:
        return [target]
    return [target.with_name(f"{target.stem}-{i:05d}-of-{shards:05d}{target.suffix}") for i in range(shards)]


def _check_target(target: Path, paths: list[Path], n_rows: int, options: WriteOptions) -> None:
    if not 1 <= options.shards <= n_rows:
        raise UserError(f"--shards is {options.shards}, for {n_rows:,} rows; use 1 to {n_rows}")
    existing = [path for path in paths if path.exists()]
    if existing and not options.replace:
        raise UserError(f"{existing[0]} exists; choose another name, or --force")
    other_shards = set(target.parent.glob(f"{target.stem}-?????-of-?????{target.suffix}")) - set(paths)
    if options.shards > 1 and other_shards:
        raise UserError(f"{min(other_shards)} is a shard of another file; remove it, or choose another name")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} does not exist; make it first")


def _check_space(target: Path, need: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise UserError(
            f"{target} needs {need / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free in {target.parent.absolute()}; "
            "make room, or write it elsewhere"
        )


def _slice(rows: np.ndarray | RaggedArray, start: int, stop: int) -> np.ndarray | RaggedArray:
    if isinstance(rows, np.ndarray):
        return rows[start:stop]
    offsets = rows.offsets[start : stop + 1]
    return RaggedArray(rows.values[offsets[0] :], offsets - offsets[0])
