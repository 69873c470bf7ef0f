"""What `auto` in the config becomes, and whether the numbers that a person chose fit together.

Every function raises UserError with the key, the value, what is allowed and the cure.
"""

import os
from math import lcm
from pathlib import Path
from typing import Literal

import psutil
import torch

from .launch import UserError

Auto = Literal["auto"]
Tier = Literal["device", "host", "disk"]
POOL_BYTES = 256 << 20  # 128 blocks of 2 MiB: with so many, a pool of a file in class order still looks shuffled


def rank_batch(batch_rows: int, ranks: int, accumulation: int, rows: int, name: str) -> int:
    """Rows of one optimizer step on one rank."""
    if batch_rows % (ranks * accumulation):
        raise UserError(
            f"data.batch_rows is {batch_rows}; it should be a multiple of {ranks * accumulation} "
            f"({ranks} ranks x optim.accumulation {accumulation})"
        )
    if rows < batch_rows:
        raise UserError(f"data.batch_rows is {batch_rows}, but {name} has {rows:,} rows; use at most {rows}")
    return batch_rows // ranks


def lanes(lanes: int | Auto, batch_rows: int, ranks: int, blocks: int, name: str) -> int:
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


def pool_batches(pool_batches: int | Auto, batch_rows: int, row_bytes: int, rows: int) -> int:
    """`auto`: 256 MiB over all ranks, so that the order does not depend on their number; at most all rows."""
    if pool_batches != "auto":
        return pool_batches
    return max(1, min(rows, POOL_BYTES // row_bytes) // batch_rows)


def readers(readers: int | Auto, local_ranks: int) -> int:
    """`auto`: the CPUs this process may use, shared by the ranks of this machine, at most 8."""
    if readers != "auto":
        return readers
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    return max(1, min(8, cpus // local_ranks))


def tier(tier: Tier | Auto, need_bytes: int, device: torch.device, local_ranks: int, name: str) -> tuple[Tier, str]:
    """The tier, and a sentence with the numbers. `auto`: the nearest one that the rows fill at most by half.

    The other half is for the model, its gradients and the optimizer. All tiers give the same batches: ranks need not
    agree.
    """
    host = free_host_bytes() // local_ranks
    free = {"device": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host, "host": host}
    if tier == "auto":
        tier = next((near for near in ("device", "host") if need_bytes <= free[near] / 2), "disk")
    elif tier != "disk" and need_bytes > free[tier]:
        raise UserError(
            f"data.tier is {tier}, but {name} needs {_size(need_bytes)} a rank and {_size(free[tier])} are free; "
            "use data.tier=disk"
        )
    room = f"free for each rank: {_size(free['device'])} on the device, {_size(host)} in RAM"
    return tier, f"{name}: {_size(need_bytes)} with validation, on the {tier} tier ({room})"  # type: ignore[return-value]


def free_host_bytes() -> int:
    """RAM that this process may still take: the machine's, or its cgroup's where that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _size(n_bytes: float) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.1f} MiB"
