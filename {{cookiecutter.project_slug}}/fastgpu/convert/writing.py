"""Sources of rows -> files: the data path of training, with a file at its end.

Rows take the random order, the reader threads and the pools of training, and then go to a `Writer`.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert.reading import SkippingSource
from fastgpu.convert.writer import WriteOptions, Writer
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Source
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BYTES = 1 << 30
"""Rows that are shuffled together, ..."""
POOL_BLOCKS = 512
"""... or this many blocks, whichever is more; but never more than a quarter of the free memory."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, which any size of pool shuffles completely."""


class Target(NamedTuple):
    """Where rows are written, and in which order."""

    path: Path
    seed: int | None = 0
    """Seed of the random order. None: the order of the source."""
    options: WriteOptions = WriteOptions()


def write_files(parts: Mapping[str, Source], target: Target, skipped_lines: Sequence[str] = ()) -> None:
    """Write each part to a file of its own: x.h5 becomes x-train.h5 for the part `train`, and stays x.h5 for "".

    All files get their names together, or none does. Then the number of rows of each file is printed, and what was
    skipped is listed beside it. skipped_lines: a line of text for each line of the input that was left out.
    """
    messages = []
    reports: dict[Path, Sequence[str]] = {}

    def report(path: Path, lines: Sequence[str], kind: str) -> None:
        if lines:
            path = path.with_name(f"{path.name}.skipped.txt")
            reports[path] = lines
            messages.append(f"{len(lines):,} broken {kind} were skipped: {path}")

    report(target.path, skipped_lines, "lines")
    with ExitStack() as stack:
        for name, source in parts.items():
            path = target.path
            if name:
                path = path.with_name(f"{path.stem}-{name}{path.suffix}")
            order = _choose_order(source, target.seed)
            order_text = _describe_order(source, order)
            attributes = {"source": source.name, **source.attributes, "row_order": order_text}
            may_skip = isinstance(source, SkippingSource)
            writer = Writer(path, len(source), source.fields, attributes, options=target.options, may_be_fewer=may_skip)
            stack.enter_context(writer)
            failed = source.failed if isinstance(source, SkippingSource) else {}
            _copy_rows(source, order, writer, failed, name=name)
            paths = ", ".join(str(path) for path in writer.paths[:2])
            if len(writer.paths) > 2:
                paths += f" and {len(writer.paths) - 2} more"
            messages.append(f"{writer.n_rows:,} rows, order {order_text}, in {paths}")
            report(path, [reason for _, reason in sorted(failed.items())], "images")
    for path, lines in reports.items():
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(*messages, sep="\n")


def progress_bar(total: int, unit: str, name: str = "") -> tqdm:
    """A progress bar on stderr; nothing if stderr is not a terminal."""
    is_hidden = not sys.stderr.isatty()
    return tqdm(total=total, unit=unit, unit_scale=True, dynamic_ncols=True, disable=is_hidden, desc=name)


def _choose_order(source: Source, seed: int | None) -> BlockSampler:
    block_rows = int(source.block_rows.max())
    pool_bytes = SINGLE_ROW_POOL_BYTES
    if block_rows > 1:
        pool_bytes = max(POOL_BYTES, POOL_BLOCKS * block_rows * source.row_bytes)
    pool_bytes = min(pool_bytes, free_host_bytes() // 4)
    pool_rows = max(1, min(len(source), pool_bytes // source.row_bytes))
    batch_size = max(1, BLOCK_BYTES // source.row_bytes)
    pool_batches = -(-pool_rows // batch_size)
    return BlockSampler(source.block_rows, batch_size, pool_batches=pool_batches, seed=seed, drop_last=False)


def _describe_order(source: Source, order: BlockSampler) -> str:
    if not order.shuffle:
        return "as in the source"
    text = f"random, seed {order.seed}"
    if order.pools_per_epoch > 1 and source.block_rows.max() > 1:
        pool_rows = order.pool_batches * order.batch_size
        text += f": blocks over the whole source, rows within pools of {pool_rows:,}"
    return text


def _copy_rows(source: Source, order: BlockSampler, writer: Writer, failed: Mapping[int, str], *, name: str) -> None:
    """Write all rows but those in `failed`, which grows while rows are read."""
    placement = Placement("disk", torch.device("cpu"), writer.options.threads)
    feed = make_feed(source, order, placement, Loader(prefetch_pools=1))
    with closing(feed), progress_bar(len(source), "rows", name) as bar:
        for pool in feed.pools(0):
            is_kept = np.ones(len(pool.rows), bool)
            if failed:
                is_kept = ~np.isin(order.row_ids(pool.plan), list(failed))
            for start in range(0, len(pool.rows), order.batch_size):
                stop = min(start + order.batch_size, len(pool.rows))
                rows = pool.rows.slice(start, stop).numpy()
                if not is_kept[start:stop].all():
                    rows = {field: column[is_kept[start:stop]] for field, column in rows.items()}
                writer.append(rows)
                bar.update(stop - start)
                exit_if_signalled()


# ---------------------------------------------------------------------------------------------- signals

_received_signals: list[int] = []


def exit_on_signals() -> None:
    """End the process at Ctrl-C and SIGTERM without a traceback; context managers remove what is not complete.

    The exit code is 128 + the number of the signal, as shells have it. Python drops an exception that is raised while
    a destructor runs, so the handler also remembers the signal, and the loop that writes asks for it.
    """
    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)


def exit_if_signalled() -> None:
    """Exit if a signal came whose exception was dropped."""
    if _received_signals:
        sys.exit(128 + _received_signals[0])


def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Report an exception that a destructor raised, unless it is the exit that a signal asked for."""
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)


def _handle(number: int, frame: FrameType | None) -> None:
    _received_signals.append(number)
    exit_if_signalled()
