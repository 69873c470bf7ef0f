from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training import freeze
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision
from support.ranks import ALONE, CPU, in_world
from support.rows import numbered, open_feed

FP32 = mixed_precision("fp32", CPU)


class RowNumbers:
    """Scores each row by its number, so that a row left out or counted twice shows, and by a matrix of even and odd."""

    mean: float | None = None
    """Running mean that the model should have. None: it has none."""

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        assert self.mean is None or model.running_mean.item() == self.mean
        number = batch["images"].reshape(len(batch), -1)[:, 0].double() + 1
        is_odd = number % 2 == 1
        matrix = torch.stack([torch.stack([number[which].sum(), which.sum()]) for which in (~is_odd, is_odd)])
        return {"matrix": matrix.T, "number": number.sum(), "any": is_odd.any()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        total, count = sums["matrix"]
        return {"number": sums["number"] / sums["n"], "odd": total[1] / count[1]}


def evaluate_rows(world: World, n_rows: int) -> dict[str, float]:
    """The metrics of these rows, which are the same in each epoch. All ranks have the running statistics of rank 0."""
    source = ArrayDataset("made up", {"images": numbered(n_rows)}, block_rows=np.diff([*range(0, n_rows, 3), n_rows]))
    shard = Shard(world.rank, world.world_size)
    sampler = BlockSampler(source.block_rows, 4, shard=shard, pool_batches=2, seed=None, drop_last=False)
    feed = open_feed(source, sampler)
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(7 + world.rank)
    workload = RowNumbers()
    workload.mean = 7
    first, second = (evaluate(norm, workload, feed.batches(epoch), world, precision=FP32) for epoch in range(2))
    feed.close()
    assert first == second
    assert all(type(metric) is float for metric in first.values())
    return first


def expected_metrics(n_rows: int) -> dict[str, float]:
    numbers = np.arange(1.0, n_rows + 1)
    return {"number": numbers.mean(), "odd": numbers[::2].mean()}


COUNTS = (1, 2, 13, 24, 50)
"""Rows. Of three ranks, two have no real row of the first, and one has none of the second."""


@pytest.mark.parametrize("n_rows", COUNTS)
def test_evaluate_counts_each_row_once(n_rows):
    assert evaluate_rows(ALONE, n_rows) == expected_metrics(n_rows)


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", COUNTS)
def test_evaluate_same_metrics_for_any_world(n_rows):
    assert in_world(3, evaluate_rows, n_rows) == [expected_metrics(n_rows)] * 3


def test_evaluate_restores_modes():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    freeze(model[0])
    batches = [Rows({"images": torch.ones(n_rows, 3)}) for n_rows in (2, 1, 0)]
    assert evaluate(model, RowNumbers(), batches, ALONE, precision=FP32)["number"] == 2
    assert [module.training for module in model.modules()] == [True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
