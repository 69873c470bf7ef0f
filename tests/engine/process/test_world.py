import dataclasses
import json
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ALONE, CPU, in_world

from fastgpu.process import world as world_module
from fastgpu.process.config import Dist
from fastgpu.process.launch import Launch, RankError, UserError
from fastgpu.process.world import World, _allow_connections, _flight_recorder, join

NAMES = ("gpu0/power_w", "host/rss_gib")


def error_of(function: Callable[[], Any]) -> str | None:
    """The message of the UserError that a function raises; None if it raises none."""
    try:
        function()
    except UserError as error:
        return str(error)
    return None


def use_collectives(world: World) -> dict[str, Any]:
    return {
        "sum": world.all_reduce_sum(torch.tensor([1.0 + world.rank])).item(),
        "max": world.all_reduce_max(float(world.rank)),
        "gather": world.all_gather(world.rank + 0.5),
        "broadcast": world.broadcast(f"rank {world.rank}"),
    }


def raise_on_one_rank(world: World) -> None:
    with world.raise_on_every_rank():
        if world.rank == 1:
            raise UserError("disk of rank 1 is full")


def gather_as_many(world: World) -> dict[str, float]:
    """The counters as they are logged if two machines are too many to log each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "MAX_MACHINES", 1)
        own = {"gpu0/power_w": 300.0} if world.rank else {}
        return world.gather_by_node({"host/rss_gib": float(world.rank), **own}, NAMES)


def use_world(world: World) -> dict[str, Any]:
    """Everything that two ranks do together, in one job: starting processes takes seconds."""
    as_first_local_rank = dataclasses.replace(world, local_world_size=1, local_rank=0)
    as_second_local_rank = dataclasses.replace(world, local_rank=1)
    store = torch.distributed.distributed_c10d._get_default_store().underlying_store
    store.set(f"rank {world.rank}", "here")
    return {
        "collectives": use_collectives(world),
        "raised": error_of(lambda: raise_on_one_rank(world)),
        "sum afterwards": world.all_reduce_sum(torch.ones(1)).item(),
        "different": error_of(lambda: world.check_same({"the step": world.rank}, "share the folder")),
        "same values": error_of(lambda: world.check_same({"optim.lr": 0.1, "run.seed": 0})),
        "other value": error_of(lambda: world.check_same({"optim.lr": 0.1, "run.seed": world.rank, "x": world.rank})),
        "value of one rank": error_of(lambda: world.check_same({"x.py": "ab"} if world.rank else {})),
        "everywhere": error_of(lambda: world.check_everywhere(True, "no room")),
        "not everywhere": error_of(lambda: world.check_everywhere(world.rank == 0, "no room")),
        "one machine": world.gather_by_node({"host/rss_gib": float(world.rank)}, NAMES),
        "two machines": as_first_local_rank.gather_by_node({"host/rss_gib": float(world.rank)}, NAMES),
        "many machines": gather_as_many(as_first_local_rank),
        "gpus of the second rank": as_second_local_rank.gpus,
        "key": store.underlying_store.get(f"attempt0/rank {world.rank}"),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return in_world(2, use_world)


def test_collectives_give_every_rank_the_same(ranks):
    for rank in ranks:
        assert rank["collectives"] == {"sum": 3.0, "max": 1.0, "gather": [0.5, 1.5], "broadcast": "rank 0"}


def test_alone_nothing_is_sent():
    assert use_collectives(ALONE) == {"sum": 1.0, "max": 0.0, "gather": [0.5], "broadcast": "rank 0"}
    assert error_of(lambda: ALONE.check_everywhere(False, "no room")) == "no room"
    assert not torch.distributed.is_initialized()


def test_an_error_of_one_rank_is_raised_on_every_rank_and_they_can_still_talk(ranks):
    for rank in ranks:
        assert rank["raised"] == "disk of rank 1 is full"
        assert rank["sum afterwards"] == 2.0


def test_values_that_differ_are_named_with_both_ranks(ranks):
    host = socket.gethostname()
    for rank in ranks:
        assert rank["same values"] is None
        assert rank["other value"] == (
            f"run.seed is 1 on rank 1 ({host}) and 0 on rank 0 ({host}) (1 more differ); all ranks need the same "
            "settings, rows and code"
        )
        assert rank["different"] == f"the step is 1 on rank 1 ({host}) and 0 on rank 0 ({host}); share the folder"
        assert "x.py is ab on rank 1" in rank["value of one rank"]
        assert f"and missing on rank 0 ({host})" in rank["value of one rank"]


def test_a_condition_that_fails_on_one_rank_fails_on_every_rank(ranks):
    for rank in ranks:
        assert rank["everywhere"] is None
        assert rank["not everywhere"] == "no room"


def test_values_of_each_machine_come_together(ranks):
    for number, rank in enumerate(ranks):
        assert rank["one machine"] == {"host/rss_gib": float(number)}
        assert rank["gpus of the second rank"] is None  # one monitor for each machine
    assert ranks[0]["two machines"] == {"host/rss_gib": 0.0, "machine1/host/rss_gib": 1.0}
    assert ranks[0]["many machines"] == {
        "host/rss_gib": 0.0,
        "min/gpu0/power_w": 300.0,
        "max/gpu0/power_w": 300.0,
        "min/host/rss_gib": 0.0,
        "max/host/rss_gib": 1.0,
    }
    assert ALONE.gather_by_node({"a": 1.0}, []) == {"a": 1.0}
    assert ALONE.gpus == []


def test_addresses_of_the_ranks_are_kept_apart_for_each_restart(ranks):
    assert [rank["key"] for rank in ranks] == [b"here"] * 2


def test_only_the_main_rank_prints(capsys):
    World(1, 2, 2, CPU).print_once("from rank 1")
    ALONE.print_once(None)
    ALONE.print_once("")
    ALONE.print_once("from rank 0")
    assert capsys.readouterr().out == "from rank 0\n"


def test_a_gpu_that_is_missing_is_an_error_if_one_is_required(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with (
        pytest.raises(UserError, match="dist.device is cuda, but torch .* sees no GPU.*dist.device=cpu"),
        join(Launch(), Dist(device="cuda")),
    ):
        pass
    with join(Launch(), Dist(device="auto")) as world:
        assert world.device.type == "cpu"


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(UserError, match="3 processes on a machine with 2 visible GPUs"),
        join(Launch(2, 3, 2, 3), Dist()),
    ):
        pass


# ---------------------------------------------------------------------------------------------- one rank ends


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    """The store of a job of two ranks, of which this process is the first. It has no process group."""
    store = dist.HashStore()
    rank_1 = dist.PrefixStore("peers", dist.PrefixStore("attempt0", store))
    rank_1.set("at1", json.dumps(["node-b", 7]))
    rank_1.add("compared", 1)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return rank_1


def end_by(error: Exception) -> None:
    with join(Launch(0, 2, 0, 2), Dist(device="cpu")):
        raise error


@pytest.mark.parametrize(
    ("error", "raised", "note"),
    [
        (RankError("its disk is gone"), "its disk is gone", "its disk is gone"),
        (UserError("data.train is x"), "data.train is x", "data.train is x"),
        (ValueError("a\nbug"), "a\nbug", "ValueError: a bug"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            "rank 0 on .* ran out of memory",
            "ran out of memory (CUDA out of memory); lower data.batch_size",
        ),
    ],
)
def test_what_ends_a_rank_is_left_for_the_others(store, error, raised, note):
    with pytest.raises(type(error) if not isinstance(error, torch.OutOfMemoryError) else RankError, match=raised):
        end_by(error)
    assert note in json.loads(store.get("end0"))


def test_what_ended_another_rank_is_one_line(store):
    store.set("end1", json.dumps("its disk is gone (at 12:00:00)"))
    with pytest.raises(RankError) as raised:
        end_by(RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert str(raised.value) == (
        "rank 0 lost the others: rank 1 (process 7 on node-b) ended: its disk is gone (at 12:00:00)"
    )


def test_ranks_that_never_meet_are_one_line_too(store, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise dist.DistStoreError("timed out")

    monkeypatch.setattr(dist, "init_process_group", fail)
    store.delete_key("at1")
    with pytest.raises(RankError, match="rank 0 lost the others: rank 1 has not been heard of"):
        end_by(AssertionError("not reached"))


def test_a_node_without_its_gpu_is_named(store):
    message = "the device is cuda on rank 1 (node-b) and cpu on rank 0 (node-a)"
    store.set("another device", json.dumps(message))
    with pytest.raises(UserError, match=re.escape(message)):
        end_by(AssertionError("not reached"))


def test_the_flight_recorder_is_for_nccl():
    assert _flight_recorder(CPU) == ""
    assert "TORCH_FR_DUMP_TEMP_FILE" in _flight_recorder(torch.device("cuda"))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((1024, 4096), (4096, 4096)), ((2048, 4096), None), ((1024, -1), (-1, -1)), ((-1, -1), None)],
)
def test_rank_0_may_hold_a_connection_to_each_rank(monkeypatch, limits, expected):
    chosen = []
    monkeypatch.setattr(world_module.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(world_module.resource, "setrlimit", lambda _, value: chosen.append(value))
    _allow_connections(1024)
    assert chosen == ([expected] if expected else [])
