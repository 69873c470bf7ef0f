import h5py
import numpy as np
import pytest
import torch
import train
from harness import ALONE, in_world

from fastgpu.diagnose.bench import Bench
from fastgpu.process.config import Config, Data
from fastgpu.process.world import World

SECONDS = 0.01


@pytest.fixture
def config(tmp_path):
    """The config of a run of the smallest workload, on rows of 36 bytes."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("x", data=rng.normal(size=(512, 8)).astype("f4"), chunks=(16, 8))
        file["y"] = rng.normal(size=512).astype("f4")
    path = str(tmp_path / "rows.h5")
    data = Data(train=path, val=path, fields={"x": "x", "y": "y"}, tier="disk")
    return Config(workload="minimal", data=data, dist={"device": "cpu"})


@pytest.fixture
def bench(config):
    return Bench(train, config, ALONE, SECONDS)


def test_measuring_does_not_change_the_weights(bench):
    before = {name: value.clone() for name, value in bench.parts.model.named_parameters()}
    measured = bench.measure()
    assert all(torch.equal(value, before[name]) for name, value in bench.parts.model.named_parameters())
    assert measured.batch_size == 64
    assert measured.supply
    assert measured.cached


def test_twice_as_many_readers_are_tried(bench):
    setting, step_s = bench.try_readers()
    assert setting == f"loader.num_readers={2 * bench.sizes.n_readers}"
    assert step_s > 0


def test_each_order_is_another_one(bench):
    first, second = bench._next_order(), bench._next_order()
    assert list(first) != list(second)
    assert sorted(first) == sorted(second)


def test_a_profile_of_some_steps(bench, tmp_path):
    bench.trace(3, tmp_path / "new" / "trace.json")
    assert (tmp_path / "new" / "trace.json").read_text().count('"Optimizer.step') == 3


def gradients(world: World, config: Config) -> tuple[list[float], list[float]]:
    """Gradients of this rank in two steps of the training loop, and in one without averaging."""
    bench = Bench(train, config, world, SECONDS)
    sums: list[float] = []
    first = next(bench.parts.model.parameters())
    bench.parts.optimizer.register_step_pre_hook(lambda *_: sums.append(first.grad.double().sum().item()))
    for _ in range(2):
        bench.loop.train_step(bench.loop.batch)
    bench.loop.local_step(bench.loop.batch)
    return sums[:2], sums[2:]


@pytest.mark.slow
def test_ranks_average_gradients_while_they_are_measured(config):
    (first_shared, first_local), (second_shared, second_local) = in_world(2, gradients, config)
    assert first_shared == second_shared
    assert first_local != second_local
