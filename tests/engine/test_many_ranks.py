"""A job of many ranks, of which one is real: torch's fake process group answers at once, with what it was given."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import train as script
from harness import CPU
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World
from fastgpu.run.run import Run

WORLD = World(0, 32, 8, CPU)
"""Rank 0 of four machines."""
OF_OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


@pytest.fixture
def group() -> Iterator[None]:
    """The process group of `WORLD`."""
    dist.init_process_group("fake", store=FakeStore(), rank=WORLD.rank, world_size=WORLD.world_size)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("folder", "group")
def test_once_a_run_has_started_the_ranks_exchange_no_objects(monkeypatch):
    start = Run.start

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("objects of all ranks are pickled, sent and unpickled by every rank")

    def start_then_refuse(run: Run, *arguments: Any) -> None:
        start(run, *arguments)
        for name in OF_OBJECTS:
            monkeypatch.setattr(dist, name, refuse)

    monkeypatch.setattr(Run, "start", start_then_refuse)
    monkeypatch.setattr(script, "share_gradients", lambda model, *_, **__: model)  # DDP needs gradients of others
    words = ["train.epochs=1", "log.every_steps=5", "run.checkpoint_every_steps=4", "data.echo=1.5"]
    assert script.train(load_config(words), WORLD) == 0
    monkeypatch.undo()
