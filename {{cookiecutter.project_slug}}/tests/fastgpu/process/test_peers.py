import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fastgpu.process import peers
from fastgpu.process.peers import Peers, is_lost_peer

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    monkeypatch.setattr(peers, "NOTE_S", 0.3)
    return dist.HashStore()


def test_the_last_words_of_a_rank_reach_the_others(store):
    first = Peers(store, 0, 2)
    Peers(store, 1, 2).tell("its disk is gone")
    assert "rank 1 (process " in first.explain()
    assert "ended: its disk is gone (at " in first.explain()


def test_a_rank_that_never_came_is_named(store):
    assert Peers(store, 0, 2).explain() == "rank 1 has not been heard of"


def test_ranks_that_are_well_are_not_named(store):
    first = Peers(store, 0, 3)
    Peers(store, 1, 3)
    Peers(store, 2, 3)
    assert first.explain().startswith("no rank has said why")


@pytest.mark.parametrize(
    ("number", "fate"), [(signal.SIGKILL, "ended without a word"), (signal.SIGSTOP, "stands still")]
)
def test_a_process_that_was_killed_or_stopped_is_named(store, monkeypatch, number, fate):
    with subprocess.Popen(SLEEP) as process:
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        Peers(store, 1, 2)
        monkeypatch.undo()
        process.send_signal(number)
        assert f"rank 1 (process {process.pid} on " in (text := Peers(store, 0, 2).explain())
        assert fate in text
        process.kill()


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
