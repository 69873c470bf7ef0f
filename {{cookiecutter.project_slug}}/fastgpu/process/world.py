"""The process group, the device and the rank as one value: nccl between GPUs, gloo between CPUs."""

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgpu.process.config import Dist
from fastgpu.process.launch import HangError, Launch, SharedError, UserError, read_launch, say, warn

__all__ = ["World", "init_distributed"]


class HangWarning:
    """A thread that warns before torch ends this process because another rank has not answered for `dist.timeout_s`.

    With nccl, torch ends the process from C++: no Python code runs any more, and torch's 84 lines of output do not say
    what to do.
    """

    def __init__(self, device: torch.device, timeout_s: float):
        self.seen_s = time.monotonic()
        """When this rank last started an all-reduce of signals, or its device was idle."""
        self._stream = torch.cuda.default_stream(device)
        self._timeout_s = timeout_s
        threading.Thread(target=self._run, name="hang warning", daemon=True).start()

    def _run(self) -> None:
        while (waited_s := time.monotonic() - self.seen_s) < 0.85 * self._timeout_s:
            # If the device is idle, it waits for no rank: the loop waits for rows or a disk.
            if waited_s > 0.5 * self._timeout_s and self._stream.query():
                self.seen_s = time.monotonic()
            time.sleep(self._timeout_s / 20)
        warn(
            f"waiting for another rank for {waited_s:.0f} s; after {self._timeout_s:.0f} s torch ends this process: "
            "look for a rank that is stopped, hangs or failed, or raise dist.timeout_s",
            own=True,
        )


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of ranks, and the device. With one rank, collectives are no-ops."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    hang_warning: HangWarning | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", with_index(self.device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"{self.world_size} x {name}" + (f" over {dist.get_backend()}" if self.world_size > 1 else "")

    def print_once(self, text: str) -> None:
        """Print a text once for the whole job, unless it is empty."""
        if self.is_main and text:
            say(text)

    # Collectives of tensors. The training loop uses only these.

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it. values: on the device of this world."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place. tensors: on the device of this world."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def start_max(self, *values: float) -> Callable[[], list[float]]:
        """Start to compute the maximum of each value over the ranks. Returns a function that reads the maxima.

        On a GPU the host does not wait here. The function waits for the work that was queued before this call, but not
        for later work.
        """
        if self.world_size == 1:
            return lambda: list(values)
        if self.hang_warning:
            self.hang_warning.seen_s = time.monotonic()
        # `fill_` launches kernels. With `torch.tensor([...], device=...)` the host would wait for a copy.
        largest = torch.empty(len(values), dtype=torch.float64, device=self.device)
        for element, value in zip(largest, values, strict=True):
            element.fill_(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if self.device.type == "cpu":
            return largest.tolist
        # This copy to page-locked memory is asynchronous. `largest.tolist()` would wait for all steps that are queued
        # by then, and leave the GPU idle.
        copy = largest.to("cpu", non_blocking=True)
        is_copied = torch.cuda.Event(blocking=True)  # its wait leaves the CPU to the readers
        is_copied.record()

        def read() -> list[float]:
            is_copied.synchronize()
            return copy.tolist()

        return read

    def all_reduce_max(self, value: float) -> float:
        """The largest value of any rank. The host waits for the device."""
        return self.start_max(value)()[0]

    # Collectives of objects, for set-up and end: with nccl, each makes the host wait for the GPU several times.

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks. They are pickled."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 on every rank."""
        return self.all_gather(value)[0]

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """If any rank raises a UserError in this block, every rank raises it as a SharedError.

        The block must not contain a collective: a rank that raises would not take part in it.
        """
        own = ""
        try:
            yield
        except HangError:
            raise  # this process has to exit without its threads, and alone
        except UserError as error:
            own = str(error)
        if errors := [error for error in self.all_gather(own) if error]:
            raise SharedError(errors[0])

    def check_same(self, values: Mapping[str, object], cure: str = "all ranks need the same") -> None:
        """Raise SharedError on every rank if a rank differs from rank 0. values: {name: value}."""
        first, *others = self.all_gather({name: str(value) for name, value in values.items()})
        for rank, other in enumerate(others, 1):
            for name in first | other:
                value, expected = other.get(name), first.get(name)
                if value != expected:
                    raise SharedError(f"{name} is {value} on rank {rank} and {expected} on rank 0; {cure}")


@contextmanager
def init_distributed(
    settings: Dist, launch: Launch | None = None, *, deterministic: bool | None = None
) -> Iterator[World]:
    """Choose the device and its kernels, join the process group, and leave it together with all ranks.

    A single process creates no process group and opens no port. launch: None reads torchrun's environment variables.
    deterministic: see `choose_kernels`; None: torch's defaults. Raises UserError if the device is not available or,
    with gloo, as soon as another rank is gone. With nccl, torch's watchdog ends the process in that case.
    """
    launch = launch or read_launch()
    device = _choose_device(launch, settings.device)
    if deterministic is not None:
        choose_kernels(device, deterministic=deterministic)
    world = World(launch.rank, launch.world_size, launch.local_world_size, device)
    if world.world_size == 1:
        yield world
        return
    # The store of torchrun outlives a restart and still holds the addresses of dead ranks: 18 of 30 restarts failed
    # without this prefix, and none of 24 with the prefix and the orderly end below. Several nodes may count restarts
    # differently; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, set by launch/, gives each attempt its own store.
    prefix = f"attempt{launch.attempt}" if launch.local_world_size == launch.world_size else "attempt"
    timeout = timedelta(seconds=settings.timeout_s)
    gpu = device if device.type == "cuda" else None
    try:
        store = dist.PrefixStore(prefix, next(iter(dist.rendezvous("env://", timeout=timeout)))[0])
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=gpu,
        )
        yield replace(world, hang_warning=HangWarning(gpu, settings.timeout_s)) if gpu else world
        dist.barrier()
    except SharedError as error:
        # The variables in the frames of the traceback hold a DDP module, which holds the process group.
        traceback.clear_frames(error.__traceback__)
        _destroy_process_group()
        raise
    except RuntimeError as error:
        text = str(error)
        if "find_unused_parameters" in text:
            cure = "set dist.find_unused_parameters=true, or remove them"
            raise UserError(f"DDP: the loss does not depend on all parameters of the model; {cure}") from None
        # gloo raises a plain RuntimeError. Its message contains a path of gloo's sources.
        is_gloo = "/gloo/" in text
        if not isinstance(error, dist.DistError) and not is_gloo:
            raise
        lost = "the other ranks are gone or hang; see the message of the rank that failed, or raise dist.timeout_s"
        # Errors of NCCL end with their cause, such as two ranks on one GPU.
        *_, cause = ["", *text.partition("Exception raised from")[0].strip().splitlines()]
        raise UserError(lost if is_gloo or not cause else f"{cause}; if there is no other cause, {lost}") from None
    _destroy_process_group()


def _destroy_process_group() -> None:
    """End the process group and its threads while Python still runs: gloo's threads would abort the process later.

    Every rank has to call this: with nccl it finishes queued collectives, and would wait for a rank that left.
    """
    # A DDP module, which is part of a reference cycle, still holds the group.
    gc.unfreeze()
    gc.collect()
    dist.destroy_process_group()


def _choose_device(launch: Launch, device: str) -> torch.device:
    n_gpus = torch.cuda.device_count()
    if device == "cuda" and not n_gpus:
        raise SharedError(f"dist.device is cuda, but torch {torch.__version__} sees no GPU; look at nvidia-smi")
    if device == "cpu" or not n_gpus:
        return torch.device("cpu")
    if launch.local_world_size > n_gpus:
        raise SharedError(f"{launch.local_world_size} processes for {n_gpus} visible GPUs; use --nproc-per-node=gpu")
    chosen = torch.device("cuda", launch.local_rank)
    # Set before the first allocation: otherwise every rank would hold memory on GPU 0.
    torch.cuda.set_device(chosen)
    return chosen


def with_index(device: torch.device) -> torch.device:
    """The device with its index: `cuda` alone means the current GPU. torch.cuda.set_device requires an index."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def choose_kernels(device: torch.device, *, deterministic: bool) -> None:
    """Let a GPU use its fastest kernels, or only kernels that give the same bits in every run.

    Call this before NCCL starts, because NCCL reads its algorithms only once.
    """
    is_fast = device.type == "cuda" and not deterministic
    # cuDNN tries the kernels of each convolution once, and keeps the fastest.
    torch.backends.cudnn.benchmark = is_fast
    # "high": float32 matrix products use TF32, which rounds their factors to 10 bits of mantissa.
    torch.set_float32_matmul_precision("high" if is_fast else "highest")
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # Without this variable torch refuses matrix products on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # NVLink SHARP sums gradients in an order that changes (https://github.com/NVIDIA/nccl/issues/1497).
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
