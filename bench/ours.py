"""This project as train.py wires it, on a CPU and without a training step: the rows of a file, and their batches."""

from collections.abc import Iterator
from pathlib import Path

import peers  # noqa: F401  makes the project importable
import torch

from fastgpu.feed import PoolLoader, ResidentRows, Splits, open_loader, resolve_auto
from fastgpu.feed.readers import MAX_READERS
from fastgpu.process.config import Auto, Config, Data, LoaderConfig, Tier, Train
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store

IMAGES = ("images", "labels")
CPUS = available_cpus()
READERS = min(MAX_READERS, CPUS)


def open_rows(path: Path, names: tuple[str, ...] = IMAGES) -> Dataset:
    """The rows of one HDF5 file."""
    return open_store("FILE", str(path), {name: name for name in names})


def open_feed(
    rows: Dataset,
    batch_size: int,
    *,
    tier: Tier = "disk",
    n_readers: int | Auto = READERS,
    pool_batches: int | None = None,
) -> PoolLoader:
    """The feed of these rows on a CPU. pool_batches: None for what `auto` chooses."""
    data = Data(train="", val="", fields={}, batch_size=batch_size, tier=tier, pool_batches=pool_batches or "auto")
    loader = LoaderConfig(num_readers=n_readers, num_workers=n_readers)
    world = World(0, 1, 1, torch.device("cpu"))
    train = Train(epochs=1_000_000)  # so that each epoch is read ahead, however long a measurement takes
    config = Config(workload="images", data=data, loader=loader, train=train)
    config = resolve_auto(config, Splits(rows, {"val": rows}), world)
    shard = Shard(canonical_ranks=int(config.data.canonical_ranks))
    sampler = BlockSampler(rows.block_rows, batch_size, shard, int(config.data.pool_batches), seed=0)
    return open_loader(rows, sampler, ResidentRows([rows], config, world.device), config)


def batches(feed: PoolLoader, epoch: int) -> Iterator[Rows]:
    """The batches of an epoch."""
    yield from feed.batches(epoch)
