"""Writes HDF5 files for fast reads: blocks of whole rows, with checksums. Any HDF5 tool can read the files.

images (N, C, H, W), labels (N,)      datasets of equal length; a block is an HDF5 chunk of whole rows, about 2 MiB
fastgpu_sha256/images (blocks, 32)    SHA-256 of the rows of each block, before compression
fastgpu_source (N,)                   text: the origin of each row, such as an image file or the line of a table
items/indptr (N + 1,), items/indices  ragged rows of item numbers, a CSR matrix in the form of anndata: row n has
                                      indices[indptr[n] : indptr[n + 1]]; `data`, all 1, takes no space in the file
weights/indptr, weights/values        ragged rows of other values
images/indptr, images/values          the bytes of image files; the group's attribute `codec` names their formats
attributes                            fastgpu_format = 1, and facts that the caller gives
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from fastgpu.process.launch import ESCAPES
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.chunks import CHECKSUMS
from fastgpu.storage.hdf5 import ORIGINS
from fastgpu.storage.layout import BLOCK_BYTES, COLUMN_BYTES, MIN_BLOCKS

CODECS = {0xFF: "jpeg", 0x89: "png", 0x52: "webp"}
"""First byte of an encoded image -> its format."""
Compression = Literal["none", "gzip"]
RAGGED_BLOCK_BYTES = BLOCK_BYTES // 8
"""Blocks of ragged values are smaller, since a block is decoded as a whole, and rows begin inside of it."""
MIN_CHUNK_BYTES = 16 << 10
ORIGINS_PER_CHUNK = 4096
INDPTR = Field(np.dtype(np.int64), ())
STATISTICS_ROWS = 10_000
"""Maximum number of images that the mean is taken of. Its error is then below 1 % of the standard deviation."""
STATISTICS_PIXELS = 1024
"""Number of pixels of each of these images. Images differ more than the pixels of one image."""


def write_rows(
    path: Path,
    n_rows: int,
    fields: Mapping[str, Field],
    batches: Iterable[Mapping[str, Any]],
    *,
    attributes: Mapping[str, Any],
    compression: Compression = "none",
) -> int:
    """Write rows, which come in their final order, and return their number. An exception leaves a damaged file.

    n_rows: maximum number of rows, which decides the size of the blocks. batches: {field: (n, *shape) or RaggedArray}.
    The caller may reuse the memory of a batch for the next batch. attributes: facts about the rows. For uint8 images
    without the attribute `mean`, the mean and standard deviation of each channel are added.
    """
    n_came = 0
    statistics = ImageStatistics({} if "mean" in attributes else fields, n_rows)
    filters = {} if compression == "none" else {"compression": compression}
    widest = max(fields.values(), key=lambda field: field.row_bytes)
    columns: dict[str, Column | RaggedColumn] = {}
    # Without a cache, HDF5 writes each block at once, and a full disk raises an error here rather than at close().
    # The file needs no lock, since nobody else knows its name, and some file systems have no locks.
    file = h5py.File(path, "w", libver="latest", rdcc_nbytes=0, locking=False)
    try:
        write_attributes(file, attributes)  # first: an attribute that HDF5 refuses should not cost a conversion
        for name, field in fields.items():
            if field.is_ragged:
                columns[name] = RaggedColumn(file.create_group(name), field, n_rows, filters)
            else:
                block_rows = choose_block_rows(n_rows, field, widest)
                columns[name] = Column(file, name, field, block_rows=block_rows, filters=filters, n_rows=n_rows)
        for rows in batches:
            statistics.add(rows, n_came)
            for name, column in columns.items():
                column.append(rows[name])
            n_came += len(next(iter(rows.values())))
        for column in columns.values():
            column.finish()
        write_attributes(file, {**statistics.attributes(), "fastgpu_format": 1})
        file.close()
    finally:
        with suppress(OSError, RuntimeError):  # a full disk raises a second error
            file.close()
    return n_came


def write_attributes(group: h5py.Group, attributes: Mapping[str, Any]) -> None:
    """Write attributes. Text gets a fixed length: HDF5 keeps variable lengths in a heap, where damage goes unseen."""
    for name, value in attributes.items():
        array = np.asarray(value)
        if array.dtype.kind in "UO":
            text = np.char.encode(array.astype(str), "utf-8", "surrogateescape")
            array = text.astype(h5py.string_dtype("utf-8", max(1, text.itemsize)))
        group.attrs[name] = array


def write_origins(file: h5py.File, origins: Sequence[str]) -> None:
    """Write the origin of each row, if it is known, as texts of a fixed length, compressed to a few bytes each.

    HDF5 keeps texts of variable length in a heap, which no filter compresses, with 32 bytes a row beside the text.
    """
    if not any(origins):
        return
    kind = h5py.string_dtype("utf-8", max(len(_encode_origin(each)) for each in origins))
    how = {"chunks": (min(len(origins), ORIGINS_PER_CHUNK),), "compression": 1, "fletcher32": True}
    data = file.create_dataset(ORIGINS, (len(origins),), kind, **how)
    for start in range(0, len(origins), ORIGINS_PER_CHUNK):
        stop = start + ORIGINS_PER_CHUNK
        data[start:stop] = np.array([_encode_origin(each) for each in origins[start:stop]], kind)


def _encode_origin(text: str) -> bytes:
    """An origin in UTF-8, with escapes for characters that cannot be printed."""
    # Few names need escapes, and looking at each character is slow.
    return (text if text.isprintable() else text.translate(ESCAPES)).encode()


def choose_block_rows(n_rows: int, field: Field, widest: Field) -> int:
    """Rows of a block: about 2 MiB of the widest field, or of a column that is kept in memory; fewer in small files."""
    if field is not widest and n_rows * field.row_bytes <= COLUMN_BYTES:
        return max(1, min(n_rows, BLOCK_BYTES // max(1, field.row_bytes)))
    return max(1, min(BLOCK_BYTES // max(1, widest.row_bytes), n_rows // MIN_BLOCKS))


class Column:
    """Fills one dataset, and computes the SHA-256 of each block. n_rows: maximum number of rows; 0: unknown."""

    def __init__(
        self, group: h5py.Group, name: str, field: Field, *, block_rows: int, filters: dict[str, Any], n_rows: int = 0
    ):
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if n_rows and not filters:  # allocated now, blocks are contiguous in the file, and read fastest
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        shape, chunks = (n_rows, *field.shape), (block_rows, *field.shape)
        max_shape = (n_rows or None, *field.shape)
        shuffle = bool(filters) and field.dtype.itemsize > 1  # the shuffle of bytes helps numbers of several bytes only
        self._data = group.create_dataset(
            name, shape, field.dtype, maxshape=max_shape, chunks=chunks, shuffle=shuffle, dcpl=plan, **filters
        )
        self._block = np.empty(self._data.chunks, field.dtype)
        self._n_waiting = 0  # rows of `_block` that are still to be written
        self._checksums: list[bytes] = []

    def append(self, rows: np.ndarray) -> None:
        """Append rows, (n, *shape). The caller may reuse their memory afterwards."""
        while len(rows):
            part = rows[: len(self._block) - self._n_waiting]
            self._block[self._n_waiting : self._n_waiting + len(part)] = part
            self._n_waiting += len(part)
            rows = rows[len(part) :]
            if self._n_waiting == len(self._block):
                self._write_block()

    def _write_block(self) -> None:
        rows = self._block[: self._n_waiting]
        start = len(self._checksums) * len(self._block)
        if start + len(rows) > len(self._data):
            self._data.resize(start + len(rows), axis=0)
        self._data[start : start + len(rows)] = rows
        self._checksums.append(hashlib.sha256(rows.data).digest())
        self._n_waiting = 0

    def finish(self) -> None:
        """Write the last block, which may be short, and the checksums of all blocks."""
        n_rows = len(self._checksums) * len(self._block) + self._n_waiting
        if self._n_waiting:
            self._write_block()
        self._data.resize(n_rows, axis=0)
        checksums = np.frombuffer(b"".join(self._checksums), np.uint8).reshape(-1, 32)
        name = self._data.name.rpartition("/")[2]
        self._data.parent.create_dataset(f"{CHECKSUMS}/{name}", data=checksums)


class RaggedColumn:
    """Fills a group with two datasets: the values of all ragged rows, and `indptr`, the start of each row."""

    def __init__(self, group: h5py.Group, field: Field, n_rows: int, filters: dict[str, Any]):
        self._group = group
        self._field = field
        self._codecs: set[str] = set()
        self._n_values = 0
        block_bytes = field.row_bytes * max(1, min(BLOCK_BYTES // field.row_bytes, n_rows // MIN_BLOCKS))
        block_values = max(MIN_CHUNK_BYTES, min(RAGGED_BLOCK_BYTES, block_bytes)) // field.dtype.itemsize
        name = "indices" if field.n_items else "values"
        self._values = Column(group, name, field, block_rows=block_values, filters=filters)
        block_rows = min(RAGGED_BLOCK_BYTES // INDPTR.dtype.itemsize, n_rows + 1)
        self._indptr = Column(group, "indptr", INDPTR, block_rows=block_rows, filters=filters)
        self._indptr.append(np.zeros(1, INDPTR.dtype))

    def append(self, rows: RaggedArray) -> None:
        """Append rows. The caller may reuse their memory afterwards."""
        if self._field.codec:
            self._codecs |= {CODECS.get(byte, "other") for byte in np.unique(rows.values[rows.offsets[:-1]]).tolist()}
        start, stop = int(rows.offsets[0]), int(rows.offsets[-1])
        self._values.append(rows.values[start:stop])
        self._indptr.append(self._n_values - start + rows.offsets[1:].astype(INDPTR.dtype))
        self._n_values += stop - start

    def finish(self) -> None:
        """Write the checksums. Item numbers become a CSR matrix in the form of anndata, with all values 1."""
        self._values.finish()
        self._indptr.finish()
        if self._codecs:
            write_attributes(self._group, {"codec": "+".join(sorted(self._codecs))})
        if self._field.n_items:  # never written, `data` takes no space and reads as its fill value
            n_values = (self._n_values,)
            self._group.create_dataset("data", n_values, np.float32, fillvalue=1, maxshape=(None,), chunks=(1 << 16,))
            shape = (len(self._group["indptr"]) - 1, self._field.n_items)
            write_attributes(self._group, {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})


class ImageStatistics:
    """Mean and standard deviation of each channel of the first image field, from rows at even distances."""

    def __init__(self, fields: Mapping[str, Field], n_rows: int):
        is_pixels = {name: field.dtype == np.uint8 and len(field.shape) == 3 for name, field in fields.items()}
        of_images = (name for name, field in fields.items() if field.codec or (is_pixels[name] and not field.is_ragged))
        self._name = next(of_images, "")
        self._row_step = -(-n_rows // STATISTICS_ROWS)
        self._rng = np.random.default_rng(0)
        self._sums: list[np.ndarray] = []  # (3, C) for each row: number of pixels, their sum, the sum of their squares

    def add(self, rows: Mapping[str, Any], start: int) -> None:
        """Add the sums of some of these rows. start: the number of the first row."""
        images = rows.get(self._name, ())
        for row in range(-start % self._row_step, len(images), self._row_step):
            if isinstance(images, RaggedArray):
                decode = import_module("fastgpu.images.decode")  # a project without images lacks it
                image = decode.EncodedImage(images.values[images.offsets[row] : images.offsets[row + 1]])
                image_CHW = image.decode((0, 0, image.height, image.width), (image.height, image.width))
            else:
                image_CHW = images[row]
            pixels = image_CHW.reshape(len(image_CHW), -1)
            if pixels.shape[1] > STATISTICS_PIXELS:
                # A random pixel of each part of the image: a fixed step could stay in one column.
                borders = np.arange(STATISTICS_PIXELS + 1) * pixels.shape[1] // STATISTICS_PIXELS
                pixels = pixels[:, self._rng.integers(borders[:-1], borders[1:])]
            pixels = pixels.astype(np.float32)
            counts = np.full(len(image_CHW), pixels.shape[1])
            self._sums.append(np.stack([counts, pixels.sum(1), np.einsum("cp,cp->c", pixels, pixels)]))

    def attributes(self) -> dict[str, list[float]]:
        """{"mean": C numbers, "std": C numbers}, or nothing if there are no images."""
        if not self._sums:
            return {}
        counts, totals, squares = np.stack(self._sums).sum(0, dtype=np.float64)
        mean = totals / counts
        std = np.sqrt(np.maximum(squares / counts - mean**2, 0))
        return {"mean": mean.round(4).tolist(), "std": np.maximum(std, 1e-3).round(4).tolist()}
