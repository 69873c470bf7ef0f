"""Pools of an epoch from the device, the host or the disk: all three tiers give the same batches, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import torch

from fastgpu.feed.loader import ONE_PASS, Passes, PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.sizes import Sizes
from fastgpu.process.config import Loader
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset

LOAD_BYTES = 64 << 20
"""Bytes of one step of filling the device or host tier."""
LOAD_BATCHES = 16
"""A step is so many batches: a worker process of a Dataset is asked for one at a time."""


class ResidentLoader(PoolLoader):
    """All rows are on the device and a pool is one gather there. An epoch touches neither disk nor host memory."""

    def __init__(self, rows: Rows, source: Dataset, order: BlockSampler, *, passes: Passes = ONE_PASS):
        """rows: those of `source`, on the device."""
        super().__init__(order, passes, source)
        self._rows = rows
        self._lengths = source.lengths
        # Memory for one pool is enough: kernels that fill and use it run in order.
        self._pool = Rows.empty(source.fields, order.max_pool_rows, rows.device)

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        for plan in self.order.pools(epoch, first_pool):
            row_ids = plan.row_ids
            for name, lengths in self._lengths.items():
                self._pool.make_room(name, int(lengths[row_ids].sum(dtype=np.int64)))
            yield Pool(plan, self._rows.take(torch.from_numpy(row_ids), out=self._pool))

    def close(self) -> None:
        """Nothing to end."""


def open_loaders(
    sources: Sequence[Dataset],
    orders: Sequence[BlockSampler],
    sizes: Sizes,
    device: torch.device,
    *,
    loader: Loader,
) -> list[PoolLoader]:
    """The loaders of a training run: rows in the given orders, kept on the tier of `sizes`, as batches on the device.

    loader: prefetch_pools and timeout_s are used. Raises UserError if the rows cannot be read.
    """
    feeds: list[PoolLoader] = []
    kept: dict[int, Rows] = {}
    for source, order in zip(sources, orders, strict=True):
        passes = sizes.passes if order.shuffle else sizes.passes._replace(echo=1.0)
        if sizes.tier == "disk":
            feeds.append(PrefetchLoader(source, order, device, sizes.n_readers, passes=passes, loader=loader))
            continue
        key = id(source.block_rows)  # the parts of a split share it, and are read once
        if key not in kept:
            home = device if sizes.tier == "device" else torch.device("cpu")
            kept[key] = _read_all(source, home, sizes.n_readers, loader)
        if sizes.tier == "device":
            feeds.append(ResidentLoader(kept[key], source, order, passes=passes))
            continue
        arrays, blocks = kept[key].numpy(), source.block_rows
        rows = ArrayDataset(source.name, arrays, source.attributes, block_rows=blocks, fields=source.fields)
        feed = PrefetchLoader(rows, order, device, max(1, sizes.n_readers), passes=passes, loader=loader)
        feed.rows = source  # what is in memory has no digest
        feeds.append(feed)
    return feeds


def _read_all(source: Dataset, device: torch.device, n_readers: int, loader: Loader) -> Rows:
    """Every row, selected or not, in the order of the file, by way of 128 MiB of host memory."""
    n_rows = int(source.block_rows.sum())
    n_values = {name: int(lengths.sum(dtype=np.int64)) for name, lengths in source.lengths.items()}
    rows = Rows.empty(source.fields, n_rows, device, n_values=n_values)
    for name, lengths in source.lengths.items():
        np.cumsum(lengths, out=rows[name].host_offsets[1:])
        rows[name].offsets.copy_(torch.from_numpy(rows[name].host_offsets))
    batch_size = min(n_rows, max(1, LOAD_BYTES // LOAD_BATCHES // source.row_bytes))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=LOAD_BATCHES, seed=None)
    loader = loader.model_copy(update={"prefetch_pools": 1})
    start = 0
    with closing(PrefetchLoader(source, order, device, n_readers, passes=Passes(n_epochs=1), loader=loader)) as feed:
        for plan, part in feed.pools(0):
            rows.slice(start, start + plan.n_real_rows).copy_(part.slice(0, plan.n_real_rows))
            start += plan.n_real_rows
    return rows
