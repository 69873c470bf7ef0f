from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ALONE, CPU, in_world

from fastgpu.process import world as world_module
from fastgpu.process.config import Dist
from fastgpu.process.launch import Launch, RankError, UserError, warn
from fastgpu.process.world import World, init_distributed


def error_of(function: Callable[..., None], *arguments: Any) -> str:
    """The message of the UserError that a function raises."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    return str(error.value)


def use_collectives(world: World) -> list[Any]:
    total = world.all_reduce_sum(torch.tensor([1.0 + world.rank])).item()
    gathered = world.all_gather(world.rank + 0.5)
    return [total, world.all_reduce_max(float(world.rank)), gathered, world.broadcast(f"rank {world.rank}")]


def raise_on_one_rank(world: World) -> None:
    with world.together():
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


def test_two_ranks_have_the_same_values_and_errors_and_alone_nothing_is_sent():
    for rank in in_world(2, use_world):
        assert rank == {
            "raised": "disk of rank 1 is full",
            "collectives afterwards": [3.0, 1.0, [0.5, 1.5], "rank 0"],
            "other value": "run.seed is 1 on rank 1 and 0 on rank 0; share it",
            "value of one rank": "x.py is ab on rank 1 and None on rank 0; all ranks need the same",
            "key in this attempt": b"here",
        }
    assert use_collectives(ALONE) == [1.0, 0.0, [0.5], "rank 0"]
    assert not dist.is_initialized()


def test_a_line_or_a_warning_is_printed_once_for_the_whole_job(monkeypatch, capsys):
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        World(rank, 4, 4, CPU).print_once("a line")
        warn("the file is sorted")
    assert capsys.readouterr().out == "a line\nwarning: the file is sorted\n"


def test_a_machine_without_a_gpu_trains_on_its_cpu_and_gpus_that_are_missing_are_one_line(monkeypatch):
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
def join(monkeypatch) -> Callable[[], AbstractContextManager[World]]:
    """join() enters the world of the first of two ranks, without a process group."""
    store = dist.HashStore()
    monkeypatch.setattr(world_module, "NOTICE_S", 0.05)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return lambda: init_distributed(Dist(device="cpu"), Launch(0, 2, 0, 2))


LOST = "^rank 0 lost the others: rank 1 hangs or is gone; see which failed, or raise dist.timeout_s$"


@pytest.mark.parametrize(
    ("error", "kind", "raised"),
    [
        (UserError("data.train is x"), UserError, "data.train is x"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "mat1 and mat2"),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed"), RankError, LOST),
        (dist.DistBackendError("the communicator was aborted"), RankError, LOST),
    ],
)
def test_what_ends_a_rank_is_one_line_unless_it_is_a_bug(join, error, kind, raised):
    with pytest.raises(kind, match=raised), join():
        raise error


def test_ranks_that_never_meet_are_one_line_too_and_one_that_noticed_it_is_not_blamed(join, monkeypatch):
    def refuse(*_: Any, store: dist.Store, **__: Any) -> None:
        store.set("lost by 1", "")
        raise dist.DistStoreError("timed out")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RankError, match="^rank 0 lost the others; see "), join():
        pass
