"""The process group, the device and the rank as one value: nccl on CUDA, gloo on a CPU."""

import gc
import re
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgpu.process.config import Dist
from fastgpu.process.launch import HangError, Launch, RankError, UserError, read_launch

NOTICE_S = 2.0
"""How long a rank that has lost the others waits for each of them to notice it, too: the ones that do not are named."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the job. Collectives do nothing when it is alone."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"{self.world_size} x {name}" + (f" over {dist.get_backend()}" if self.world_size > 1 else "")

    def print_once(self, text: str) -> None:
        """Print once for the whole job, if there is something to print."""
        if self.is_main and text:
            print(text, flush=True)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place. values: on the device of this world."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, value: float) -> float:
        """The largest value of any rank."""
        return max(self.all_gather(value))

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks (pickled, only among the processes of this job)."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 on every rank."""
        return self.all_gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """If any rank raises a UserError in this block, every rank raises it.

        The block must not contain a collective: a rank that raises would not take part in it.
        """
        own = ""
        try:
            yield
        except HangError:
            raise  # a process that is to end by force ends alone
        except UserError as error:
            own = str(error)
        if errors := [error for error in self.all_gather(own) if error]:
            raise UserError(errors[0])

    def check_same(self, values: Mapping[str, object], cure: str = "all ranks need the same") -> None:
        """Raise UserError on every rank if a rank has another value than rank 0. values: {name: value}."""
        first, *others = self.all_gather({name: str(value) for name, value in values.items()})
        for rank, other in enumerate(others, 1):
            for name in first | other:
                value, expected = other.get(name), first.get(name)
                if value != expected:
                    raise UserError(f"{name} is {value} on rank {rank} and {expected} on rank 0; {cure}")


@contextmanager
def init_distributed(settings: Dist, launch: Launch | None = None) -> Iterator[World]:
    """Choose the device, join the process group, and leave it in order at the end.

    A single process creates no process group and opens no port. launch: None stands for what torchrun says. Raises
    UserError if the device is not available.
    """
    launch = launch or read_launch()
    device = _choose_device(launch, settings.device)
    world = World(launch.rank, launch.world_size, launch.local_world_size, device)
    if world.world_size == 1:
        yield world
        return
    # The store of torchrun outlives a restart and still holds the addresses of dead ranks: 18 of 30 restarts failed
    # without this prefix and none of 24 with it and the orderly end below. Several nodes may count restarts
    # differently; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each restart its own store (launch/ sets it).
    prefix = f"attempt{launch.attempt}" if launch.local_world_size == launch.world_size else "attempt"
    timeout = timedelta(seconds=settings.timeout_s)
    store = dist.PrefixStore(prefix, next(iter(dist.rendezvous("env://", timeout=timeout)))[0])
    gpu = device if device.type == "cuda" else None
    backend = "nccl" if gpu else "gloo"
    try:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=gpu
        )
        yield world
        dist.barrier()
    except UserError as error:
        if not isinstance(error, RankError):  # raised on every rank, see `together`
            traceback.clear_frames(error.__traceback__)  # they hold what `_leave` collects
            _leave()
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not re.search("gloo|NCCL", str(error)):
            raise
        silent = _silent_ranks(store, world)
        which = f": {silent} hangs or is gone" if silent else ""
        raise RankError(
            f"rank {world.rank} lost the others{which}; see which failed, or raise dist.timeout_s"
        ) from None
    _leave()


def _silent_ranks(store: dist.Store, world: World) -> str:
    """The ranks that do not notice in NOTICE_S that others are lost: each hangs, or is gone. "" if it is not known."""
    silent: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):  # the store is lost, too
            store.set(f"lost by {world.rank}", "")
            time.sleep(NOTICE_S)
            silent.extend(f"rank {rank}" for rank in range(world.world_size) if not store.check([f"lost by {rank}"]))

    thread = threading.Thread(target=ask, daemon=True)  # the process that holds the store may hang itself
    thread.start()
    thread.join(2 * NOTICE_S)
    return " and ".join(silent)


def _leave() -> None:
    """End the group and its threads while Python still runs: a thread of gloo aborts the process if it outlives it."""
    gc.collect()  # a DDP module still holds the group
    dist.destroy_process_group()


def _choose_device(launch: Launch, device: str) -> torch.device:
    n_gpus = torch.cuda.device_count()
    if device == "cuda" and not n_gpus:
        raise UserError(f"dist.device is cuda, but torch {torch.__version__} sees no GPU; look at nvidia-smi")
    if device == "cpu" or not n_gpus:
        return torch.device("cpu")
    if launch.local_world_size > n_gpus:
        raise UserError(f"{launch.local_world_size} processes for {n_gpus} visible GPUs; use --nproc-per-node=gpu")
    chosen = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(chosen)  # before anything allocates, or every rank would hold memory on GPU 0
    return chosen
