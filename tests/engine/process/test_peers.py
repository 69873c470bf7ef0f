import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastgpu.process import peers
from fastgpu.process.launch import Launch, UserError
from fastgpu.process.peers import Peers, is_lost_peer

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def peer(store: Any, rank: int, world_size: int, local_world_size: int | None = None) -> Peers:
    """The notes of one rank, on one machine or on several."""
    n_local = local_world_size or world_size
    return Peers(store, Launch(rank, world_size, rank % n_local, n_local))


class Counting:
    """A store that counts the requests to it, and the keys in them."""

    def __init__(self, store: dist.Store):
        self._store = store
        self.n_requests = 0
        self.n_keys = 0

    def __getattr__(self, name: str) -> Any:
        def call(keys: Any, *arguments: Any) -> Any:
            self.n_requests += 1
            self.n_keys += len(keys) if isinstance(keys, list) else 1
            return getattr(self._store, name)(keys, *arguments)

        return call


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    monkeypatch.setattr(peers, "NOTE_S", 0.3)
    return dist.HashStore()


def test_the_last_words_of_a_rank_reach_the_others(store):
    first = peer(store, 0, 2)
    peer(store, 1, 2).tell("its disk is gone")
    assert "rank 1 (process " in first.explain()
    assert "ended: its disk is gone (at " in first.explain()


def test_a_rank_that_never_came_is_named(store):
    assert peer(store, 0, 2).explain() == "rank 1 has not been heard of"


def test_ranks_that_are_well_are_not_named(store):
    first = peer(store, 0, 3)
    peer(store, 1, 3)
    peer(store, 2, 3)
    assert first.explain().startswith("no rank has said why")


@pytest.mark.parametrize(
    ("number", "fate"), [(signal.SIGKILL, "ended without a word"), (signal.SIGSTOP, "stands still")]
)
def test_a_process_that_was_killed_or_stopped_is_named(store, monkeypatch, number, fate):
    with subprocess.Popen(SLEEP) as process:
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        peer(store, 1, 2)
        monkeypatch.undo()
        process.send_signal(number)
        assert f"rank 1 (process {process.pid} on " in (text := peer(store, 0, 2).explain())
        assert fate in text
        process.kill()


def test_what_a_rank_of_another_machine_said_is_told_and_not_by_all(store):
    first = peer(store, 0, 1024, 8)
    for rank in range(1, 1024):
        peer(store, rank, 1024, 8)
    for rank in range(500, 600):
        peer(store, rank, 1024, 8).tell("its disk is gone")
    assert [text.split()[1] for text in first.explain().split("; ")] == ["500", "501", "502", "503"]


@pytest.mark.parametrize("missing", [1, 7, 1000, 1023])
def test_the_first_rank_that_never_came_is_named(store, missing):
    for rank in range(1024):
        if rank != missing:
            peer(store, rank, 1024, 8)
    assert peer(store, 0, 1024, 8).explain() == f"rank {missing} has not been heard of"


def test_the_requests_to_the_store_do_not_grow_with_the_ranks(store):
    counted = []
    for world_size in (16, 1024):
        counting = Counting(dist.PrefixStore(f"{world_size}", store))
        for rank in range(1, world_size):
            peer(counting, rank, world_size, 8)
        counting.add("compared", world_size - 1)
        counting.n_requests = counting.n_keys = 0
        first = peer(counting, 0, world_size, 8)
        first.check_device("cpu")
        assert counting.n_keys == counting.n_requests
        first.tell("its disk is gone")
        peer(counting, world_size - 1, world_size, 8).explain()
        counted.append(counting.n_requests)
        assert counting.n_keys < 100 + 2 * world_size  # those that are looked for by bisection
    assert counted[1] <= counted[0] + 10


def test_a_rank_with_another_device_is_named_on_every_rank(store):
    def check(rank: int) -> str:
        with pytest.raises(UserError) as raised:
            peer(store, rank, 8).check_device("cuda" if rank == 5 else "cpu")
        return str(raised.value)

    with ThreadPoolExecutor(8) as threads:
        messages = {*threads.map(check, range(8))}
    assert len(messages) == 1
    assert messages.pop().startswith("the device is cuda on rank 5 (")


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_errors_of_collectives_are_told_from_others(error, is_lost):
    assert is_lost_peer(error) == is_lost
