"""What `auto` in the config becomes on this machine, and whether the numbers that a person chose fit together."""

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.loader import ONE_PASS, Passes
from fastgpu.process.config import Config, Data, Loader, Tier
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
"""Maximum number of threads that copy rows, if loader.num_readers is auto. Decoding takes all CPUs of a rank."""
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
    passes: Passes = ONE_PASS

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
    divisor = world.world_size * cfg.optim.accumulation_steps
    if data.batch_size % divisor:
        raise UserError(
            f"data.batch_size is {data.batch_size}; it should be a multiple of {divisor} ({world.world_size} ranks x "
            f"optim.accumulation_steps {cfg.optim.accumulation_steps})"
        )
    if len(source) < data.batch_size:
        raise UserError(f"data.batch_size is {data.batch_size}; use at most {len(source)}, the rows of {source.name}")
    wide = lcm(8, world.world_size)  # so that 1, 2, 4 and 8 ranks see the same batches
    is_possible = data.batch_size % wide == 0 and wide <= len(source.block_rows)
    canonical_ranks = wide if is_possible else world.world_size
    pool_rows = min(len(source), POOL_BYTES // source.row_bytes, MAX_POOL_ROWS)  # of all ranks: so is the order
    pool_batches = max(1, pool_rows // data.batch_size) if data.pool_batches == "auto" else data.pool_batches
    if pool_batches < len(source) // data.batch_size and (text := class_order_warning(source)):
        warn(text)
    uses_workers = isinstance(source, ItemDataset)
    if uses_workers:
        n_readers = count_workers(loader, world.local_world_size)
    elif loader.num_readers == "auto":
        max_readers = available_cpus() if source.decoding else MAX_READERS
        n_readers = max(1, min(max_readers, available_cpus() // world.local_world_size))
    else:
        n_readers = loader.num_readers
    need = sum(len(each) * each.row_bytes for each in (source, val_source))
    free_host = free_host_bytes() // world.local_world_size
    free_device = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else free_host
    free = {"device": free_device, "host": free_host}
    tier = choose_tier(data, (source, val_source), need, free)
    batch_size = data.batch_size // world.world_size
    passes = Passes(data.echo, cfg.train.epochs)
    return Sizes(batch_size, canonical_ranks, pool_batches, tier, n_readers, uses_workers, need, free, passes)


def count_workers(loader: Loader, local_world_size: int) -> int:
    """Worker processes of each rank for a torch Dataset. auto: the CPUs of this rank."""
    return max(1, available_cpus() // local_world_size) if loader.num_workers == "auto" else loader.num_workers


def choose_tier(data: Data, sources: tuple[Dataset, Dataset], need: int, free: Mapping[str, int]) -> Tier:
    """auto: the nearest tier of which the rows fill at most half. All tiers give the same batches: ranks may differ.

    need: bytes of the rows. free: {"device": bytes, "host": bytes} for each rank.
    """
    tier = data.tier
    train, val = sources
    problem = _why_not_kept(train, data) or _why_not_kept(val, data)
    if tier == "auto":
        may_stay = not problem and not isinstance(train, ItemDataset)  # whose items may be drawn anew in each epoch
        near: tuple[Tier, ...] = ("device", "host")
        return next((each for each in near if may_stay and need <= RESIDENT_SHARE * free[each]), "disk")
    if tier == "disk":
        return tier
    if need > free[tier]:
        problem = f"{train.name} needs {format_bytes(need)} a rank and {format_bytes(free[tier])} are free"
    if problem:
        raise UserError(f"data.tier is {tier}, but {problem}; use data.tier=disk")
    if isinstance(train, ItemDataset) and train.draws_at_random():
        warn(
            f"data.tier is {tier}: the items of {train.name} are read once, so what they draw at random is the same "
            "in each epoch; data.tier=disk reads them anew"
        )
    return tier


def _why_not_kept(source: Dataset, data: Data) -> str:
    """Why the rows cannot stay on the device or the host. Empty: they can."""
    if source.decoding and data.min_crop_scale < 1:
        return f"each epoch decodes other parts of the images of {source.name} (data.min_crop_scale)"
    for name, field in source.fields.items():
        if field.is_ragged and name not in source.lengths:
            return f"nobody knows how many values {name} of {source.name} have before they are read"
        if field.is_ragged and source.lengths[name].sum(dtype=np.int64) > MAX_VALUES:
            return f"{source.name} has more than {MAX_VALUES:,} values of {name}"
    return ""


def class_order_warning(source: Dataset) -> str:
    """A warning if neighbouring rows share their label far more often than by chance; otherwise empty."""
    labels = source.column("labels") if source.block_rows.max() > 1 else None
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "bui":
        return ""
    sample = np.random.default_rng(0).integers(0, len(labels) - 1, 100_000)
    shared = float((labels[sample] == labels[sample + 1]).mean())
    by_chance = float((labels[sample] == np.roll(labels[sample], 1)).mean())
    if shared <= (1 + by_chance) / 2:
        return ""
    return (
        f"{source.name} is sorted by class: {shared:.0%} of neighbouring rows share a label. Pools cannot mix that: "
        "`python convert.py repack` writes the rows in random order"
    )
