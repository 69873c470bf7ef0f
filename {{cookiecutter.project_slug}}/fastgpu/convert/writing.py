"""Writes sources to files: rows are read in their final order, checked, written and counted."""

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert.broken import broken_list, in_order, refuse_broken, skipped_list, write_lines
from fastgpu.convert.reader import Reader, where_from
from fastgpu.convert.splits import SPLITS
from fastgpu.convert.writer import Compression, write_attributes, write_origins, write_rows
from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import PrefetchLoader
from fastgpu.process.config import LoaderConfig
from fastgpu.process.files import flush, new_file
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import available_cpus, free_host_bytes
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BYTES, POOL_BLOCKS = 1 << 30, 512
"""Size of the pools that are shuffled: the larger one, but at most a quarter of the free memory."""
GROUP_POOL_BYTES, GROUP_POOL_BLOCKS = 64 << 20, 24
"""The same for readers of row groups, which can be large: 24 groups of 100 images in pixels take 0.5 GiB."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, since pools of any size shuffle them completely."""
POOL_ROWS_IN_ORDER = 1 << 20
"""Maximum rows of a pool in order. For rows as small as tokens, the plan of a pool takes more memory than they do."""


class Writing(NamedTuple):
    """Options for writing files."""

    seed: int | None = 0
    """Seed of the random order. None: the order of the source."""
    compression: Compression = "none"
    replace: bool = False
    """Whether existing files are replaced."""
    max_broken: float | None = None
    """Maximum share of rows that are left out because they are broken (see `Reader`), or hold NaN or infinite values;
    one row is always allowed. None: a broken row is an error, and NaN and infinite values are kept with a warning."""
    n_threads: int | None = None
    """Number of reader threads. None: the number of CPUs."""


def write_files(
    parts: Mapping[str, Dataset],
    target: Path,
    how: Writing = Writing(),  # noqa: B008 (immutable)
    *,
    left_out: Sequence[str] = (),
) -> None:
    """Write each split to its own file: x.h5 becomes x-train.h5 for the split `train`, and stays x.h5 for "".

    The files get their names when all are complete. left_out: a reason for each row of the source that is in no split.
    These rows and broken rows are listed beside the target. Raises UserError if a file exists or cannot be written, or
    if too many rows are broken; OSError if the disk is full.
    """
    named = {split: target.with_name(f"{target.stem}-{split}{target.suffix}") for split in SPLITS} | {"": target}
    skipped = skipped_list(target)
    if not how.replace and os.path.lexists(skipped):
        raise UserError(f"{skipped} exists; --force replaces a file")
    with ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = {name: stack.enter_context(new_file(named[name], replace=how.replace)) for name in parts}
        written = {}
        whole = {name: _WholeRows(part, is_finite=how.max_broken is not None) for name, part in parts.items()}
        for name, part in parts.items():
            attributes = {"source": part.name, "row_order": "as in the source", **part.attributes}
            if how.seed is not None:
                attributes["row_order"] = f"random, seed {how.seed}"
            path, fields = partial[name], part.fields
            with closing(_read(part, how, named[name].name)) as pools:
                rows = whole[name].take(pools)
                written[name] = write_rows(
                    path, len(part), fields, rows, attributes=attributes, compression=how.compression
                )
            assert whole[name].n_came == len(part), f"{whole[name].n_came} of {len(part)} rows came"
        # The splits of a reader share its dictionary, which also has the rows that are never read.
        broken_of = {id(each.broken): each.broken for each in whole.values()}
        reasons = [reason for broken in broken_of.values() for reason in in_order(broken)]
        refuse_broken(reasons, sum(written.values()) + len(reasons), how.max_broken, target)
        if empty := [str(named[name]) for name, n_written in written.items() if not n_written]:
            raise UserError(f"{empty[0]} would have no rows: all of them are broken")
        first = next(iter(parts.values()))
        facts = first.facts() if isinstance(first, Reader) else {}  # of all parts
        for name, part in parts.items():
            with h5py.File(partial[name], "r+", locking=False) as file:
                write_attributes(file, facts)
                if hasattr(part, "origins"):
                    write_origins(file, part.origins(np.concatenate(whole[name].row_ids)))
            flush(partial[name])  # a full disk raises here, before the first file gets its name
    broken_list(target).unlink(missing_ok=True)  # left by an earlier attempt
    skipped.unlink(missing_ok=True)  # it belongs to the replaced files
    for name in parts:
        print(
            f"{written[name]:,} rows in {named[name]}", *(f"{fact} {value}" for fact, value in facts.items()), sep=", "
        )
        for loss, count in whole[name].losses().items():
            print(f"  changed  {loss}: {count:,} of {written[name]:,} images")
    if reasons := [*left_out, *reasons]:
        write_lines(skipped, reasons)
        print(f"broken rows that were skipped: {len(reasons):,}, listed in {skipped}")
    n_odd = sum((each.n_odd for each in whole.values()), Counter[str]())
    for name, count in n_odd.items():
        cure = "fill them in, or leave out their rows: --on-error skip=10%"
        warn(f"{name} has {count:,} values that are NaN or infinite, and so is their loss; {cure}")
    if old := ", ".join(str(path) for name, path in named.items() if name not in parts and path.is_file()):
        warn(f"written earlier: {old}; if they are of the same source, they hold rows of the new files: delete them")


class _WholeRows:
    """Takes the broken rows out of pools. is_finite: rows with NaN or infinite values are broken, too."""

    def __init__(self, part: Dataset, *, is_finite: bool):
        self._part = part
        self._is_finite = is_finite
        self.broken: dict[int, str] = getattr(part, "broken", {})
        """{row: reason}. Reading adds to it."""
        self.row_ids: list[np.ndarray] = []
        """Row numbers in their order, for the origins of rows. Arrays have none, and may have billions of rows."""
        self.n_came = 0
        """Number of rows that were read, broken ones included."""
        self.n_odd: Counter[str] = Counter()
        """{field: number of values that are NaN or infinite}"""

    def take(self, pools: Iterable[Pool]) -> Iterator[Columns]:
        """Yield the rows of each pool without the broken ones, and record them."""
        for pool in pools:
            columns, row_ids = pool.rows.numpy(), pool.plan.row_ids
            is_whole = ~np.isin(row_ids, [*self.broken])
            for name, column in columns.items():
                odd_rows = _find_odd(column)
                odd_rows = odd_rows[is_whole[odd_rows]]
                if self._is_finite:
                    for row in row_ids[odd_rows].tolist():
                        self.broken[row] = f"{where_from(self._part, row)}: {name} is NaN or infinite"
                    is_whole[odd_rows] = False
                elif len(odd_rows):
                    self.n_odd[name] += len(odd_rows)
            self.n_came += len(row_ids)
            if hasattr(self._part, "origins"):
                self.row_ids.append(row_ids[is_whole])
            yield columns if is_whole.all() else {name: _keep(column, is_whole) for name, column in columns.items()}

    def losses(self) -> Counter[str]:
        """{what written rows lose, such as transparency: number of rows}"""
        losses = getattr(self._part, "losses", {})
        rows = np.concatenate(self.row_ids).tolist() if losses else ()
        return Counter(loss for row in rows for loss in losses.get(row, ()))


def _find_odd(column: np.ndarray | RaggedArray) -> np.ndarray:
    """The row of each NaN or infinite value; a row is repeated for each of its values."""
    values = column
    if isinstance(values, RaggedArray):
        values = values.values[values.offsets[0] : values.offsets[-1]]
    if values.dtype.kind != "f" or (is_finite := np.isfinite(values)).all():
        return np.zeros(0, np.int64)
    places = np.nonzero(~is_finite)[0]
    if isinstance(column, RaggedArray):
        places = np.searchsorted(column.offsets - column.offsets[0], places, side="right") - 1
    return places


def _keep(column: np.ndarray | RaggedArray, is_kept: np.ndarray) -> np.ndarray | RaggedArray:
    """Select rows of a column. is_kept: (n,) bool."""
    if not isinstance(column, RaggedArray):
        return column[is_kept]
    rows = np.flatnonzero(is_kept)
    lengths = np.diff(column.offsets)[rows]
    return RaggedArray(column.values[column.places(rows)], np.cumsum([0, *lengths]))


def _read(source: Dataset, how: Writing, name: str) -> Generator[Pool]:
    """Pools of rows in their order, read by the loader of training. name: for the progress bar."""
    block_bytes = int(source.block_rows.max()) * source.row_bytes
    pool_bytes, pool_blocks = (
        (GROUP_POOL_BYTES, GROUP_POOL_BLOCKS) if isinstance(source, Reader) else (POOL_BYTES, POOL_BLOCKS)
    )
    pool_bytes = max(pool_bytes, pool_blocks * block_bytes) if block_bytes > source.row_bytes else SINGLE_ROW_POOL_BYTES
    pool_rows = max(1, min(len(source), min(pool_bytes, free_host_bytes() // 4) // source.row_bytes))
    if how.seed is None:
        pool_rows = min(pool_rows, POOL_ROWS_IN_ORDER)
    batch_size = max(1, BLOCK_BYTES // source.row_bytes)
    pool_batches = -(-pool_rows // batch_size)
    sampler = BlockSampler(source, batch_size, pool_batches=pool_batches, seed=how.seed, drop_last=False)
    n_workers = source.n_workers if isinstance(source, ItemDataset) else 0
    loader = LoaderConfig(num_readers=how.n_threads or available_cpus(), num_workers=n_workers, prefetch_pools=1)
    feed = PrefetchLoader(source, sampler, torch.device("cpu"), loader, n_epochs=1)
    with closing(feed), tqdm(total=len(source), unit="rows", unit_scale=True, desc=name, disable=None) as bar:
        for pool in feed.pools(0):
            yield pool
            bar.update(pool.plan.n_rows)
