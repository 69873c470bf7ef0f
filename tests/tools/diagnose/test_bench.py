import pytest
import torch
from torch import Tensor, nn

from fastgpu.diagnose.bench import Bench
from fastgpu.process.config import Config
from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from support.ranks import ALONE, in_world
from workloads import minimal


@pytest.fixture
def config(folder, monkeypatch):
    """Of a workload whose transform gives other names to the fields."""
    loss = minimal.Workload.loss

    def renamed(_: object, batch: Rows, rng: torch.Generator) -> Rows:
        return Rows({"first": batch["x"], "second": batch["y"]})

    def loss_of_renamed(workload: minimal.Workload, model: nn.Module, batch: Rows) -> Tensor:
        return loss(workload, model, Rows({"x": batch["first"], "y": batch["second"]}))

    monkeypatch.setattr(minimal.Workload, "transform", renamed)
    monkeypatch.setattr(minimal.Workload, "loss", loss_of_renamed)
    return load_config(["data.tier=disk", "train.precision=fp32"])


def open_bench(config: Config, world: World = ALONE) -> Bench:
    return Bench(config, world, 0.01)


def test_bench_keeps_the_weights(config, tmp_path):
    bench = open_bench(config)
    before = {name: value.clone() for name, value in bench.parts.model.named_parameters()}
    measured = bench.measure()
    setting, step_s = bench.try_readers()
    bench.trace(3, tmp_path / "new" / "trace.json")
    assert all(torch.equal(value, before[name]) for name, value in bench.parts.model.named_parameters())
    assert measured.batch_size == 32
    assert measured.supply
    assert measured.cached
    assert setting == f"loader.num_readers={2 * bench.sizes.n_readers}"
    assert step_s > 0
    assert (tmp_path / "new" / "trace.json").read_text().count('"Optimizer.step') == 3


def gradients(world: World, config: Config) -> tuple[list[float], list[float]]:
    """Gradients of this rank in two steps of the training loop, and in one without averaging."""
    bench = open_bench(config, world)
    sums: list[float] = []
    first = next(bench.parts.model.parameters())
    bench.parts.optimizer.register_step_pre_hook(lambda *_: sums.append(first.grad.double().sum().item()))
    for _ in range(2):
        bench.loop.train_step(bench.loop.batch)
    bench.loop.local_step(bench.loop.batch)
    return sums[:2], sums[2:]


@pytest.mark.slow
def test_bench_ranks_average_gradients(config):
    (first_shared, first_local), (second_shared, second_local) = in_world(2, gradients, config)
    assert first_shared == second_shared
    assert first_local != second_local
