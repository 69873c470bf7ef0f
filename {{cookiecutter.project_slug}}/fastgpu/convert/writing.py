"""Sources of rows -> files: the data path of training, with a file at its end.

Rows take the random order, the reader threads and the pools of training, and then go to a `Writer`.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert.reader import MAX_SKIPPED_SHARE, ReaderRows, describe_broken
from fastgpu.convert.splits import SPLITS
from fastgpu.convert.summary import describe_rows, describe_statistics
from fastgpu.convert.writer import WriteOptions, Writer, check_target
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.files import flush
from fastgpu.process.launch import warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.layout import BLOCK_BYTES


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write files in. At the end they all get their names beside `target`; after an exception, none does.

    A process that is killed by SIGKILL leaves the folder, which may be removed by hand.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        paths = sorted(folder.iterdir())
        for path in paths:
            flush(path)
        for path in paths:
            path.replace(target.parent / path.name)
        flush(target.parent)
    finally:
        shutil.rmtree(folder)


POOL_BYTES = 1 << 30
"""Rows that are shuffled together, ..."""
POOL_BLOCKS = 512
"""... or this many blocks, whichever is more; but never more than a quarter of the free memory."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, which any size of pool shuffles completely."""


def write_files(
    parts: Mapping[str, Dataset],
    target: Path,
    options: WriteOptions,
    *,
    seed: int | None,
    is_dry_run: bool = False,
) -> None:
    """Write each part to a file of its own: x.h5 becomes x-train.h5 for the part `train`, and stays x.h5 for "".

    What was understood of the source is printed before. All files get their names together, or none does. Then the
    number of rows of each file is printed, and what was skipped is listed beside it. seed: of the random order; None:
    the order of the source. is_dry_run: write nothing. Raises UserError if rows are broken that must not be left out.
    """
    orders = {name: _choose_order(source, seed) for name, source in parts.items()}
    texts = {name: _describe_order(source, orders[name]) for name, source in parts.items()}
    for name, source in parts.items():
        check_target(_path_of(target, name), options, len(source), len(source) * source.row_bytes)
    first = next(iter(parts.values()))
    print(first.name, *describe_rows(parts, next(iter(texts.values()))), sep="\n", flush=True)
    if is_dry_run:
        paths = ", ".join(str(_path_of(target, name)) for name in parts)
        print("--dry-run: nothing is written; it would be", paths)
        return
    writers = {}
    with complete_or_absent(target) as folder, ExitStack() as stack:
        for name, source in parts.items():
            attributes = {"source": source.name, **source.attributes, "row_order": texts[name]}
            path = folder / _path_of(target, name).name
            writer = Writer(path, len(source), source.fields, attributes, compression=options.compression)
            writers[name] = stack.enter_context(writer)
            _copy_rows(source, orders[name], writers[name], options.threads)
            n_broken = len(source.reasons) if isinstance(source, ReaderRows) else 0
            assert writer.n_rows + n_broken == len(source), f"{writer.n_rows} of {len(source)} rows came"
        _check_broken(parts)
        for name, source in parts.items():
            writers[name].attributes |= {**source.attributes, "row_order": texts[name]}  # some are known only now
    messages: list[str] = []
    for name, source in parts.items():
        writer = writers[name]
        messages.append(f"{writer.n_rows:,} rows, order {texts[name]}, in {_path_of(target, name)}")
        messages += describe_statistics(writer.attributes)
        messages += [f"  {name}: NaN or infinity in {n:,} rows" for name, n in writer.n_not_finite.items() if n]
        if isinstance(source, ReaderRows):
            messages += [f"  {remark}" for remark in source.remarks]
            messages += _list_skipped(_path_of(target, name), source.reasons)
    print(*messages, sep="\n")
    others = [_path_of(target, split) for split in ("", *SPLITS) if split not in parts]
    if old := ", ".join(str(path) for path in others if path.exists()):
        warn(f"{old} was here before: if it is of the same source, it has rows of the new files; delete it")


def _path_of(target: Path, split: str) -> Path:
    return target.with_name(f"{target.stem}-{split}{target.suffix}") if split else target


def _list_skipped(path: Path, lines: Sequence[str]) -> list[str]:
    """Write what was skipped, if there is anything, to a file beside `path`. Returns the message that says so."""
    if not lines:
        return []
    path = path.with_name(f"{path.name}.skipped.txt")
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [f"broken images that were skipped: {len(lines):,}, listed in {path}"]


def _check_broken(parts: Mapping[str, Dataset]) -> None:
    """Raise UserError with all broken rows if rows must not be left out."""
    sources = [source for source in parts.values() if isinstance(source, ReaderRows) and source.on_error == "stop"]
    if reasons := [reason for source in sources for reason in source.reasons]:
        n_rows = sum(len(source) for source in sources)
        cure = ", so nothing was written"
        if len(reasons) <= MAX_SKIPPED_SHARE * n_rows:
            cure += "; --on-error skip leaves them out"
        raise describe_broken(reasons, n_rows, cure)


def progress_bar(total: int, unit: str, name: str = "") -> tqdm:
    """A progress bar on stderr; nothing if stderr is not a terminal."""
    is_hidden = not sys.stderr.isatty()
    return tqdm(total=total, unit=unit, unit_scale=True, dynamic_ncols=True, disable=is_hidden, desc=name)


def _choose_order(source: Dataset, seed: int | None) -> BlockSampler:
    block_rows = int(source.block_rows.max())
    pool_bytes = SINGLE_ROW_POOL_BYTES
    if block_rows > 1:
        pool_bytes = max(POOL_BYTES, POOL_BLOCKS * block_rows * source.row_bytes)
    pool_bytes = min(pool_bytes, free_host_bytes() // 4)
    pool_rows = max(1, min(len(source), pool_bytes // source.row_bytes))
    batch_size = max(1, BLOCK_BYTES // source.row_bytes)
    pool_batches = -(-pool_rows // batch_size)
    order = BlockSampler(source, batch_size, pool_batches=pool_batches, seed=seed, drop_last=False)
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


def _copy_rows(source: Dataset, order: BlockSampler, writer: Writer, n_threads: int) -> None:
    """Write all rows but those that are broken, which is known when they have been read."""
    if isinstance(source, ReaderRows) and any(field.is_ragged for field in source.fields.values()):
        _copy_ragged_rows(source, order, writer, n_threads)
        return
    failed = source.failed if isinstance(source, ReaderRows) else {}
    placement = Placement("disk", torch.device("cpu"), n_threads)
    feed = make_feed(source, order, placement, Loader(prefetch_pools=1))
    with closing(feed), progress_bar(len(source), "rows", writer.path.name) as bar:
        for pool in feed.pools(0):
            is_kept = ~np.isin(pool.plan.row_ids, list(failed)) if failed else np.ones(len(pool.rows), bool)
            for start in range(0, len(pool.rows), order.batch_size):
                stop = min(start + order.batch_size, len(pool.rows))
                rows = pool.rows.slice(start, stop).numpy()
                if not is_kept[start:stop].all():
                    rows = {field: column[is_kept[start:stop]] for field, column in rows.items()}
                writer.append(rows)
                bar.update(stop - start)


def _copy_ragged_rows(source: ReaderRows, order: BlockSampler, writer: Writer, n_threads: int) -> None:
    """The same for rows of which it is not known before how many values they have."""
    threads = ThreadPoolExecutor(n_threads, "reader")
    with threads, progress_bar(len(source), "rows", writer.path.name) as bar:

        def write(pool: Iterator[Mapping[str, np.ndarray]]) -> None:
            rows = list(pool)
            columns = {name: [row[name] for row in rows if row] for name in source.fields}
            writer.append({name: _join_rows(source.fields[name], column) for name, column in columns.items()})
            bar.update(len(rows))

        pools = (threads.map(source.read_row, plan.row_ids.tolist()) for plan in order.pools(0))
        waiting = next(pools)
        for following in pools:  # is being read while the one before it is written
            write(waiting)
            waiting = following
        write(waiting)


def _join_rows(field: Field, rows: Sequence[np.ndarray]) -> np.ndarray | RaggedArray:
    if not field.is_ragged:
        return np.array(rows, field.dtype).reshape(-1, *field.shape)
    return RaggedArray(np.concatenate([*rows, np.empty(0, field.dtype)]), np.cumsum([0, *map(len, rows)]))
