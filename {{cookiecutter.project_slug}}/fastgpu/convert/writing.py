"""Sources -> files: what was understood is shown, rows are read in their final order, written, and counted."""

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import h5py
import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert.reader import SPLITS, Reader
from fastgpu.convert.writer import Compression, write_attributes, write_rows, write_sources
from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import PrefetchLoader
from fastgpu.process.config import Loader
from fastgpu.process.files import flush, new_file
from fastgpu.process.launch import ESCAPES, UserError, list_first, warn
from fastgpu.process.machine import available_cpus, free_host_bytes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.rows.selection import Subset
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BYTES, POOL_BLOCKS = 1 << 30, 512
"""Rows that are shuffled together, whichever is more; but never more than a quarter of the free memory."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, which any size of pool shuffles completely."""


def write_files(
    parts: Mapping[str, Dataset],
    target: Path,
    seed: int | None = 0,
    compression: Compression = "none",
    *,
    replace: bool = False,
    max_broken: float = 0.0,
) -> None:
    """Write each part to a file of its own: x.h5 becomes x-train.h5 for the part `train`, and stays x.h5 for "".

    Files get their names when all are complete. seed: of the random order; None keeps that of the source. max_broken:
    share of the rows, or one row, that is left out if it is broken. Broken rows are listed beside the file. Raises
    UserError if a file is in the way or cannot be written, or more rows are broken; OSError if the disk is full.
    """
    named = {split: target.with_name(f"{target.stem}-{split}{target.suffix}") for split in SPLITS} | {"": target}
    broken = getattr(next(iter(parts.values())), "broken", {})  # of all parts of a split
    reports = {name: Path(f"{named[name]}.skipped.txt") for name in parts}
    broken_list = Path(f"{target}.broken.txt")
    if not replace and (reported := [str(path) for path in reports.values() if os.path.lexists(path)]):
        raise UserError(f"{reported[0]} exists; --force replaces a file")
    with ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = {name: stack.enter_context(new_file(named[name], replace=replace)) for name in parts}
        written = {}
        row_ids: dict[str, list[np.ndarray]] = {name: [] for name in parts}
        n_odd: Counter[str] = Counter()
        for name, part in parts.items():
            attributes = {"source": part.name, "row_order": "as in the source", **part.attributes}
            if seed is not None:
                attributes["row_order"] = f"random, seed {seed}"
            path, fields = partial[name], part.fields
            with closing(_read(part, seed, broken, named[name].name, row_ids=row_ids[name])) as rows:
                rows_seen = _count_odd(rows, n_odd)
                written[name] = write_rows(
                    path, len(part), fields, rows_seen, attributes=attributes, compression=compression
                )
        n_rows = sum(map(len, parts.values()))
        if len(broken) > (max(1, int(n_rows * max_broken + 1e-6)) if max_broken else 0):
            reasons = [broken[row] for row in sorted(broken)]
            _write_lines(broken_list, reasons)
            cure = "nothing else was written; --on-error skip leaves out 1 % at most, skip=10% more"
            found = f"{len(broken):,} of {n_rows:,} rows are broken, which {broken_list} lists"
            raise UserError("\n  ".join([f"{found}; {cure}:", list_first(reasons, "\n  ")]))
        if empty := [str(named[name]) for name, n_written in written.items() if not n_written]:
            raise UserError(f"{empty[0]} would have no rows: all of its images are broken")
        assert sum(written.values()) + len(broken) == n_rows, f"{sum(written.values())} of {n_rows} rows came"
        first = next(iter(parts.values()))
        facts = first.facts() if isinstance(first, Reader) else {}  # of all parts
        for name, part in parts.items():
            with h5py.File(partial[name], "r+", locking=False) as file:
                write_attributes(file, facts)
                ids = np.concatenate(row_ids[name])
                if hasattr(part, "sources"):
                    write_sources(file, part.sources(ids))
            flush(partial[name])  # now, since the disk may refuse: all files get their names, or none
    broken_list.unlink(missing_ok=True)  # of an earlier try
    for name, part in parts.items():
        print(
            f"{written[name]:,} rows in {named[name]}", *(f"{fact} {value}" for fact, value in facts.items()), sep=", "
        )
        if isinstance(part, Reader):
            _report(part, reports[name])
    for name, count in n_odd.items():
        warn(f"{name} has {count:,} values that are NaN or infinite, and so is their loss: fill them in, or leave out")
    if old := ", ".join(str(path) for name, path in named.items() if name not in parts and path.is_file()):
        warn(f"written earlier: {old}; if they are of the same source, they hold rows of the new files: delete them")


def _read(
    source: Dataset, seed: int | None, broken: Mapping[int, str], name: str, *, row_ids: list[np.ndarray]
) -> Generator[Columns]:
    """The rows in their order without broken ones, read by the feed of training. name: for the bar of progress.

    row_ids: the numbers of the rows are appended to it.
    """
    block_bytes = int(source.block_rows.max()) * source.row_bytes
    pool_bytes = max(POOL_BYTES, POOL_BLOCKS * block_bytes) if block_bytes > source.row_bytes else SINGLE_ROW_POOL_BYTES
    pool_rows = max(1, min(len(source), min(pool_bytes, free_host_bytes() // 4) // source.row_bytes))
    batch_size = max(1, BLOCK_BYTES // source.row_bytes)
    pool_batches = -(-pool_rows // batch_size)
    order = BlockSampler(source, batch_size, pool_batches=pool_batches, seed=seed, drop_last=False)
    n_workers = source.n_workers if isinstance(source, ItemDataset) else 0
    loader = Loader(num_readers=available_cpus(), num_workers=n_workers, prefetch_pools=1)
    feed = PrefetchLoader(source, order, torch.device("cpu"), loader, n_epochs=1)
    with closing(feed), tqdm(total=len(source), unit="rows", unit_scale=True, desc=name, disable=None) as bar:
        for pool in feed.pools(0):
            columns = pool.rows.numpy()
            places = np.flatnonzero(np.isin(pool.plan.row_ids, list(broken)))
            for field, column in columns.items() if len(places) else ():
                if isinstance(column, RaggedArray):  # broken rows have no values
                    columns[field] = RaggedArray(column.values, np.delete(column.offsets, places + 1))
                else:
                    columns[field] = np.delete(column, places, axis=0)
            row_ids.append(np.delete(pool.plan.row_ids, places))
            yield columns
            bar.update(pool.plan.n_rows)


def _count_odd(batches: Iterable[Columns], n_odd: Counter[str]) -> Iterator[Columns]:
    """The same rows. n_odd: {field: number of values that are NaN or infinite}, which is added to."""
    for columns in batches:
        for name, column in columns.items():
            values = column
            if isinstance(values, RaggedArray):
                values = values.values[values.offsets[0] : values.offsets[-1]]
            if values.dtype.kind == "f" and not (is_finite := np.isfinite(values)).all():
                n_odd[name] += values.size - int(np.count_nonzero(is_finite))
        yield columns


def _report(reader: Reader, report: Path) -> None:
    """Print what was changed or left out, and list the rows that were left out in a file."""
    selection = reader.selection
    rows = selection.rows().tolist() if isinstance(selection, Subset) else range(len(reader))
    reasons = [reader.broken[row] for row in rows if row in reader.broken]
    for loss, count in Counter(loss for row in rows for loss in reader.losses.get(row, ())).items():
        print(f"  changed  {loss}: {count:,} of {len(rows) - len(reasons):,} images")
    report.unlink(missing_ok=True)  # of rows that were here before
    if reasons:
        _write_lines(report, reasons)
        print(f"broken images that were skipped: {len(reasons):,}, listed in {report}")


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a text of these lines to a new file, in place of an old one. Names that are no text are escaped."""
    with new_file(path, replace=True) as partial:
        partial.write_text("\n".join([*lines, ""]).translate(ESCAPES), encoding="utf-8")
