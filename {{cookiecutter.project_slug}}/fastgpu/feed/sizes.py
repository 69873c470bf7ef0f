"""Chooses a value for each `auto` that decides how rows move, and checks that the config's numbers fit together."""

from math import lcm

import torch

from fastgpu.feed.readers import choose_readers
from fastgpu.feed.sources import Splits
from fastgpu.feed.tiers import choose_tier, measure_memory
from fastgpu.process.config import Config, Data
from fastgpu.process.launch import UserError, planned_ranks
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Mixture

POOL_BYTES = 256 << 20
"""Size of a pool if data.pool_batches is auto: 128 blocks of 2 MiB. This shuffles a file in random order well, but not
a file in class order."""
MAX_POOL_ROWS = 8 << 20
"""Maximum number of rows of such a pool. Planning them takes a third of a second, during which no row is read."""


def resolve_auto(cfg: Config, splits: Splits, world: World, saved_ranks: int | None = None) -> Config:
    """The config with a value in place of each `auto` that decides how rows are ordered, kept and read.

    The values are chosen for these rows and this machine. saved_ranks: canonical ranks of the resumed run, see
    `choose_canonical_ranks`. Raises UserError if the numbers of the config do not fit together.
    """
    train, data = splits.train, cfg.data
    ranks = _ranks(cfg, world)
    _check_ranks(cfg, train, ranks, world.device)
    pool_rows = min(len(train), POOL_BYTES // train.row_bytes, MAX_POOL_ROWS)  # of all ranks, as the order is global
    pool_batches = max(1, pool_rows // data.batch_size) if data.pool_batches == "auto" else data.pool_batches
    n_local = max(n for _, n in ranks)
    sources = (train, *splits.val.values())
    tier = choose_tier(data, sources, measure_memory(sources, world.device, n_local))
    key, n_readers = choose_readers(train, cfg.loader, n_local)
    canonical_ranks = choose_canonical_ranks(data, train, world.world_size, saved_ranks)
    order = {"pool_batches": pool_batches, "canonical_ranks": canonical_ranks}
    return cfg.resolved(data={"tier": tier, **order}, loader={key: n_readers})


def _ranks(cfg: Config, world: World) -> list[tuple[int, int]]:
    """[(ranks, ranks of each machine)] to check. With run.check, one process also checks the ranks of a planned job."""
    return [(world.world_size, world.local_world_size), *(planned_ranks() if cfg.run.check else [])]


def _check_ranks(cfg: Config, train: Dataset, ranks: list[tuple[int, int]], device: torch.device) -> None:
    """Raise UserError if a batch does not divide among the ranks, or there are too few rows or GPUs for them."""
    batch_size = cfg.data.batch_size
    for n_ranks, n_local in ranks:
        divisor = n_ranks * cfg.optim.accumulation_steps
        if batch_size % divisor:
            raise UserError(
                f"data.batch_size is {batch_size}; it should be a multiple of {divisor} ({n_ranks} ranks x "
                f"optim.accumulation_steps {cfg.optim.accumulation_steps})"
            )
        canonical_ranks = cfg.data.canonical_ranks
        if canonical_ranks != "auto" and (canonical_ranks % n_ranks or batch_size % canonical_ranks):
            raise UserError(
                f"data.canonical_ranks is {canonical_ranks}; it should be a multiple of {n_ranks} (ranks) that divides "
                f"{batch_size} (data.batch_size), or auto"
            )
        if cfg.dist.strategy == "dp" and (n_ranks > 1 or any(field.is_ragged for field in train.fields.values())):
            raise UserError("dist.strategy is dp, which is for one process and takes no ragged rows: use ddp")
        if device.type == "cuda" and n_local > (n_gpus := torch.cuda.device_count()):
            raise UserError(f"{n_local} processes (PET_NPROC_PER_NODE) for {n_gpus} visible GPUs; use one for each")
    if len(train) < batch_size:
        raise UserError(f"data.batch_size is {batch_size}; use at most {len(train)}, the rows of {train.name}")


def choose_canonical_ranks(data: Data, train: Dataset, n_ranks: int, saved: int | None = None) -> int:
    """The number of canonical ranks. Any number of ranks that divides it sees the same global batches.

    So a resumed run keeps its number, `saved`, on fewer ranks. A new number is a multiple of 8 if the rows allow it, so
    that 1, 2, 4 and 8 ranks divide it. It is no larger, because each canonical rank cuts a block at each border between
    two pools, and both pools read this block.
    """
    if data.canonical_ranks != "auto":
        return data.canonical_ranks
    if saved and saved % n_ranks == 0 and data.batch_size % saved == 0:
        return saved
    wide = lcm(8, n_ranks)
    is_possible = data.batch_size % wide == 0 and wide <= len(train.block_rows)
    return wide if is_possible else n_ranks


def describe(cfg: Config, splits: Splits, sampler: BlockSampler, world: World) -> str:
    """Where the rows are kept, how many move at a time, and how many an epoch has, in words. cfg: without `auto`.

    sampler: of the training rows. Call this before the rows are in memory, because it tells how much memory is free.
    """
    train, n_local = splits.train, max(n for _, n in _ranks(cfg, world))
    memory = measure_memory((train, *splits.val.values()), world.device, n_local)
    key, n_readers = choose_readers(train, cfg.loader, n_local)
    kind = {"num_workers": "worker processes", "num_readers": "reader threads"}[key]
    readers = "" if cfg.data.tier == "device" else f"; {kind} on each rank: {n_readers}"
    fields = ", ".join(f"{name}: {field}" for name, field in train.fields.items())
    lines = [
        f"rows: {train.name} ({fields}) {train.decoding}".rstrip(),
        f"memory: {memory.describe(cfg.data.tier)}",
        f"batches: {sampler.global_batch_size} rows over all ranks, {sampler.batch_size} on each; "
        f"{sampler.pool_batches} are shuffled together{readers}",
    ]
    if isinstance(train.selection, Mixture):
        lines.append(f"each epoch: {train.selection.describe()}")
    elif sampler.total_size < len(train):
        n_rows = f"{sampler.total_size:,} of {len(train):,} rows"
        lines.append(f"each epoch: {n_rows}; the rest does not fill a batch")
    return "\n".join(lines)
