"""How rows move on this machine: a number for each `auto` of the config, if all of its numbers fit together."""

import sys
from collections.abc import Mapping
from math import lcm
from typing import Literal, NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.loader import Passes
from fastgpu.process import config
from fastgpu.process.config import Auto, Config, Tier
from fastgpu.process.launch import UserError, planned_ranks, warn
from fastgpu.process.machine import available_cpus, format_bytes, free_host_bytes
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import MAX_VALUES
from fastgpu.rows.selection import Mixture

POOL_BYTES = 256 << 20
"""Size of a pool if data.pool_batches is auto: 128 blocks of 2 MiB. They shuffle a file well that is in random order,
but not one in class order."""
MAX_POOL_ROWS = 8 << 20
"""Maximum number of rows of such a pool. To plan so many takes a third of a second, in which no row is read."""
MAX_READERS = 8
"""Maximum number of threads that copy rows, if loader.num_readers is auto. Decoding takes all CPUs of a rank."""
REMOTE_READERS = 64
"""Threads that read from a bucket, if loader.num_readers is auto. They wait for most of their time, for the network."""
RESIDENT_SHARE = 0.5
"""Share of the free memory that data.tier=auto fills with rows. The rest is for the model and its gradients."""


class Sizes(NamedTuple):
    """The numbers that say how rows move. No `auto` is left."""

    batch_size: int
    """Rows of one optimizer step on one rank."""
    canonical_ranks: int
    """Any world size that divides this number sees the same global batches."""
    pool_batches: int
    tier: Tier
    n_readers: int
    """Reader threads of a rank, or worker processes if the rows come from a Dataset."""
    readers_key: Literal["num_readers", "num_workers"] = "num_readers"
    """The key of section `loader` that sets their number."""
    passes: Passes = Passes()
    memory: str = ""
    """The memory that the rows need, where they are kept, and what is free, in words."""

    @property
    def chosen(self) -> dict[str, dict[str, object]]:
        """{section: values that were chosen}"""
        data: dict[str, object] = {"tier": self.tier, "pool_batches": self.pool_batches}
        return {"data": data, "loader": {self.readers_key: self.n_readers}}


class Data(NamedTuple):
    """The rows to train and to validate on. The loop needs only their batches; model.json and diagnose.py need more."""

    train: Dataset
    val: Dataset
    sizes: Sizes

    def describe(self, sampler: BlockSampler) -> str:
        """Where the rows are kept, how many move at a time, and how many an epoch has. sampler: of the training."""
        train, sizes = self.train, self.sizes
        kind = "worker processes" if sizes.readers_key == "num_workers" else "reader threads"
        readers = "" if sizes.tier == "device" else f"; {kind} on each rank: {sizes.n_readers}"
        fields = ", ".join(f"{name}: {field}" for name, field in train.fields.items())
        lines = [
            f"rows: {train.name} ({fields}) {train.decoding}".rstrip(),
            f"memory: {sizes.memory}",
            f"batches: {sampler.global_batch_size} rows over all ranks, {sizes.batch_size} on each; "
            f"{sizes.pool_batches} are shuffled together{readers}",
        ]
        if isinstance(train.selection, Mixture):
            lines.append(f"each epoch: {train.selection.describe()}")
        elif sampler.total_size < len(train):
            n_rows = f"{sampler.total_size:,} of {len(train):,} rows"
            lines.append(f"each epoch: {n_rows}; the rest does not fill a batch")
        return "\n".join(lines)


def choose_sizes(cfg: Config, source: Dataset, val_source: Dataset, world: World) -> Sizes:
    """The sizes of a training run on this machine. source, val_source: training and validation rows.

    Raises UserError if the numbers do not fit together.
    """
    data, loader = cfg.data, cfg.loader
    # A check is one process, which also finds what the ranks of the job would refuse.
    ranks = [(world.world_size, world.local_world_size), *(planned_ranks() if cfg.run.check else [])]
    n_local = max(n for _, n in ranks)  # they share the memory and the CPUs of this machine
    for n_ranks, _ in ranks:
        divisor = n_ranks * cfg.optim.accumulation_steps
        if data.batch_size % divisor:
            raise UserError(
                f"data.batch_size is {data.batch_size}; it should be a multiple of {divisor} ({n_ranks} ranks x "
                f"optim.accumulation_steps {cfg.optim.accumulation_steps})"
            )
        if cfg.dist.strategy == "dp" and (n_ranks > 1 or any(field.is_ragged for field in source.fields.values())):
            raise UserError("dist.strategy is dp, which is for one process and takes no ragged rows: use ddp")
    if world.device.type == "cuda" and n_local > (n_gpus := torch.cuda.device_count()):
        raise UserError(f"{n_local} processes (PET_NPROC_PER_NODE) for {n_gpus} visible GPUs; use one for each")
    if len(source) < data.batch_size:
        raise UserError(f"data.batch_size is {data.batch_size}; use at most {len(source)}, the rows of {source.name}")
    wide = lcm(8, world.world_size)  # so that 1, 2, 4 and 8 ranks see the same batches
    is_possible = data.batch_size % wide == 0 and wide <= len(source.block_rows)
    canonical_ranks = wide if is_possible else world.world_size
    pool_rows = min(len(source), POOL_BYTES // source.row_bytes, MAX_POOL_ROWS)  # of all ranks: so is the order
    pool_batches = max(1, pool_rows // data.batch_size) if data.pool_batches == "auto" else data.pool_batches
    if pool_batches < len(source) // data.batch_size:
        _warn_of_class_order(source)
    has_items = isinstance(source, ItemDataset)
    asked = loader.num_workers if has_items else loader.num_readers
    if asked == "auto" and not source.is_local:
        asked = REMOTE_READERS
    max_readers = sys.maxsize if has_items or source.decoding else MAX_READERS
    need = sum(len(each) * each.row_bytes for each in (source, val_source))
    free_host = free_host_bytes() // n_local
    free_device = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else free_host
    free = {"device": free_device, "host": free_host}
    tier = choose_tier(data, (source, val_source), need, free)
    return Sizes(
        batch_size=data.batch_size // world.world_size,
        canonical_ranks=canonical_ranks,
        pool_batches=pool_batches,
        tier=tier,
        n_readers=count_readers(asked, n_local, max_readers),
        readers_key="num_workers" if has_items else "num_readers",
        passes=Passes(data.echo, cfg.train.epochs),
        memory=_describe_memory(need, tier, free),
    )


def count_readers(asked: int | Auto, local_world_size: int, max_readers: int = sys.maxsize) -> int:
    """Threads or processes of a rank. auto: as many as it has CPUs, and at most `max_readers`."""
    return max(1, min(max_readers, available_cpus() // local_world_size)) if asked == "auto" else asked


def choose_tier(data: config.Data, sources: tuple[Dataset, Dataset], need: int, free: Mapping[str, int]) -> Tier:
    """auto: the nearest tier of which the rows fill at most half. All tiers give the same batches: ranks may differ.

    need: bytes of the rows. free: {"device": bytes, "host": bytes} for each rank.
    """
    tier = data.tier
    train, val = sources
    if tier == "disk":
        return tier
    reason = _why_not_kept(train, data) or _why_not_kept(val, data)
    if tier == "auto":
        may_stay = not reason and not isinstance(train, ItemDataset)  # whose items may be drawn anew in each epoch
        near: tuple[Tier, ...] = ("device", "host")
        return next((each for each in near if may_stay and need <= RESIDENT_SHARE * free[each]), "disk")
    if need > free[tier]:
        reason = f"{train.name} needs {format_bytes(need)} a rank and {format_bytes(free[tier])} are free"
    if reason:
        raise UserError(f"data.tier is {tier}, but {reason}; use data.tier=disk")
    if isinstance(train, ItemDataset):
        warn(
            f"data.tier is {tier}: the items of {train.name} are read once, so what they draw at random is the same "
            "in each epoch; data.tier=disk reads them anew"
        )
    return tier


def _why_not_kept(source: Dataset, data: config.Data) -> str:
    """Why the rows cannot stay on the device or the host. Empty: they can."""
    if source.decoding and data.min_crop_scale < 1:
        return f"each epoch decodes other parts of the images of {source.name} (data.min_crop_scale)"
    for name, field in source.fields.items():
        if field.is_ragged and name not in source.stored_lengths:
            return f"nobody knows how many values {name} of {source.name} have before they are read"
        if field.is_ragged and source.stored_lengths[name].sum(dtype=np.int64) > MAX_VALUES:
            return f"{source.name} has more than {MAX_VALUES:,} values of {name}"
    return ""


def _describe_memory(need: int, tier: Tier, free: Mapping[str, int]) -> str:
    kept = {"device": "kept on the device", "host": "kept in RAM", "disk": "read from disk"}[tier]
    text = f"{format_bytes(free['host'])} in RAM"
    if free["device"] != free["host"]:  # the device is not the CPU
        text = f"{format_bytes(free['device'])} on its device, {text}"
    return f"{format_bytes(need)} for all rows, {kept}; free for each rank: {text}"


def class_labels(source: Dataset) -> np.ndarray | None:
    """(rows,) whole numbers: the field `labels` of all rows. None: there is no such field in memory."""
    labels = source.stored_column("labels")
    return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "bui" else None


def _warn_of_class_order(source: Dataset) -> None:
    """Warn if neighbouring rows share their label far more often than by chance."""
    labels = class_labels(source)
    if labels is None or source.block_rows.max() == 1:
        return
    sample = np.random.default_rng(0).integers(0, len(labels) - 1, 100_000)
    shared = float((labels[sample] == labels[sample + 1]).mean())
    by_chance = float((labels[sample] == np.roll(labels[sample], 1)).mean())
    if shared > (1 + by_chance) / 2:
        warn(
            f"{source.name} is sorted by class: {shared:.0%} of neighbouring rows share a label. Pools cannot mix "
            "that: `python convert.py repack` writes the rows in random order"
        )
