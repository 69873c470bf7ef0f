"""Sources -> files: what was understood is shown, rows are read in their final order, written, and counted."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import SPLITS, Reader, rows_of
from fastgpu.convert.summary import describe_attributes
from fastgpu.convert.writer import Compression, write_attributes, write_rows
from fastgpu.dataset.items import Columns
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.files import flush, new_file
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import available_cpus, free_host_bytes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BYTES = 1 << 30
"""Rows that are shuffled together, ..."""
POOL_BLOCKS = 512
"""... or this many blocks, whichever is more; but never more than a quarter of the free memory."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, which any size of pool shuffles completely."""
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""


def write_files(
    parts: Mapping[str, Dataset],
    target: Path,
    *,
    seed: int | None = 0,
    compression: Compression = "none",
    replace: bool = False,
    skips_broken: bool = False,
) -> None:
    """Write each part to a file of its own: x.h5 becomes x-train.h5 for the part `train`, and stays x.h5 for "".

    Files get their names when all are complete. Then the number of rows of each file is printed, and what was skipped
    is listed beside it.

    seed: of the random order; None keeps that of the source. skips_broken: leave broken rows out. Raises UserError if a
    file is in the way, the disk is too small, or rows are broken that must not be left out.
    """
    paths = {name: _path_of(target, name) for name in parts}
    orders = {name: _choose_order(part, seed) for name, part in parts.items()}
    texts = {name: _describe_order(part, orders[name]) for name, part in parts.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    broken = getattr(next(iter(parts.values())), "broken", {})  # of all parts of a split
    target.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, tuple[int, dict[str, Any]]] = {}
    with ExitStack() as stack:
        partial = {name: stack.enter_context(new_file(path, replace=replace)) for name, path in paths.items()}
        needed = sum(len(part) * part.row_bytes for part in parts.values())
        free = shutil.disk_usage(target.parent).free
        if compression == "none" and needed > free:
            sizes = f"needs {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free"
            raise UserError(f"{target} {sizes}; make room, or write it elsewhere")
        for name, part in parts.items():
            attributes = {"source": part.name, **part.attributes, "row_order": texts[name]}
            with closing(_read(part, orders[name], broken, paths[name].name)) as rows:
                written[name] = write_rows(
                    partial[name], len(part), part.fields, rows, attributes=attributes, compression=compression
                )
            n_came = written[name][0] + np.isin(rows_of(part), list(broken)).sum()
            assert n_came == len(part), f"{n_came} of {len(part)} rows came"
        _check_broken(broken, sum(map(len, parts.values())), skips=skips_broken)
        for name, part in parts.items():
            facts = part.facts() if isinstance(part, Reader) else {}
            with h5py.File(partial[name], "r+") as file:
                write_attributes(file, facts)
            written[name][1].update(facts)
            flush(partial[name])  # now, since the disk may refuse: all files get their names, or none
    for name, part in parts.items():
        n_rows, attributes = written[name]
        new = {key: value for key, value in attributes.items() if key not in part.attributes}
        print(f"{n_rows:,} rows in {paths[name]}", *describe_attributes(new), sep="\n")
        if isinstance(part, Reader):
            _report(part, paths[name])
    others = [_path_of(target, split) for split in ("", *SPLITS) if split not in parts]
    if old := ", ".join(str(path) for path in others if path.exists()):
        warn(f"{old} was here before: if it is of the same source, it has rows of the new files; delete it")


def _path_of(target: Path, split: str) -> Path:
    return target.with_name(f"{target.stem}-{split}{target.suffix}") if split else target


def _choose_order(source: Dataset, seed: int | None) -> BlockSampler:
    largest_block = int(source.block_rows.max())
    pool_bytes = SINGLE_ROW_POOL_BYTES
    if largest_block > 1:
        pool_bytes = max(POOL_BYTES, POOL_BLOCKS * largest_block * source.row_bytes)
    pool_bytes = min(pool_bytes, free_host_bytes() // 4)
    pool_rows = max(1, min(len(source), pool_bytes // source.row_bytes))
    batch_size = max(1, BLOCK_BYTES // source.row_bytes)
    order = BlockSampler(source, batch_size, pool_batches=-(-pool_rows // batch_size), seed=seed, drop_last=False)
    order.n_epochs = 1
    return order


def _describe_order(source: Dataset, order: BlockSampler) -> str:
    if not order.shuffle:
        return str(source.attributes.get("row_order", "as in the source"))
    text = f"random, seed {order.seed}"
    if order.pools_per_epoch > 1 and source.block_rows.max() > 1:
        pool_rows = order.pool_batches * order.batch_size
        text += f": blocks over the whole source, rows within pools of {pool_rows:,}"
    return text


def _read(source: Dataset, order: BlockSampler, broken: Mapping[int, str], name: str) -> Generator[Columns]:
    """The rows of an order, read ahead by the feed that training has, without those that are broken.

    name: for the bar of progress, which is there if there is a terminal.
    """
    feed = make_feed(source, order, Placement("disk", torch.device("cpu"), available_cpus()), Loader(prefetch_pools=1))
    with closing(feed), tqdm(total=len(source), unit="rows", unit_scale=True, desc=name, disable=None) as bar:
        for pool in feed.pools(0):
            columns = pool.rows.numpy()
            places = np.flatnonzero(np.isin(pool.plan.row_ids, list(broken)))
            for field, column in columns.items() if len(places) else ():
                if isinstance(column, RaggedArray):  # broken rows have no values
                    columns[field] = RaggedArray(column.values, np.delete(column.offsets, places + 1))
                else:
                    columns[field] = np.delete(column, places, axis=0)
            yield columns
            bar.update(pool.plan.n_rows)


def _check_broken(broken: Mapping[int, str], n_rows: int, *, skips: bool) -> None:
    """Raise UserError if there are broken rows; if they are skipped, if more than 1 % are broken."""
    n_allowed = max(1, int(MAX_SKIPPED_SHARE * n_rows))
    if len(broken) <= (n_allowed if skips else 0):
        return
    cure = "more than 1 %" if skips else "so nothing was written"
    if not skips and len(broken) <= n_allowed:
        cure += "; --on-error skip leaves them out"
    reasons = [reason for _, reason in sorted([*broken.items()])]  # other threads add to it
    raise UserError(f"{len(reasons):,} of {n_rows:,} rows are broken, {cure}:\n  " + list_first(reasons, "\n  "))


def _report(reader: Reader, path: Path) -> None:
    """Print what was changed or left out, and list the rows that were left out in a file beside `path`."""
    rows = rows_of(reader)
    is_broken = np.isin(rows, list(reader.broken))
    print(*(f"  {remark}\n" for remark in reader.remarks(rows[~is_broken])), sep="", end="")
    if is_broken.any():
        report = path.with_name(f"{path.name}.skipped.txt")
        report.write_text("".join(f"{reader.broken[row]}\n" for row in rows[is_broken].tolist()), encoding="utf-8")
        print(f"broken images that were skipped: {is_broken.sum():,}, listed in {report}")
