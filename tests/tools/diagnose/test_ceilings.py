"""What diagnose.py measures: each part of the loop alone, and that nothing is changed by it."""

import time
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch
import train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.diagnose.bench import Bench
from fastgpu.diagnose.ceilings import Loop, Meter, Supply, copies, first_blocks, open_supplies, read_pool
from fastgpu.process.config import Config, LoaderConfig, Tier
from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from support.ranks import ALONE, CPU, in_world, needs_gpu
from support.rows import DENSE_FIELDS, RAGGED_FIELDS, config_of, numbers_of
from workloads import minimal

BATCH_SIZE = 16
POOL_BATCHES = 4
N_ROWS = 2048


@pytest.fixture
def rows(dense_file):
    """(rows, their order in pools of POOL_BATCHES batches)"""
    path = dense_file(N_ROWS, (1, 4, 2), chunk=BATCH_SIZE)
    source = open_store("data.train", path, DENSE_FIELDS)
    return source, BlockSampler(source.block_rows, BATCH_SIZE, pool_batches=POOL_BATCHES)


@pytest.fixture
def ragged_rows(ragged_file):
    return open_store("data.train", ragged_file(100, chunks=(16,)), RAGGED_FIELDS)


def loop_of(step: Callable[[Rows], object], source: Dataset, echo: float = 1.0, tier: Tier = "disk") -> Loop:
    config = config_of(tier, echo=echo)
    batch = read_pool(source, BlockSampler(source.block_rows, BATCH_SIZE), config.loader)
    return Loop(lambda rows: rows, step, step, batch, source, config, CPU)


@pytest.mark.parametrize("passes", [1, 2])
def test_ceilings_pools_are_those_of_the_feed(rows, passes):
    """The loop sees each row of an epoch once for each pass, and the feed of few blocks gives only their rows."""
    source, sampler = rows
    trained: list[list[int]] = []
    supplies = open_supplies(loop_of(lambda rows: trained.append(numbers_of(rows["images"])), source, passes), sampler)
    assert supplies["real"].train(sampler.pools_per_epoch) == len(trained) == passes * N_ROWS // BATCH_SIZE
    assert sorted(chain(*trained)) == sorted([*range(N_ROWS)] * passes)
    assert supplies["real"].drain(8) == 8 * passes * POOL_BATCHES  # steps, of which none is made
    assert len(trained) == passes * N_ROWS // BATCH_SIZE
    few = {number for pool in supplies["cached"].feed.pools(3) for number in numbers_of(pool.rows["images"])}
    assert few == set(range(len(few)))
    assert len(few) <= (2 * POOL_BATCHES + 1) * BATCH_SIZE
    for supply in supplies.values():
        supply.feed.close()


@pytest.mark.parametrize(("run_batches", "n_asks"), [(1, 1), (4, 4), (1000, 8)])
def test_ceilings_small_pools_ask_workers_as_often(run_batches, n_asks):
    """Otherwise some of them would wait, and more workers would seem to gain less than they do."""
    source = ItemDataset("made up", TensorDataset(torch.zeros(16_000, 1)), {"x": "x"})
    sampler = BlockSampler(source.block_rows, BATCH_SIZE)
    config = config_of(n_readers=0).resolved(data={"pool_batches": run_batches})
    supply = Supply(loop_of(lambda _: None, source)._replace(config=config), sampler)
    plan = next(supply.feed.sampler.pools(0))
    assert len([*plan.reads.split(supply.feed.readers.rows_per_job)]) == n_asks
    np.testing.assert_array_equal(plan.row_ids, next(sampler.pools(0)).row_ids)
    supply.feed.close()


def test_ceilings_first_blocks(ragged_rows):
    few = first_blocks(ragged_rows, BlockSampler(ragged_rows.block_rows, 8, seed=None))
    assert 2 * 8 <= few.n_rows < len(ragged_rows)
    batch = read_pool(ragged_rows, BlockSampler(few.selection, few.n_rows, seed=None), LoaderConfig())
    assert batch["number"].tolist() == list(range(few.n_rows))
    np.testing.assert_array_equal(batch["items"].offsets.diff(), ragged_rows.stored_lengths["items"][: few.n_rows])


@pytest.mark.gpu
@needs_gpu
def test_ceilings_syncs_of_a_gpu():
    device = Meter(World(0, 1, 1, torch.device("cuda", 0)), 1.0)
    x = torch.ones(2, 2, device="cuda")
    assert device.syncs(lambda: torch.mm(x, x)) == []
    assert device.syncs(lambda: x.sum().item())[0].startswith("tests/tools/diagnose/test_ceilings.py")


@pytest.mark.gpu
@pytest.mark.real_gpu
@needs_gpu
def test_ceilings_work_of_a_real_gpu():
    device = Meter(World(0, 1, 1, torch.device("cuda", 0)), 1.0)
    x = torch.ones(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(20):
            torch.mm(x, x)

    work()
    device.synchronize()
    t0 = time.perf_counter()
    work()
    device.synchronize()
    assert 0 < (device.busy_s(work) or 0) < 1.2 * (time.perf_counter() - t0) + 0.01


@pytest.mark.gpu
@needs_gpu
def test_ceilings_pools_are_copied_to_a_gpu(ragged_rows):
    pool = read_pool(ragged_rows, BlockSampler(ragged_rows.block_rows, BATCH_SIZE, pool_batches=4), LoaderConfig())
    work = copies(loop_of(lambda _: None, ragged_rows)._replace(device=torch.device("cuda", 0)), pool)
    before = torch.cuda.memory_allocated()
    assert work(3) == 12
    assert torch.cuda.memory_allocated() == before


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
    return Bench(train, config, world, 0.01)


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
    assert setting == f"loader.num_readers={2 * bench.config.loader.num_readers}"
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
