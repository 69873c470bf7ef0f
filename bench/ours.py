"""This project as train.py wires it, on a CPU and without a training step: the rows of a file, and their batches."""

from collections.abc import Iterator
from pathlib import Path

import peers  # noqa: F401  makes the project importable
import torch

from fastgpu.feed.sizes import choose_canonical_ranks, choose_pool_batches, choose_readers
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Tier
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store

IMAGES = ("images", "labels")
CPUS = available_cpus()
READERS = choose_readers("auto", 1)


def open_rows(path: Path, names: tuple[str, ...] = IMAGES) -> Dataset:
    """The rows of one HDF5 file."""
    return open_store("FILE", str(path), {name: name for name in names})


def open_feed(
    rows: Dataset, batch_size: int, *, tier: Tier = "disk", n_readers: int = READERS, pool_batches: int | None = None
) -> Feed:
    """The feed of these rows on a CPU. pool_batches: None for what `auto` chooses."""
    pool_batches = choose_pool_batches(pool_batches or "auto", batch_size, rows)
    shard = Shard(canonical_ranks=choose_canonical_ranks(batch_size, 1, rows))
    order = BlockSampler(rows.block_rows, batch_size, shard=shard, pool_batches=pool_batches, seed=0)
    return make_feed(rows, order, Placement(tier, torch.device("cpu"), n_readers))


def batches(feed: Feed, epoch: int) -> Iterator[Rows]:
    """The batches of an epoch."""
    for pool in feed.pools(epoch):
        yield from pool.rows.batches(feed.order.batch_size)
