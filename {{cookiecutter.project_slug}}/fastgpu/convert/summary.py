"""Summaries of rows and files for a person: fields, classes, layouts, and damaged blocks."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from pathlib import PurePosixPath
from typing import NamedTuple

import h5py
import numpy as np
from tqdm import tqdm

from fastgpu.feed import sizes
from fastgpu.process.launch import UserError, list_first
from fastgpu.process.machine import MIB, available_cpus, format_bytes
from fastgpu.rows.classes import MAX_UNUSED_CLASSES, classes_of
from fastgpu.rows.contract import Dataset
from fastgpu.storage.chunks import CHECKSUMS
from fastgpu.storage.file import OpenFile, split_group
from fastgpu.storage.filters import filters_of
from fastgpu.storage.hdf5 import ORIGINS, dtype_of, find, look_up, open_file
from fastgpu.storage.layout import Layout, open_layout
from fastgpu.storage.store import open_store


class Stored(NamedTuple):
    """A dataset in a file."""

    path: PurePosixPath
    text: str
    """Its layout, or the reason why it is left out."""
    has_checksums: bool = False
    """Whether its blocks have checksums."""
    is_left_out: bool = False
    kind: str = ""
    """Its type and shape."""

    def holds(self, place: PurePosixPath) -> bool:
        """Whether the dataset holds the values of the field at this place in the file."""
        return self.path == place or (self.path.parent == place and self.path.name in ("indices", "values"))


class Contents(NamedTuple):
    """The contents of an open file, or of one of its groups; see `inspect`."""

    file: OpenFile
    datasets: dict[str, h5py.Dataset]
    """{path: dataset of numbers with rows}"""
    origins: list[h5py.Dataset]
    """Origins of rows."""
    left_out: dict[str, str]
    """{path of anything else: the reason why it is not read}"""


@contextmanager
def _open(path: str) -> Iterator[Contents]:
    file_path, group = split_group(path)
    with open_file(file_path, file_path) as (file, h5):
        found = Contents(file, {}, [], {})
        groups = [find(h5, group, h5py.Group, file_path)]
        seen = {*groups}
        for parent in groups:  # the list grows while it is read
            for name in parent:
                place = f"{parent.name.rstrip('/')}/{name}"
                try:
                    item = look_up(parent, name, place) if isinstance(name, str) else None
                except UserError as error:
                    found.left_out[place] = str(error).partition(": ")[2]
                    continue
                if isinstance(item, h5py.Group) and name != CHECKSUMS and item not in seen:
                    seen.add(item)
                    groups.append(item)
                elif isinstance(item, h5py.Dataset) and name == ORIGINS:
                    found.origins.append(item)
                elif isinstance(item, h5py.Dataset) and item.ndim and len(item) and dtype_of(item).kind in "buif":
                    # In a CSR matrix of ones, the values are a fill value and take no bytes in the file.
                    is_of_ones = name == "data" and "indptr" in parent and item.fillvalue == 1
                    if not is_of_ones or item.id.get_num_chunks():
                        found.datasets[place] = item
                elif isinstance(item, h5py.Dataset):
                    found.left_out[place] = f"it is {dtype_of(item)} {item.shape}, no rows of numbers up to 64 bits"
                elif item is None:
                    found.left_out[place] = "its name is no UTF-8, or it is a link that leads to nothing"
        yield found


def inspect(path: str) -> list[Stored]:
    """The datasets in `file.h5`, or below the group of `file.h5::/group`. Raises UserError if the file is unreadable.

    A dataset is marked as left out if it holds no rows of numbers, or is stored in another file.
    """
    with _open(path) as found:
        stored = [
            Stored(PurePosixPath(place), f"{place} is left out: {why}", is_left_out=True)
            for place, why in found.left_out.items()
        ]
        for place, data in found.datasets.items():
            has_checksums = look_up(data.parent, f"{CHECKSUMS}/{data.name.rpartition('/')[2]}", place) is not None
            chunk = data.chunks or data.shape
            filters = " + ".join(name for _, _, name in filters_of(data)) or "plain"
            n_bytes = prod(chunk) * data.dtype.itemsize
            size = format_bytes(n_bytes) if n_bytes >= MIB else f"{n_bytes / 1024:.1f} KiB"
            checksums = "SHA-256" if has_checksums else "no checksums"
            text = f"blocks {chunk} of {size}, {filters}, {checksums}"
            kind = f"{data.dtype} {data.shape}"
            stored.append(Stored(PurePosixPath(place), text, has_checksums, kind=kind))
    return sorted(stored)


def fields_of(stored: Sequence[Stored]) -> dict[str, dict[str, str]]:
    """{group: {field: dataset}} for `open_store`. A ragged field is itself a group, and belongs to the group above."""
    stored = [each for each in stored if not each.is_left_out]
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
    """A line for each block that cannot be read, or does not match its checksum, if it has one.

    Every 64th block is also compared with the values that the HDF5 library reads.
    """

    def check(layout: Layout, block: int) -> str:
        start = block * layout.chunk_rows
        n_rows = min(layout.chunk_rows, len(layout) - start)
        out = np.empty((n_rows, *layout.field.shape), layout.field.dtype)
        try:
            layout.read([(start, range(n_rows))], out)
            if layout.checksums is not None and sha256(out.data).digest() != layout.checksums[block].tobytes():
                raise UserError(f"{layout.name}: block {block} is damaged: checksum mismatch")
            if block % 64 == 0 and Layout.read_chunk(layout, block).astype(out.dtype).tobytes() != out.tobytes():
                raise UserError(f"{layout.name}: block {block} has other values than h5py reads")
        except (UserError, OSError) as error:
            reason = str(error).partition(";")[0]  # without the cure of a run
            return f"rows {start:,} to {start + n_rows - 1:,}: {reason}"
        return ""

    with _open(path) as found, ThreadPoolExecutor(available_cpus()) as pool:
        layouts, damages = [], []
        for place, data in found.datasets.items():
            try:
                layouts.append(open_layout(f"{path}: {place}", data, found.file))
            except UserError as error:
                damages.append(str(error))
        for data in found.origins:
            try:
                for chunk in data.iter_chunks() if data.chunks else [()]:
                    data[chunk]
            except OSError as error:
                damages.append(f"{path}: {data.name} cannot be read ({error})")
        blocks = [(each, number) for each in layouts for number in range(-(-len(each) // each.chunk_rows))]
        lines = tqdm(pool.map(lambda block: check(*block), blocks), total=len(blocks), unit="blocks", disable=None)
        return damages + [line for line in lines if line]


def check_rows(path: str) -> Iterator[str]:
    """A line for each fault of the labels in a file or group: wrong values, and an order that pools cannot mix."""
    for group, fields in sorted(fields_of(inspect(path)).items()):
        try:
            source = open_store("FILE", f"{path.partition('::')[0]}::{group}", fields)
            labels = source.stored_column("labels")
        except UserError:  # they are damaged, or cannot be trained on
            continue
        if labels is not None:
            yield from (f"{group.rstrip('/')}/labels: {fault}" for fault in _faults_of_labels(labels, source))


def _faults_of_labels(labels: np.ndarray, source: Dataset) -> Iterator[str]:
    """Faults of labels, (rows,) or (rows, K)."""
    is_wrong, allowed = np.zeros(1, bool), ""
    if labels.dtype.kind == "f":
        is_wrong, allowed = ~np.isfinite(labels), "finite numbers"
    elif labels.ndim == 2:
        is_wrong, allowed = (labels < 0) | (labels > 1), "0 and 1, for attributes"
    elif labels.ndim == 1:
        try:
            classes = classes_of(source)
        except UserError as error:
            yield str(error)
            return
        n_classes = len(classes.get("class_names", ())) or classes.get("n_classes") or int(labels.max()) + 1
        is_wrong, allowed = (labels < 0) | (labels >= n_classes), f"0 to {n_classes - 1:,}, for classes"
        if not classes and n_classes > MAX_UNUSED_CLASSES + (n_used := len(np.unique(labels))):
            cure = "if they are ids, number them: np.unique(labels, return_inverse=True)[1] over all files at once"
            yield f"numbers up to {n_classes - 1:,}, but only {n_used:,} of them occur; {cure}"
        # A single pool, if it holds all rows, mixes them.
        if len(labels) > 1 and len(source) * source.row_bytes > sizes.POOL_BYTES:
            yield from _class_order(labels)
    if len(rows := np.unique(np.nonzero(is_wrong)[0])):
        yield f"{len(rows):,} rows have other values than {allowed}; the first is row {rows[0]:,}"


def _class_order(labels: np.ndarray) -> Iterator[str]:
    """A line if neighbouring rows share their label far more often than by chance."""
    sample = np.random.default_rng(0).integers(0, len(labels) - 1, 100_000)
    shared = float((labels[sample] == labels[sample + 1]).mean())
    by_chance = float((labels[sample] == np.roll(labels[sample], 1)).mean())
    if shared > (1 + by_chance) / 2:
        yield (
            f"sorted by class: {shared:.0%} of neighbouring rows share a label. Pools cannot mix that: `python "
            "convert.py repack` writes the rows in random order"
        )


def describe_rows(parts: Mapping[str, Dataset], layouts: Mapping[str, str] | None = None) -> Iterator[str]:
    """Lines that describe the rows of each split. parts: {name: rows}; the name is empty if there is one split.

    layouts: {field: its layout in the file}.
    """
    source = next(iter(parts.values()))
    yield "  rows     " + ", ".join(f"{len(part):,} {name}".strip() for name, part in parts.items())
    for name, field in source.fields.items():
        yield f"  {name:<8} {', '.join(filter(None, (str(field), (layouts or {}).get(name))))}"
    labels = source.stored_column("labels")
    if labels is not None and labels.ndim <= 2:
        names = list(map(str, source.attributes.get("class_names", ())))
        for name, part in parts.items():
            yield f"  {name:<8} {_describe_labels(part.column('labels'), names)}"
    for name, value in source.attributes.items():
        yield f"  {name}: {' '.join(str(value).split())[:100]}"


def _describe_labels(labels: np.ndarray, names: Sequence[str]) -> str:
    """The number of rows with each class or attribute, or the range of targets. labels: (rows,) or (rows, K)."""
    if labels.dtype.kind == "f":
        finite = labels[np.isfinite(labels)]
        limits = f"{finite.min(initial=np.inf):g} to {finite.max(initial=-np.inf):g}"
        return f"targets from {limits}, {labels.size - finite.size:,} NaN or infinite"
    if labels.ndim > 1:
        kind, numbers, counts = "attributes", np.arange(labels.shape[1]), labels.astype(bool).sum(0)
    else:
        kind, (numbers, counts) = "classes", np.unique(labels, return_counts=True)
    pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
    texts = [f"{names[number] if 0 <= number < len(names) else number} {count:,}" for number, count in pairs]
    return f"{len(numbers):,} of {max(len(names), len(numbers)):,} {kind}: {list_first(texts)}"
