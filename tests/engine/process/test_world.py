import os
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from fastgpu.diagnose.ceilings import Meter
from fastgpu.process import world as world_module
from fastgpu.process.config import Dist
from fastgpu.process.launch import Launch, SharedError, UserError, warn
from fastgpu.process.seeds import reseed
from fastgpu.process.world import HangWarning, World, choose_kernels, init_distributed
from support.ranks import ALONE, CPU, in_world, needs_gpu, no_host_sync


def error_of(function: Callable[..., None], *arguments: Any) -> str:
    """The message of the SharedError that a function raises."""
    with pytest.raises(SharedError) as error:
        function(*arguments)
    return str(error.value)


def use_collectives(world: World) -> list[Any]:
    total = world.all_reduce_sum(torch.tensor([1.0 + world.rank])).item()
    gathered = world.all_gather(world.rank + 0.5)
    largest = world.start_max(world.rank, -world.rank)()
    return [total, largest, world.all_reduce_max(float(world.rank)), gathered, world.broadcast(f"rank {world.rank}")]


def raise_on_one_rank(world: World) -> None:
    with world.raise_on_all_ranks():
        if world.rank == 1:
            raise UserError("disk of rank 1 is full")


def use_world(world: World) -> dict[str, Any]:
    world.check_same({"optim.lr": 0.1, "run.seed": 0})
    store = dist.distributed_c10d._get_default_store().underlying_store
    store.set(f"rank {world.rank}", "here")
    return {
        "raised": error_of(raise_on_one_rank, world),
        "collectives afterwards": use_collectives(world),
        "other value": error_of(world.check_same, {"run.seed": world.rank, "x": world.rank}, "share it"),
        "value of one rank": error_of(world.check_same, {"x.py": "ab"} if world.rank else {}),
        "key in this attempt": store.underlying_store.get(f"attempt0/rank {world.rank}"),
    }


def test_world_two_ranks_share_values_and_errors():
    for rank in in_world(2, use_world):
        assert rank == {
            "raised": "disk of rank 1 is full",
            "collectives afterwards": [3.0, [1, 0], 1.0, [0.5, 1.5], "rank 0"],
            "other value": "run.seed is 1 on rank 1 and 0 on rank 0; share it",
            "value of one rank": "x.py is ab on rank 1 and None on rank 0; all ranks need the same",
            "key in this attempt": b"here",
        }
    assert use_collectives(ALONE) == [1.0, [0, 0], 0.0, [0.5], "rank 0"]
    assert not dist.is_initialized()


def test_world_sync_mode_is_reset(monkeypatch):
    """Whatever torch or the work says: otherwise each later wait of the process would be an error or a warning."""
    mode = "new"

    def set_mode(name: str) -> None:
        nonlocal mode
        is_first, mode = mode == "new", name
        if is_first:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def divide() -> None:
        assert mode == "warn"
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings(action="error"), no_host_sync():
        assert mode == "error"
    assert mode == "default"
    with pytest.raises(ZeroDivisionError):
        Meter(World(0, 1, 1, torch.device("cuda", 0)), 1.0).syncs(divide)
    assert mode == "default"


@pytest.mark.gpu
@needs_gpu
def test_world_maximum_on_a_gpu_does_not_wait():
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        world = World(0, 2, 2, device)  # calls collectives, of a group of one
        world.start_max(0.0, 0.0)()  # the first call allocates page-locked memory
        with no_host_sync():
            read = world.start_max(0.25, 15)
        assert read() == [0.25, 15]
    finally:
        dist.destroy_process_group()


def test_world_prints_once(monkeypatch, capsys):
    for name, text in (("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, text)
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        World(rank, 4, 4, CPU).print_once("a line")
        warn("the file is sorted")
    assert capsys.readouterr().out == "a line\nwarning: the file is sorted\n"
    warn("a worker hangs", own=True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    warn("a worker hangs", own=True)
    assert capsys.readouterr().out == "warning: [rank 3] a worker hangs\nwarning: a worker hangs\n"


def test_world_missing_gpus_are_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with init_distributed(Dist(), Launch()) as world:
        assert world.device == CPU
    for n_gpus, launch, message in (
        (0, Launch(), "dist.device is cuda, but torch .* sees no GPU; look at nvidia-smi"),
        (2, Launch(2, 3, 2, 3), "3 processes for 2 visible GPUs"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n_gpus=n_gpus: n_gpus)
        with pytest.raises(UserError, match=message), init_distributed(Dist(device="cuda"), launch):
            pass


@pytest.fixture
def destroyed(monkeypatch) -> list[str]:
    """Lets the first of two ranks enter its world without a process group. Gets a word when the group is destroyed."""
    destroyed: list[str] = []
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append("destroyed"))
    return destroyed


def join() -> AbstractContextManager[World]:
    return init_distributed(Dist(device="cpu"), Launch(0, 2, 0, 2))


LOST = "the other ranks are gone or hang; see the message of the rank that failed, or raise dist.timeout_s$"
NCCL = """NCCL error in: /x/ProcessGroupNCCL.cpp:3690, invalid usage, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000
Exception raised from getNCCLComm at /x/ProcessGroupNCCL.cpp:3690 (most recent call first):
frame #0: c10::Error"""
UNUSED = """Expected to have finished reduction in the prior iteration before starting a new one. This error indicates
that your module has parameters that were not used in producing loss. You can enable unused parameter detection by
passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`"""


@pytest.mark.parametrize(
    ("error", "kind", "raised"),
    [
        (SharedError("data.train is x"), SharedError, "data.train is x"),
        (UserError("the disk of this rank is full"), UserError, "the disk of this rank is full"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "mat1 and mat2"),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed"), UserError, f"^{LOST}"),
        (dist.DistBackendError("the communicator was aborted"), UserError, f"^the communicator was aborted; .*{LOST}"),
        (dist.DistBackendError(""), UserError, f"^{LOST}"),
        (dist.DistBackendError(NCCL), UserError, f"^Duplicate GPU detected : .* device 1000; .*{LOST}"),
        (
            RuntimeError(UNUSED),
            UserError,
            "^DDP: the loss does not .*; set dist.find_unused_parameters=true, or remove them$",
        ),
    ],
)
def test_world_errors_that_end_a_rank(destroyed, error, kind, raised):
    with pytest.raises(kind, match=raised), join():
        raise error
    assert destroyed == (["destroyed"] if kind is SharedError else [])


def test_world_ranks_that_never_meet_are_one_line(destroyed, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=dist.DistStoreError("timed out")))
    with pytest.raises(UserError, match=f"^timed out; if there is no other cause, {LOST}"), join():
        pass
    assert not destroyed


class Ended(BaseException):
    """Ends a thread that would look on for ever."""


@pytest.mark.parametrize(
    ("asks_until_s", "is_idle", "hangs_at_s"),
    [
        (0, lambda now_s: False, 0),  # waits from the start
        (200, lambda now_s: False, 200),  # trains before
        (0, lambda now_s: now_s < 300, 300),  # reads rows before
        (0, lambda now_s: now_s % 30 < 5, None),  # saves, or validates
        (1000, lambda now_s: False, None),
    ],
)
def test_world_hang_warning_comes_before_the_end(monkeypatch, capsys, asks_until_s, is_idle, hangs_at_s):
    """A rank that waits for another one, whose process torch would end after 100 s."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    hang_warning = None

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if hang_warning and clock.now <= asks_until_s:
            World(0, 2, 2, CPU, hang_warning).start_max(0.0)
        if clock.now >= 1000:
            raise Ended

    clock.sleep = sleep
    stream = SimpleNamespace(query=lambda: is_idle(clock.now))
    monkeypatch.setattr(world_module, "time", clock)
    monkeypatch.setattr(dist, "all_reduce", Mock())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(threading, "Thread", thread := Mock())
    hang_warning = HangWarning(CPU, 100)
    with suppress(Ended):
        thread.call_args.kwargs["target"]()
    printed = capsys.readouterr().out
    assert ("torch ends this process: look for a rank that" in printed) == (hangs_at_s is not None)
    assert hangs_at_s is None or clock.now - hangs_at_s <= 90


def test_world_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    generators = [torch.Generator() for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    assert World(0, 1, 1, torch.device("cuda")).device == torch.device("cuda", 1)
    assert World(0, 1, 1, torch.device("cuda", 0)).device == torch.device("cuda", 0)
    assert reseed(torch.device("cuda"), 7) is generators[1]


@pytest.fixture
def kernels(monkeypatch) -> Callable[[], tuple[object, ...]]:
    """kernels() is what decides which kernels run. It is undone after the test."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield lambda: (
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        os.environ.get("NCCL_ALGO"),
    )
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def test_world_kernels_fast_or_deterministic(kernels):
    before = kernels()
    choose_kernels(CPU, deterministic=False)
    assert kernels() == before == (False, "highest", False, None, None)
    choose_kernels(torch.device("cuda", 0), deterministic=False)
    assert kernels() == (True, "high", False, None, None)
    choose_kernels(torch.device("cuda", 0), deterministic=True)
    assert kernels() == (False, "highest", True, ":4096:8", "^NVLS")


def test_world_kernels_are_chosen_before_the_group(kernels, destroyed, monkeypatch):
    """NCCL reads its algorithms when its first group starts. A choice of the user's holds."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    at_start = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: at_start.append(kernels()))
    with pytest.raises(SharedError), init_distributed(Dist(device="cpu"), Launch(0, 2, 0, 2), deterministic=True):
        raise SharedError("no barrier")
    assert at_start == [(False, "highest", True, ":4096:8", "Ring")]
