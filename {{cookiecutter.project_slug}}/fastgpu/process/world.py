"""The process group, the device and the rank as one value; nccl on CUDA, gloo on a CPU."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch._dynamo  # DDP imports it anyway; imported once the group exists, it keeps the group alive past `_leave`
import torch.distributed as dist
from torch import Tensor, nn

from fastgpu.process.launch import Launch, UserError


@dataclass(frozen=True)
class World:
    """This process among all of them. Every collective is a no-op when it is alone."""

    rank: int
    size: int
    local_size: int
    device: torch.device
    local_rank: int = 0
    """Among the ranks of this machine."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def gpus(self) -> list[str] | None:
        """UUIDs of the GPUs of this machine's ranks, in their order; None for all of them but the first.

        Their numbers are not NVML's where CUDA_VISIBLE_DEVICES hides or reorders some; a MIG slice has its own UUID.
        """
        if self.local_rank:
            return None
        count = self.local_size if self.device.type == "cuda" else 0
        return [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]

    def __str__(self) -> str:
        if self.device.type == "cuda":
            return f"{self.size} x {torch.cuda.get_device_name(self.device)}" + (" over nccl" if self.size > 1 else "")
        return f"{self.size} CPU process" + ("es over gloo" if self.size > 1 else "")

    def say(self, text: str | None) -> None:
        """Print once for the whole job, if there is something to say."""
        if self.is_first and text:
            print(text, flush=True)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place; values on the world's device."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: float) -> float:
        """The largest value of any rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank (pickled: only among this job's own processes)."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What a person can fix and any rank meets in this block, every rank raises: none is left waiting for it.

        The block must hold no collective: a rank that raises would not take part.
        """
        mine = None
        try:
            yield
        except UserError as error:
            mine = str(error)
        errors = [mine]
        if self.size > 1:
            errors = [None] * self.size
            dist.all_gather_object(errors, mine)
        first = next((error for error in errors if error), None)
        if first:
            raise UserError(first)

    def agree(self, value: Any, cure: str) -> None:
        """Raise UserError on every rank if a rank's value is not rank 0's."""
        first = self.from_first(value)
        with self.together():
            if value != first:
                raise UserError(f"rank {self.rank} has {value}, rank 0 has {first}; {cure}")

    def each(self, value: float) -> list[float]:
        """The value of every rank."""
        values = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        return self.sum(values).tolist()

    def by_machine(self, values: dict[str, float]) -> dict[str, float]:
        """The values of every machine's first rank: those of rank 0 by their names, others' as `machine1/<name>`."""
        if self.size == self.local_size:
            return values
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.local_rank == 0, values))
        machines = [of_rank for speaks, of_rank in found if speaks]
        return {f"machine{number}/{name}" if number else name: value
                for number, of_rank in enumerate(machines) for name, value in of_rank.items()}  # fmt: skip

    def require(self, holds: bool, otherwise: str) -> None:
        """Raise UserError(otherwise) on every rank if it does not hold on one."""
        with self.together():
            if not holds:
                raise UserError(otherwise)

    def reseed(self, *numbers: int) -> torch.Generator:
        """Seed every generator from the numbers and the rank; returns the device's.

        Called once a pool: a resumed run draws what an uninterrupted one would, with no state in the checkpoint.
        """
        seed = 0
        for number in (*numbers, self.rank):
            seed = (seed * 1_000_003 + number + 1) % (1 << 63)
        cpu = torch.manual_seed(seed)
        return torch.cuda.default_generators[self.device.index] if self.device.type == "cuda" else cpu

    def average_buffers(self, model: nn.Module) -> None:
        """Make the ranks' running statistics (batch norm) one: their mean. Before evaluating and saving."""
        for buffer in model.buffers():
            if self.size > 1 and buffer.is_floating_point():
                self.sum(buffer).div_(self.size)


@contextmanager
def join(launch: Launch, device: Literal["auto", "cuda", "cpu"], timeout_s: int) -> Iterator[World]:
    """Become a rank: choose the device, meet the others, and part from them in order at the end.

    Alone, no process group exists and no port is opened. Raises UserError if the device is not to be had.
    """
    chosen = _choose_device(launch, device)
    world = World(launch.rank, launch.size, launch.local_size, chosen, launch.local_rank)
    if world.size == 1:
        yield world
        return
    # torchrun's store outlives a restart and still holds the dead ranks' addresses: 18 of 30 restarts failed without
    # this prefix, none of 24 with it and the orderly end below. Several nodes may count restarts differently; there
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each restart a store of its own (launch/ sets it).
    prefix = f"attempt{launch.attempt}" if launch.local_size == launch.size else "attempt"
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    try:
        yield world
        dist.barrier()
    except UserError as error:  # on every rank, see `together`
        traceback.clear_frames(error.__traceback__)
        _leave()
        raise
    _leave()


def _leave() -> None:
    """End the group and its threads while Python still runs: a thread that gloo leaves behind wants the interpreter to
    free its last tensor, and aborts the process if that has gone (1 run in 12 did)."""
    gc.collect()  # a DDP module still holds the group
    dist.destroy_process_group()


def _choose_device(launch: Launch, device: str) -> torch.device:
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError(
            f"dist.device is cuda, but torch {torch.__version__} sees no GPU; install a CUDA build, "
            "check nvidia-smi, or use dist.device=cpu"
        )
    if device == "cpu" or not gpus:
        return torch.device("cpu")
    if launch.local_size > gpus:
        raise UserError(
            f"{launch.local_size} processes on a machine with {gpus} visible GPUs; use --nproc-per-node=gpu"
        )
    chosen = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(chosen)  # before anything allocates, or every rank would hold memory on GPU 0
    return chosen
