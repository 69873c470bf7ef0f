"""What `auto` in the config becomes, and whether the numbers that a person chose fit together.

Every function raises UserError with the key, the value, what is allowed and the cure.
"""

import shutil
from math import lcm
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fastgpu.process.launch import UserError
from fastgpu.process.machine import _size, cpus, free_host_bytes
from fastgpu.rows.contract import Source
from fastgpu.rows.field import MOST_VALUES
from fastgpu.storage.inspection import warn_of_class_order

Auto = Literal["auto"]
Tier = Literal["device", "host", "disk"]
POOL_BYTES = 256 << 20  # 128 blocks of 2 MiB: with so many, a pool of a file in class order still looks shuffled


class Sizes(NamedTuple):
    """Every number that says how rows move, resolved."""

    batch_rows: int
    """Of a rank, a step."""
    lanes: int
    pool_batches: int
    readers: int
    """Threads, or worker processes of a Dataset."""
    readers_are_open: bool
    """Whether the config leaves their number to `tune.settle_readers`; it begins with this rank's share of the CPUs."""
    who: str
    """What the readers are."""
    tier: Tier
    told: str
    note: str = ""

    @property
    def text(self) -> str:
        """What a person is told of it."""
        return f"{self.told}; {self.who}: {self.readers}{self.note}"


def sizes(
    train: Source,
    val: Source,
    ranks: int,
    local_ranks: int,
    device: torch.device,
    accumulation: int,
    tier: Tier | Auto,
    batch_rows: int,
    lanes: int | Auto,
    pool_batches: int | Auto,
    readers: int | Auto,
    workers: int | Auto,
    prefetch_factor: int,
    prefetch_pools: int,
) -> Sizes:
    """What the config asks for on this machine, all checked."""
    a_rank = choose_rank_batch(batch_rows, ranks, accumulation, len(train), train.name)
    lanes = choose_lanes(lanes, batch_rows, ranks, len(train.block_rows), train.name)
    pool_batches = choose_pool_batches(pool_batches, batch_rows, train.row_bytes, len(train))
    need_bytes = len(train) * train.row_bytes + len(val) * val.row_bytes
    values = [int(lengths.sum(dtype=np.int64)) for each in (train, val) for lengths in each.lengths.values()]
    streams = train.in_workers or max(values, default=0) > MOST_VALUES
    tier, text = choose_tier(tier, need_bytes, device, local_ranks, train.name, streams)
    asked: int | Auto = readers
    if train.in_workers:
        readers = choose_workers(workers, prefetch_factor, a_rank * train.row_bytes, local_ranks)
    else:
        readers = choose_readers(readers, local_ranks)
    who, is_open = ("worker processes", workers) if train.in_workers else ("reader threads", asked)
    text += f"\na step: {batch_rows} rows, {a_rank} a rank; a pool: {pool_batches} steps; {lanes} lanes"
    note = warn_of_class_order(train, pool_batches * batch_rows)
    if tier == "device" and prefetch_pools != 2:
        note = f"\ndata.prefetch_pools has no effect on the device tier{note}"
    return Sizes(a_rank, lanes, pool_batches, readers, is_open == "auto", who, tier, text, note)


def resolved(sizes: Sizes, in_workers: bool, precision: str) -> dict[str, Any]:
    """The keys of the config that they answer."""
    found = {"lanes": sizes.lanes, "pool_batches": sizes.pool_batches, "tier": sizes.tier}
    readers = {"loader.workers": sizes.readers} if in_workers else {"data.readers": sizes.readers}
    return {f"data.{name}": value for name, value in found.items()} | readers | {"train.precision": precision}


def choose_rank_batch(batch_rows: int, ranks: int, accumulation: int, rows: int, name: str) -> int:
    """Rows of one optimizer step on one rank."""
    if batch_rows % (ranks * accumulation):
        raise UserError(
            f"data.batch_rows is {batch_rows}; it should be a multiple of {ranks * accumulation} "
            f"({ranks} ranks x optim.accumulation {accumulation})"
        )
    if rows < batch_rows:
        raise UserError(f"data.batch_rows is {batch_rows}, but {name} has {rows:,} rows; use at most {rows}")
    return batch_rows // ranks


def choose_lanes(lanes: int | Auto, batch_rows: int, ranks: int, blocks: int, name: str) -> int:
    """`auto`: a multiple of 8 where it divides the global batch, so that 1, 2, 4 and 8 ranks see the same batches."""
    if blocks < ranks:
        raise UserError(
            f"{ranks} ranks are more than the {blocks} blocks (chunks) of {name}; use at most {blocks} ranks, "
            "or write the file with smaller chunks"
        )
    if lanes == "auto":
        wide = lcm(8, ranks)
        return wide if batch_rows % wide == 0 and wide <= blocks else ranks
    if lanes % ranks or batch_rows % lanes:
        raise UserError(
            f"data.lanes is {lanes}; it should be auto, or a multiple of the {ranks} ranks that divides "
            f"data.batch_rows ({batch_rows})"
        )
    return lanes


def choose_pool_batches(pool_batches: int | Auto, batch_rows: int, row_bytes: int, rows: int) -> int:
    """`auto`: 256 MiB over all ranks, so that the order does not depend on their number; at most all rows."""
    if pool_batches != "auto":
        return pool_batches
    return max(1, min(rows, POOL_BYTES // row_bytes) // batch_rows)


def choose_readers(readers: int | Auto, local_ranks: int) -> int:
    """`auto`: this rank's share of the machine's CPUs, at most 8; `tune.settle_readers` begins with it."""
    return max(1, min(8, cpus() // local_ranks)) if readers == "auto" else readers


def choose_workers(
    workers: int | Auto, prefetch_factor: int, batch_bytes: int, local_ranks: int, shm: str = "/dev/shm"
) -> int:
    """Worker processes of a Dataset. `auto`: the CPUs this process may use, shared by the ranks of this machine.

    Their batches travel through shared memory, which a container has little of: raises UserError if they do not fit.
    """
    chosen = max(1, cpus() // local_ranks) if workers == "auto" else workers
    need = 2 * chosen * prefetch_factor * batch_bytes * local_ranks  # of training and validation
    free = shutil.disk_usage(shm).free if Path(shm).exists() else need
    if need > free:
        raise UserError(
            f"loader.workers is {chosen}, loader.prefetch_factor {prefetch_factor}: their batches take {_size(need)} "
            f"of {shm}, where {_size(free)} are free; lower one of them or data.batch_rows, or enlarge it (docker run "
            "--shm-size=16g; in Kubernetes an emptyDir with medium: Memory)"
        )
    return chosen


def choose_tier(
    tier: Tier | Auto, need_bytes: int, device: torch.device, local_ranks: int, name: str, streams: bool = False
) -> tuple[Tier, str]:
    """The tier, and a sentence with the numbers. `auto`: the nearest one that the rows fill at most by half.

    The other half is for the model, its gradients and the optimizer. All tiers give the same batches: ranks need not
    agree. streams: `auto` keeps no rows, as they may differ from epoch to epoch (a Dataset that augments), or have more
    values than offsets of 32 bits can count.
    """
    host = free_host_bytes() // local_ranks
    free = {"device": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host, "host": host}
    if tier == "auto":
        near: tuple[Tier, ...] = () if streams else ("device", "host")
        tier = next((each for each in near if need_bytes <= free[each] / 2), "disk")
    elif tier != "disk" and need_bytes > free[tier]:
        raise UserError(
            f"data.tier is {tier}, but {name} needs {_size(need_bytes)} a rank and {_size(free[tier])} are free; "
            "use data.tier=disk"
        )
    room = f"free for each rank: {_size(free['device'])} on the device, {_size(host)} in RAM"
    return tier, f"{name}: {_size(need_bytes)} with validation, on the {tier} tier ({room})"  # type: ignore[return-value]
