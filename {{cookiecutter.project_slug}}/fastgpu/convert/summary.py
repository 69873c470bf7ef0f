"""What rows and files hold, as a person reads it: fields, classes, layout; and which blocks of a file are damaged."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import h5py
import numpy as np
from tqdm import tqdm

from fastgpu.convert.reader import Part
from fastgpu.process.launch import RankError
from fastgpu.process.machine import available_cpus
from fastgpu.storage import codecs
from fastgpu.storage.file import OpenFile, split_group
from fastgpu.storage.hdf5 import find, open_file
from fastgpu.storage.layout import DIGESTS, Layout

MAX_CLASSES = 20
"""Classes that are listed."""


class Stored(NamedTuple):
    """One dataset of numbers in a file."""

    path: PurePosixPath
    has_digests: bool
    """Whether each block has a checksum, which `convert.py` alone writes."""
    is_compressed: bool
    text: str
    """How the rows lie in the file."""


def inspect(path: str) -> list[Stored]:
    """The datasets of numbers in `file.h5`, or below the group of `file.h5::/group`. Raises UserError if unreadable."""
    file_path, group = split_group(path)
    with open_file(file_path, file_path) as file:
        return [_describe(data) for data in _datasets(find(file, group, h5py.Group, file_path))]


def fields_of(stored: Sequence[Stored]) -> dict[str, dict[str, str]]:
    """{group: {field: dataset}} as `open_store` takes it. A ragged field belongs to the group that holds its group."""
    ragged_groups = {each.path.parent for each in stored if each.path.name == "indptr"}
    fields: dict[str, dict[str, str]] = {}
    for each in stored:
        group, name = each.path.parent, each.path.name
        if group not in ragged_groups:
            fields.setdefault(str(group), {})[name] = name
        elif name == "data":
            fields.setdefault(str(group.parent), {})[f"{group.name}_values"] = f"{group.name}/data"
        elif name != "indptr":
            fields.setdefault(str(group.parent), {})[group.name] = group.name
    return fields


def damaged(path: str) -> list[str]:
    """A line for each block that cannot be read, or that has another SHA-256 than the recorded one.

    Blocks without checksums are read and decoded all the same.
    """

    def check(layout: Layout, start: int, n_rows: int) -> str:
        out = np.empty((n_rows, *layout.field.shape), layout.field.dtype)
        try:
            layout.read([(start, range(n_rows))], out)
            block = start // layout.chunk_rows
            if layout.digests is not None and sha256(out.data).digest() != layout.digests[block].tobytes():
                raise RankError(f"{layout.name}: block {block} is damaged: its SHA-256 is another one")
        except (RankError, OSError) as error:
            problem = str(error).partition(";")[0]  # without the cure, which is that of a run
            return f"rows {start:,} to {start + n_rows - 1:,}: {problem}"
        return ""

    file_path, group = split_group(path)
    with open_file(file_path, file_path) as file, ThreadPoolExecutor(available_cpus()) as pool:
        checks = []
        bytes_of_file = OpenFile(file_path)
        for data in _datasets(find(file, group, h5py.Group, file_path)):
            layout = Layout(f"{path}: {data.name}", data, bytes_of_file)
            for start in range(0, len(data), layout.chunk_rows):
                checks.append(pool.submit(check, layout, start, min(layout.chunk_rows, len(data) - start)))
        return [line for each in tqdm(checks, unit="blocks", disable=None) if (line := each.result())]


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


def _has_digests(data: h5py.Dataset) -> bool:
    return f"{DIGESTS}/{data.name.rpartition('/')[2]}" in data.parent


def _describe(data: h5py.Dataset) -> Stored:
    chunk = data.chunks or data.shape
    block_bytes = prod(chunk) * data.dtype.itemsize
    filters = " + ".join(each.name for each in codecs.filters_of(data))
    has_digests = _has_digests(data)
    n_blocks = prod(-(-n // k) for n, k in zip(data.shape, chunk, strict=True))
    blocks = f"{n_blocks:,} blocks {chunk} of {block_bytes / 2**20:.2f} MiB"
    size = f"{data.id.get_storage_size() / 1e6:,.1f} MB"
    checksums = "SHA-256" if has_digests else "no checksums"
    text = f"{data.name}  {data.dtype} {data.shape}  {size}  {blocks}, {filters or 'plain'}, {checksums}"
    return Stored(PurePosixPath(data.name), has_digests, bool(filters), text)


# ---------------------------------------------------------------------------------------------- rows


def describe_rows(parts: Mapping[str, Part], order: str = "") -> Iterator[str]:
    """Lines of text about the rows of each split, {name: rows}. The name is empty if there is one split.

    order: what is known about the order of the rows.
    """
    reader = next(iter(parts.values())).reader
    label_lines = list(_describe_labels(parts))
    yield "  rows     " + ", ".join(f"{part.n_rows:,} {name}".strip() for name, part in parts.items())
    for name, field in reader.fields.items():
        kind = f": {label_lines.pop(0)}" if name == "labels" and label_lines else ""
        yield f"  {name:<8} {field}{kind}"
    if preprocessing := reader.attributes.get("preprocessing"):
        values = json.loads(preprocessing)
        yield f"  decoded  to {'x'.join(map(str, values['size']))} pixels, --resize {values['resize']}"
    yield from describe_statistics(reader.attributes)
    if order := order or reader.attributes.get("row_order", ""):
        yield f"  order    {order}"
    yield from label_lines


def describe_statistics(attributes: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text: mean and standard deviation of each channel, and the classes of masks, if they are known."""
    if "mean" in attributes and "std" in attributes:
        mean, std = (np.array2string(np.ravel(attributes[key]), precision=1, threshold=8) for key in ("mean", "std"))
        yield f"  mean     {mean}, std {std} of the channels"
    if "n_classes" in attributes:
        yield f"  classes  {attributes['n_classes']} in masks, besides 255 (ignored)"


def _describe_labels(parts: Mapping[str, Part]) -> Iterator[str]:
    """First the kind of the labels, then a table: how many rows of each split have each of them. Nothing if there are
    no labels in memory."""
    labels = [part.labels for part in parts.values() if part.labels is not None and part.labels.ndim <= 2]
    if len(labels) < len(parts):
        return
    values = np.concatenate(labels)
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        others = f", and {values.size - finite.size:,} that are NaN or infinite" if finite.size < values.size else ""
        yield f"targets, from {finite.min(initial=np.inf):g} to {finite.max(initial=-np.inf):g}{others}"
        return
    names = [str(name) for name in next(iter(parts.values())).reader.attributes.get("class_names", [])]
    if values.ndim > 1:
        yield f"{values.shape[1]} attributes"
        numbers = np.arange(values.shape[1])
        counts = [part.astype(bool).sum(0) for part in labels]
    else:
        numbers = np.unique(values)
        counts = [np.bincount(np.searchsorted(numbers, part), minlength=len(numbers)) for part in labels]
        n_classes = max(len(names), int(numbers[-1]) + 1)
        n_empty = n_classes - len(numbers)
        yield f"{n_classes:,} classes" + (f", {n_empty:,} of them without rows" if n_empty else "")
    heads = [names[number] if 0 <= number < len(names) else str(number) for number in numbers[:MAX_CLASSES].tolist()]
    width = max(map(len, ("label", *heads)))
    yield "  " + " ".join([f"{'label':<{width}}", *(f"{name or 'rows':>9}" for name in parts)])
    for place, head in enumerate(heads):
        yield "  " + " ".join([f"{head:<{width}}", *(f"{count[place]:>9,}" for count in counts)])
    if len(numbers) > MAX_CLASSES:
        yield f"  and {len(numbers) - MAX_CLASSES:,} more"
