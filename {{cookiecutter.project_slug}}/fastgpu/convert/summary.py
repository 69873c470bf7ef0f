"""What rows and files hold, as a person reads it: fields, classes, layout; and which blocks of a file are damaged."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import RankError
from fastgpu.rows.contract import Dataset
from fastgpu.storage import codecs
from fastgpu.storage.file import split_group
from fastgpu.storage.hdf5 import open_file, open_group
from fastgpu.storage.layout import BLOCK_BYTES, DIGESTS, Layout, ReadOptions

SMALL_BYTES = BLOCK_BYTES // 16
"""Chunks below this size are advised against, ..."""
LARGE_BYTES = BLOCK_BYTES * 16
"""... and so are chunks above this size."""
REPACK = "`python convert.py repack` mends it"


class DatasetInfo(NamedTuple):
    """How the rows of one HDF5 dataset lie in their file."""

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None
    """Shape of a chunk. None: the rows lie in one piece."""
    filters: tuple[str, ...]
    """Names of the filters, in the order in which they were applied."""
    stored_bytes: int
    has_digests: bool

    @property
    def group(self) -> str:
        return self.path.rpartition("/")[0] or "/"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows before compression."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a chunk before compression; of all rows if they lie in one piece."""
        return prod(self.chunk or self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        blocks = "in one piece"
        if self.chunk:
            n_blocks = prod(-(-n // k) for n, k in zip(self.shape, self.chunk, strict=True))
            blocks = f"{n_blocks:,} blocks {self.chunk} of {self.block_bytes / 2**20:.2f} MiB"
        filters = " + ".join(self.filters) or "plain"
        checksums = "SHA-256" if self.has_digests else "no checksums"
        size = f"{self.stored_bytes / 1e6:,.1f} MB"
        return f"{self.path}  {self.dtype} {self.shape}  {size}  {blocks}, {filters}, {checksums}"


def columns_of(path: str) -> list[DatasetInfo]:
    """The datasets of numbers in `file.h5`, or below the group of `file.h5::/group`. Raises UserError if unreadable."""
    with _open(path) as group:
        return [_describe(data) for data in _datasets(group)]


def fields_of(columns: list[DatasetInfo]) -> dict[str, dict[str, str]]:
    """{group: {field: dataset}} as `open_store` takes it. A ragged field belongs to the group that holds its group."""
    ragged_groups = {column.group for column in columns if column.name == "indptr"}
    fields: dict[str, dict[str, str]] = {}
    for column in columns:
        parent, _, field = column.group.rpartition("/")
        if column.group not in ragged_groups:
            fields.setdefault(column.group, {})[column.name] = column.name
        elif column.name == "data":
            fields.setdefault(parent or "/", {})[f"{field}_values"] = f"{field}/data"
        elif column.name != "indptr":
            fields.setdefault(parent or "/", {})[field] = field
    return fields


def advise(columns: list[DatasetInfo]) -> list[str]:
    """Lines of advice on the largest dataset of each group.

    The figures are warm rates on 2 cores of an AMD EPYC, compared with blocks of 2 MiB (the template's
    bench/layouts.py).
    """
    largest = {column.group: column for column in sorted(columns, key=lambda column: column.nbytes)}
    return [f"{column.path}: {line}" for column in largest.values() for line in _advice(column)]


def _advice(column: DatasetInfo) -> Iterator[str]:
    if column.chunk and column.chunk[1:] != column.shape[1:]:
        yield f"chunks split rows: the HDF5 library must join them, one thread at a time, 8 to 13x slower; {REPACK}"
    elif column.chunk and column.block_bytes < SMALL_BYTES and column.nbytes > LARGE_BYTES:
        chunks = f"chunks of {column.chunk[0]} rows, {column.block_bytes / 1024:.1f} KiB"
        yield f"{chunks}: each takes a call, 5x slower with 114 KiB, 24x with 3 KiB; {REPACK}"
    elif column.chunk and column.block_bytes > LARGE_BYTES:
        yield f"blocks of {column.block_bytes / 2**20:.0f} MiB: few fit a pool, so it mixes little; {REPACK}"
    if column.filters:
        cost = {"gzip": "21 to 23x slower", "zstd": "3 to 5x slower"}.get(column.filters[-1], "costs CPU time")
        yield f"{' + '.join(column.filters)}: decoded anew in each epoch, {cost}; {REPACK}, if the disk has room"
    if column.dtype.kind == "f" and len(column.shape) == 4:
        yield f"images as {column.dtype}: uint8 is {column.dtype.itemsize}x fewer bytes; the model takes it to float"
    if not column.has_digests:
        yield "no checksums: damage would go unnoticed; `python convert.py repack` writes them"


def damaged(path: str, threads: int, tick: Callable[[int], object]) -> list[str]:
    """A line for each block that cannot be read, or that has another SHA-256 than the recorded one.

    Blocks without checksums are read and decoded all the same. tick: called with the bytes of each block that is read.
    """
    with _open(path) as group, ThreadPoolExecutor(threads) as pool:
        checks = []
        for data in _datasets(group):
            column = _describe(data)
            layout = Layout(f"{path}: {column.path}", data, ReadOptions(verify=column.has_digests))
            for start in range(0, len(data), layout.chunk_rows):
                n_rows = min(layout.chunk_rows, len(data) - start)
                checks.append(pool.submit(_check, layout, start, n_rows, tick))
        return [line for check in checks if (line := check.result())]


def _check(layout: Layout, start: int, n_rows: int, tick: Callable[[int], object]) -> str:
    """Read rows. Returns a line if they are damaged, otherwise an empty string."""
    out = np.empty((n_rows, *layout.field.shape), layout.field.dtype)
    tick(out.nbytes)
    try:
        layout.read([(start, np.arange(n_rows))], out)
    except (RankError, OSError) as error:
        problem = str(error).partition(";")[0]  # without the cure, which is that of a run
        return f"rows {start:,} to {start + n_rows - 1:,}: {problem}"
    return ""


@contextmanager
def _open(path: str) -> Iterator[h5py.Group]:
    file_path, name = split_group(path)
    with open_file(file_path, file_path) as file:
        yield open_group(file, name, file_path)


def _datasets(group: h5py.Group) -> list[h5py.Dataset]:
    """Datasets of numbers with at least one row, at any depth. Links are not followed."""
    datasets: list[h5py.Dataset] = []

    def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
        has_rows = isinstance(item, h5py.Dataset) and item.ndim and len(item) and item.dtype.kind in "buif"
        if not has_rows or not isinstance(name, str) or DIGESTS in name.split("/"):  # bytes: a name that is not UTF-8
            return
        is_csr_data = item.name.endswith("/data") and "indptr" in item.parent
        if is_csr_data and item.chunks and item.fillvalue == 1 and not item.id.get_num_chunks():
            return  # the values of a CSR matrix of ones: a fill value, and no bytes in the file
        datasets.append(item)

    group.visititems(note)
    return datasets


def _describe(data: h5py.Dataset) -> DatasetInfo:
    filters = codecs.filters_of(data.id.get_create_plist())
    names = tuple(codecs.name_of([applied]) for applied in filters)
    has_digests = f"{DIGESTS}/{data.name.rpartition('/')[2]}" in data.parent
    return DatasetInfo(data.name, data.dtype, data.shape, data.chunks, names, data.id.get_storage_size(), has_digests)


MAX_CLASSES = 20
"""Classes that are listed."""
MAX_VALUES = 1000
"""Different labels that are taken for classes if there are no class names."""


def describe_rows(parts: Mapping[str, Dataset], order: str = "") -> Iterator[str]:
    """Lines of text about the rows of each split, {name: rows}. The name is empty if there is one split.

    order: what is known about the order of the rows.
    """
    first = next(iter(parts.values()))
    label_lines = list(_describe_labels(parts))
    yield "  rows     " + ", ".join(f"{len(source):,} {name}".strip() for name, source in parts.items())
    for name, field in first.fields.items():
        kind = f": {label_lines.pop(0)}" if name == "labels" and label_lines else ""
        yield f"  {name:<8} {field}{kind}"
    if preprocessing := first.attributes.get("preprocessing"):
        values = json.loads(preprocessing)
        yield f"  decoded  to {'x'.join(map(str, values['size']))} pixels, --resize {values['resize']}"
    yield from describe_statistics(first.attributes)
    if order := order or first.attributes.get("row_order", ""):
        yield f"  order    {order}"
    yield from label_lines


def describe_statistics(attributes: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text: mean and standard deviation of each channel, and the classes of masks, if they are known."""
    if "mean" in attributes and "std" in attributes:
        mean, std = (np.array2string(np.ravel(attributes[key]), precision=1, threshold=8) for key in ("mean", "std"))
        yield f"  mean     {mean}, std {std} of the channels"
    if "n_classes" in attributes:
        yield f"  classes  {attributes['n_classes']} in masks, besides 255 (ignored)"


def _describe_labels(parts: Mapping[str, Dataset]) -> Iterator[str]:
    """First the kind of the labels, then a table: how many rows of each split have each of them. Nothing if there are
    no labels in memory."""
    known = [source.in_memory("labels") for source in parts.values()]
    labels = [values[:] for values in known if values is not None and len(values.shape) <= 2]
    if len(labels) < len(parts):
        return
    names = [str(name) for name in next(iter(parts.values())).attributes.get("class_names", [])]
    values = np.concatenate(labels)
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        n_others = values.size - finite.size
        others = f", and {n_others:,} that are NaN or infinite" if n_others else ""
        yield f"targets, from {finite.min(initial=np.inf):g} to {finite.max(initial=-np.inf):g}{others}"
        return
    numbers = np.unique(values)
    if values.ndim > 1:
        yield f"{values.shape[1]} attributes"
        numbers = np.arange(values.shape[1])
        counts = [part.astype(bool).sum(0) for part in labels]
    elif not names and len(numbers) > MAX_VALUES:
        yield f"{len(numbers):,} different values, from {numbers[0]} to {numbers[-1]}"
        return
    else:
        n_classes = max(len(names), int(numbers[-1]) + 1)
        n_empty = n_classes - len(numbers)
        kind = f"{n_classes:,} classes" if names or not n_empty else f"used as classes 0 to {n_classes - 1}"
        yield f"{kind}, {n_empty:,} of them without rows" if n_empty else kind
        counts = [np.bincount(np.searchsorted(numbers, part), minlength=len(numbers)) for part in labels]
    heads = [names[number] if 0 <= number < len(names) else str(number) for number in numbers[:MAX_CLASSES].tolist()]
    width = max(map(len, ("label", *heads)))
    yield "  " + " ".join([f"{'label':<{width}}", *(f"{name or 'rows':>9}" for name in parts)])
    for place, head in enumerate(heads):
        yield "  " + " ".join([f"{head:<{width}}", *(f"{count[place]:>9,}" for count in counts)])
    if len(numbers) > MAX_CLASSES:
        yield f"  and {len(numbers) - MAX_CLASSES:,} more"
