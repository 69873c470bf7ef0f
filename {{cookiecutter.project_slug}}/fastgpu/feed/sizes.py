"""What `auto` in the config becomes on this machine, and whether the numbers that a person chose fit together.

Every function raises UserError with the key, the value, what is allowed and the cure.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.process.config import Auto, Config, Loader, Tier
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import available_cpus, format_bytes, free_host_bytes
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import MAX_VALUES

POOL_BYTES = 256 << 20
"""Size of a pool if data.pool_batches is auto: 128 blocks of 2 MiB shuffle even a file in class order well."""
MAX_POOL_ROWS = 8 << 20
"""Maximum number of rows of such a pool. To plan so many takes a third of a second, in which no row is read."""
MAX_READERS = 8
RESIDENT_SHARE = 0.5
"""Share of the free memory that data.tier=auto fills with rows. The rest is for the model and its gradients."""


class Sizes(NamedTuple):
    """Every number that says how rows move; no `auto` is left."""

    batch_size: int
    """Rows of one optimizer step on one rank."""
    canonical_ranks: int
    """Any world size that divides this number sees the same global batches."""
    pool_batches: int
    tier: Tier
    n_readers: int
    """Reader threads of a rank, or worker processes if the rows come from a Dataset."""
    uses_workers: bool
    """Whether the readers are worker processes."""
    need: int
    """Bytes of the rows that may be kept, of training and validation."""
    free: Mapping[str, int]
    """{"device": bytes, "host": bytes} that are free for each rank."""

    @property
    def chosen(self) -> dict[str, dict[str, Any]]:
        """{section: values that were chosen}"""
        readers = "num_workers" if self.uses_workers else "num_readers"
        data = {"tier": self.tier, "pool_batches": self.pool_batches}
        return {"data": data, "loader": {readers: self.n_readers}}


def choose_sizes(cfg: Config, source: Dataset, val_source: Dataset, world: World) -> Sizes:
    """What the config asks for on this machine. source, val_source: training and validation rows.

    Raises UserError if the numbers do not fit together.
    """
    data, loader = cfg.data, cfg.loader
    sources = source, val_source
    batch_size = choose_rank_batch(data.batch_size, world.world_size, cfg.optim.accumulation_steps, source)
    canonical_ranks = choose_canonical_ranks(data.batch_size, world.world_size, source)
    pool_batches = choose_pool_batches(data.pool_batches, data.batch_size, source)
    need = sum(len(each) * each.row_bytes for each in sources)
    free_host = free_host_bytes() // world.local_world_size
    free_device = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else free_host
    free = {"device": free_device, "host": free_host}
    may_vary = isinstance(source, ItemDataset) or (bool(source.decoding) and data.min_crop_scale < 1)
    can_stay = not may_vary and all(fits_offsets(each) for each in sources)
    tier = choose_tier(data.tier, need, free, source.name, can_stay=can_stay)
    if tier != "disk" and may_vary:
        _warn_of_frozen_rows(source, tier)
    if tier == "device" and loader.prefetch_pools != Loader().prefetch_pools:
        warn("loader.prefetch_pools has no effect on the device tier")
    if text := class_order_warning(source, pool_batches * data.batch_size):
        warn(text)
    uses_workers = isinstance(source, ItemDataset)
    asked = loader.num_workers if uses_workers else loader.num_readers
    max_readers = available_cpus() if uses_workers or source.decoding else MAX_READERS
    n_readers = choose_readers(asked, world.local_world_size, max_readers)
    return Sizes(batch_size, canonical_ranks, pool_batches, tier, n_readers, uses_workers, need, free)


def _warn_of_frozen_rows(source: Dataset, tier: Tier) -> None:
    """Say that rows which differ from epoch to epoch would be kept. Raises UserError if they are known to differ."""
    if source.decoding:
        raise UserError(
            f"data.tier is {tier}, but each epoch decodes other parts of the images of {source.name} "
            "(data.min_crop_scale); use data.tier=disk"
        )
    if isinstance(source, ItemDataset) and source.draws_at_random():
        warn(
            f"data.tier is {tier}: the items of {source.name} are read once, so what they draw at random is the "
            "same in each epoch; data.tier=disk reads them anew"
        )


def choose_rank_batch(batch_size: int, world_size: int, accumulation: int, source: Dataset) -> int:
    """Rows of one optimizer step on one rank."""
    if batch_size % (world_size * accumulation):
        raise UserError(
            f"data.batch_size is {batch_size}; it should be a multiple of {world_size * accumulation} "
            f"({world_size} ranks x optim.accumulation_steps {accumulation})"
        )
    if len(source) < batch_size:
        raise UserError(
            f"data.batch_size is {batch_size}, but {source.name} has {len(source):,} rows; use at most {len(source)}"
        )
    return batch_size // world_size


def choose_canonical_ranks(batch_size: int, world_size: int, source: Dataset) -> int:
    """A multiple of 8 if it divides the global batch, so that 1, 2, 4 and 8 ranks see the same batches."""
    n_blocks = len(source.block_rows)
    if n_blocks < world_size:
        raise UserError(
            f"{world_size} ranks are more than the {n_blocks} blocks (chunks) of {source.name}; use at most "
            f"{n_blocks} ranks, or write the file with smaller chunks"
        )
    wide = lcm(8, world_size)
    return wide if batch_size % wide == 0 and wide <= n_blocks else world_size


def choose_pool_batches(pool_batches: int | Auto, batch_size: int, source: Dataset) -> int:
    """auto: see `auto_pool_rows`, over all ranks, so that the order does not depend on their number."""
    if pool_batches != "auto":
        return pool_batches
    return max(1, auto_pool_rows(source) // batch_size)


def auto_pool_rows(source: Dataset) -> int:
    """The rows of 256 MiB, but at most 8 million (2^23), and at most all."""
    return min(len(source), POOL_BYTES // source.row_bytes, MAX_POOL_ROWS)


def choose_readers(num_readers: int | Auto, local_world_size: int, max_readers: int = MAX_READERS) -> int:
    """Reader threads, or workers. auto: the CPUs of this rank, at most 8 for copies; decoding takes all of them."""
    if num_readers != "auto":
        return num_readers
    return max(1, min(max_readers, available_cpus() // local_world_size))


def choose_tier(tier: Tier | Auto, need: int, free: Mapping[str, int], name: str, *, can_stay: bool = True) -> Tier:
    """auto: the nearest tier of which the rows fill at most half. All tiers give the same batches: ranks may differ.

    need: bytes of the rows. free: {"device": bytes, "host": bytes} for each rank. can_stay: whether auto may keep rows.
    """
    if tier == "auto":
        if can_stay and need <= RESIDENT_SHARE * free["device"]:
            return "device"
        if can_stay and need <= RESIDENT_SHARE * free["host"]:
            return "host"
        return "disk"
    if tier != "disk" and need > free[tier]:
        raise UserError(
            f"data.tier is {tier}, but {name} needs {format_bytes(need)} a rank and {format_bytes(free[tier])} are "
            "free; use data.tier=disk"
        )
    return tier


def fits_offsets(source: Dataset) -> bool:
    """Whether 32-bit offsets can count the values of all rows."""
    return all(lengths.sum(dtype=np.int64) <= MAX_VALUES for lengths in source.lengths.values())


def class_order_warning(source: Dataset, pool_rows: int) -> str:
    """A warning if the file is sorted by class and pools of `pool_rows` rows cannot mix it; otherwise empty.

    The file counts as sorted if neighbouring rows share their label far more often than by chance.
    """
    is_mixed = pool_rows >= len(source) or source.block_rows.max() == 1
    labels = None if is_mixed else source.column("labels")
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "bui":
        return ""
    sample = np.random.default_rng(0).integers(0, len(labels) - 1, 100_000)
    _, counts = np.unique(labels[sample], return_counts=True)
    by_chance = float(np.square(counts / len(sample)).sum())
    shared = float((labels[sample] == labels[sample + 1]).mean())
    if shared <= (1 + by_chance) / 2:
        return ""
    return (
        f"{source.name} is sorted by class: {100 * shared:.0f} % of neighbouring rows share a label, by chance it "
        f"would be {100 * by_chance:.0f} %. Pools of {pool_rows:,} of its {len(source):,} rows cannot mix that: "
        "`python convert.py repack` writes them in random order"
    )
