"""HDF5 files as a reader meets them: how their rows lie, what would make them faster, which blocks are damaged."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import h5py
import numpy as np

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import Source
from fastgpu.storage import codecs
from fastgpu.storage.layout import BLOCK_BYTES, DIGESTS, Layout, ReadOptions, RowRange

SMALL_BYTES, LARGE_BYTES = BLOCK_BYTES // 16, BLOCK_BYTES * 16
REPACK = "`python convert.py repack` mends it"


class Column(NamedTuple):
    """One dataset of rows."""

    group: str
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None
    """Its shape; None: the rows lie in one piece."""
    filters: tuple[str, ...]
    stored_bytes: int
    has_digests: bool

    @property
    def path(self) -> str:
        return f"{self.group.rstrip('/')}/{self.name}"

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Of a chunk, before compression."""
        return int(np.prod(self.chunk)) * self.dtype.itemsize if self.chunk else self.nbytes

    def __str__(self) -> str:
        blocks = "in one piece"
        if self.chunk:
            count = int(np.prod([-(-n // k) for n, k in zip(self.shape, self.chunk, strict=True)]))
            blocks = f"{count:,} blocks {self.chunk} of {self.block_bytes / 2**20:.2f} MiB"
        kind = " + ".join(self.filters) or "plain"
        checked = "SHA-256" if self.has_digests else "no checksums"
        return f"{self.path}  {self.dtype} {self.shape}  {self.stored_bytes / 1e6:,.1f} MB  {blocks}, {kind}, {checked}"


def columns_of(path: str) -> list[Column]:
    """The datasets of numbers in `file.h5` or below `file.h5::/group`. Raises UserError if it cannot be read."""
    with _opened(path) as group:
        return [_column(data) for data in _datasets(group)]


def fields_of(columns: list[Column]) -> dict[str, dict[str, str]]:
    """{group: {field: dataset}} for `store.open_store`; ragged rows are one field of the group above theirs."""
    ragged = {column.group for column in columns if column.name == "indptr"}
    found: dict[str, dict[str, str]] = {}
    for column in columns:
        if column.group not in ragged:
            found.setdefault(column.group, {})[column.name] = column.name
        elif column.name != "indptr":
            above, _, name = column.group.rpartition("/")
            suffix = {"data": "_values"}.get(column.name, "")
            source = f"{name}/{column.name}" if suffix else name
            found.setdefault(above or "/", {})[name + suffix] = source
    return found


def advise(columns: list[Column]) -> list[str]:
    """What to change in the largest dataset of each group.

    The figures are warm rates on 2 cores of an AMD EPYC, against blocks of 2 MiB (template's bench/layouts.py).
    """
    groups: dict[str, Column] = {}
    for column in sorted(columns, key=lambda column: column.nbytes):
        groups[column.group] = column
    return [f"{column.path}: {line}" for column in groups.values() for line in _advice(column)]


def _advice(column: Column) -> Iterator[str]:
    if column.chunk and column.chunk[1:] != column.shape[1:]:
        yield f"chunks split rows: the HDF5 library must join them, one thread at a time, 8 to 13x slower; {REPACK}"
    elif column.chunk and column.block_bytes < SMALL_BYTES and column.nbytes > LARGE_BYTES:
        size = f"{column.block_bytes / 1024:.1f} KiB"
        yield f"chunks of {column.chunk[0]} rows, {size}: a call each, 5x slower with 114 KiB, 24x with 3 KiB; {REPACK}"
    elif column.chunk and column.block_bytes > LARGE_BYTES:
        yield f"blocks of {column.block_bytes / 2**20:.0f} MiB: few fit a pool, so it mixes little; {REPACK}"
    if column.filters:
        cost = {"gzip": "21 to 23x slower", "zstd": "3 to 5x slower"}.get(column.filters[-1], "costs CPU time")
        yield f"{' + '.join(column.filters)}: decoded anew at each epoch, {cost}; {REPACK}, if the disk has room"
    if column.dtype.kind == "f" and len(column.shape) == 4:
        yield f"images as {column.dtype}: uint8 is {column.dtype.itemsize}x fewer bytes; the model takes it to float"
    if not column.has_digests:
        yield "no checksums: damage would go unnoticed; `python convert.py repack` writes them"


def damaged(path: str, threads: int, tick: Callable[[int], object]) -> list[str]:
    """A line for each block that cannot be read, or whose SHA-256 is not the recorded one.

    Blocks without checksums are read and decoded all the same. tick: called with the bytes of each block when done.
    """
    with _opened(path) as group, ThreadPoolExecutor(threads) as pool:
        checks = []
        for data in _datasets(group):
            column = _column(data)
            layout = Layout(f"{path}: {column.path}", data, ReadOptions(verify=column.has_digests))
            for start in range(0, len(data), layout.chunk_rows):
                rows = min(layout.chunk_rows, len(data) - start)
                checks.append(pool.submit(_check, layout, start, rows, tick))
        return [line for check in checks if (line := check.result())]


def _check(layout: Layout, start: int, rows: int, tick: Callable[[int], object]) -> str:
    out = np.empty((rows, *layout.field.shape), layout.field.dtype)
    tick(out.nbytes)
    try:
        layout.read([RowRange(start, np.arange(rows))], out)
    except (RankError, OSError) as error:
        return f"rows {start:,} to {start + rows - 1:,}: {error}"
    return ""


@contextmanager
def _opened(path: str) -> Iterator[h5py.Group]:
    file, _, name = path.partition("::")
    try:
        with h5py.File(file, "r") as opened:
            if not isinstance(group := opened.get(name or "/"), h5py.Group):
                raise UserError(f"{file} has no group {name}; it has {', '.join(opened)}")
            yield group
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def _datasets(group: h5py.Group) -> list[h5py.Dataset]:
    """Those of numbers, with rows, at any depth; links are not followed."""
    found: list[h5py.Dataset] = []

    def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
        is_rows = isinstance(item, h5py.Dataset) and item.ndim and len(item) and item.dtype.kind in "buif"
        if is_rows and DIGESTS not in name.split("/") and not _are_implied(item):
            found.append(item)

    group.visititems(note)
    return found


def _are_implied(data: h5py.Dataset) -> bool:
    """Whether they are the ones of a CSR matrix, which nobody wrote."""
    is_data = data.name.endswith("/data") and "indptr" in data.parent
    return bool(is_data and data.chunks and data.fillvalue == 1 and not data.id.get_num_chunks())


def _column(data: h5py.Dataset) -> Column:
    group, _, name = data.name.rpartition("/")
    filters = codecs.filters_of(data.id.get_create_plist())
    names = tuple(codecs.NAMES.get(code, f"filter {code}") for code, _ in filters)
    has_digests = f"{DIGESTS}/{name}" in data.parent
    size = data.id.get_storage_size()
    return Column(group or "/", name, data.dtype, data.shape, data.chunks, names, size, has_digests)


def class_order_warning(source: Source, pool_rows: int) -> str:
    """A warning if the file is sorted by class and pools of `pool_rows` rows cannot mix it; otherwise empty.

    The file counts as sorted if neighbouring rows share their label far more often than by chance. The labels of a
    batch then scatter more than those of a random sample. Blocks of single rows are always mixed.
    """
    is_mixed = pool_rows >= len(source) or source.block_rows.max() == 1
    if is_mixed or "labels" not in source.fields:
        return ""
    try:
        labels = source.column("labels")
    except KeyError:  # too many to be kept in memory
        return ""
    if labels.ndim != 1 or labels.dtype.kind not in "bui":
        return ""
    sample = np.random.default_rng(0).integers(0, len(labels) - 1, 100_000)
    _, counts = np.unique(labels[sample], return_counts=True)
    by_chance = float(np.square(counts / len(sample)).sum())
    shared = float((labels[sample] == labels[sample + 1]).mean())
    if shared <= (1 + by_chance) / 2:
        return ""
    return (
        f"{source.name} is sorted by class: {100 * shared:.0f} % of neighbouring rows share a label, by chance it would "
        f"be {100 * by_chance:.0f} %. Pools of {pool_rows:,} of its {len(source):,} rows cannot mix that: "
        "`python convert.py repack` writes them in random order"
    )
