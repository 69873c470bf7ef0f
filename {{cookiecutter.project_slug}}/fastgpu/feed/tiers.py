"""Loaders for the three tiers: rows that stay on the device, stay in host memory, or are read from disk in each epoch.

All three give the same batches, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache

import numpy as np
import torch

from fastgpu.feed.loader import Passes, PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.sizes import Sizes
from fastgpu.process.config import Loader
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset


class ResidentLoader(PoolLoader):
    """All rows stay on the device, where one gather makes a pool. An epoch reads neither disk nor host memory."""

    def __init__(self, rows: Rows, source: Dataset, order: BlockSampler, passes: Passes):
        """rows: those of `source`, on the device."""
        super().__init__(order, passes, source)
        self._rows = rows
        # Memory for one pool is enough: kernels that fill and use it run in order.
        self._pool = Rows.empty(source.fields, order.max_pool_rows, rows.device)

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        self.prepare()
        for plan in self.order.pools(epoch, first_pool):
            row_ids = plan.row_ids
            for name, lengths in self.rows.stored_lengths.items():
                self._pool.make_room(name, int(lengths[row_ids].sum(dtype=np.int64)))
            yield Pool(plan, self._rows.take(torch.from_numpy(row_ids), out=self._pool))

    def close(self) -> None:
        """Nothing to end."""


def open_loaders(
    sources: Sequence[Dataset], orders: Sequence[BlockSampler], sizes: Sizes, device: torch.device, *, loader: Loader
) -> list[PoolLoader]:
    """A loader for each source, whose rows come in the given order and are kept on the tier that `sizes` names.

    Memory for the rows is allocated now. All sources are read into it when a loader is first asked for rows, so that
    run.check=true is quick. loader: prefetch_pools and timeout_s are used.
    """
    loaders: list[PoolLoader] = []
    kept: dict[Dataset, Rows] = {}
    home = device if sizes.tier == "device" else torch.device("cpu")
    one_ahead = loader.model_copy(update={"prefetch_pools": 1})
    for source, order in zip(sources, orders, strict=True):
        # Validation, which is not shuffled, takes each row once. One pool ahead is enough for it, and saves memory.
        passes = sizes.passes if order.shuffle else sizes.passes._replace(echo=1.0)
        ahead = loader if order.shuffle else one_ahead
        whole = source.whole or source
        if sizes.tier != "disk" and whole not in kept:
            n_rows = int(whole.block_rows.sum())  # also those that are not selected
            kept[whole] = Rows.empty(whole.fields, n_rows, home, lengths=whole.stored_lengths)
        if sizes.tier == "device":
            loaders.append(ResidentLoader(kept[whole], source, order, passes))
            continue
        read = source
        if sizes.tier == "host":
            arrays = kept[whole].numpy()
            read = ArrayDataset(source.name, arrays, block_rows=source.block_rows, fields=source.fields)
        feed = PrefetchLoader(read, order, device, sizes.n_readers, passes=passes, loader=ahead)
        feed.rows = source  # its fingerprint has a digest of the rows, which arrays do not have
        loaders.append(feed)

    @cache
    def read_kept() -> None:
        for source, rows in kept.items():
            _read_all(source, rows, sizes.n_readers, one_ahead)

    for each in loaders:
        each.prepare = read_kept
    return loaders


def _read_all(source: Dataset, rows: Rows, n_readers: int, loader: Loader) -> None:
    """Read all rows of the files in their order. Two pools of host memory are enough."""
    n_rows = len(rows)
    # A worker process of a Dataset is asked for one batch at a time: 4 MiB.
    batch_size = min(n_rows, max(1, (4 << 20) // source.row_bytes))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=16, seed=None)
    feed = PrefetchLoader(source, order, rows.device, n_readers, passes=Passes(n_epochs=1), loader=loader)
    start = 0
    with closing(feed):
        for plan, part in feed.pools(0):
            rows.slice(start, start + plan.n_real_rows).copy_(part.slice(0, plan.n_real_rows))
            start += plan.n_real_rows
