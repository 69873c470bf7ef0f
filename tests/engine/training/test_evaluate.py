from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ALONE, CPU, in_world, open_feed
from torch import Tensor, nn

from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from fastgpu.training import freeze
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision

FP32 = mixed_precision("fp32", CPU)


def pool_of(n_real_rows: int, batch_size: int, **columns: Tensor) -> Any:
    """A pool as the feed gives it. What follows its real rows is padding."""
    return SimpleNamespace(
        plan=SimpleNamespace(n_real_rows=n_real_rows, order=SimpleNamespace(batch_size=batch_size)), rows=Rows(columns)
    )


class RowNumbers:
    """Scores each row by its number, so that a row left out or counted twice shows. Odd rows count in `odd` only."""

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        number = batch["images"].reshape(len(batch), -1)[:, 0].double() + 1
        is_odd = number % 2 == 1
        return {"odd": torch.stack([number[is_odd].sum(), is_odd.sum()]), "number": number.sum(), "any": is_odd.any()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        odd, n_odd = sums["odd"].tolist()
        return {"number": sums["number"] / sums["n"], "odd": odd / n_odd}


def expected_metrics(rows: int) -> dict[str, float]:
    numbers = [float(n + 1) for n in range(rows)]
    odd = [number for number in numbers if number % 2 == 1]
    return {"val/number": sum(numbers) / rows, "val/odd": sum(odd) / len(odd)}


def evaluate_file(world: World, path: str, tier: str = "disk") -> dict[str, float]:
    """The metrics of a file, which are the same in each epoch."""
    store = open_store("data.val", path, {"images": "images", "labels": "labels"})
    shard = Shard(world.rank, world.world_size)
    order = BlockSampler(store.block_rows, 4, shard=shard, pool_batches=2, seed=None, drop_last=False)
    feed = open_feed(store, order, tier)
    first, second = (
        evaluate(nn.BatchNorm1d(2), RowNumbers(), feed.pools(epoch), world, precision=FP32) for epoch in range(2)
    )
    feed.close()
    assert first == second
    return first


@pytest.mark.parametrize("rows", [1, 2, 13, 24, 50])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_each_row_counts_once(write, rows, tier):
    metrics = evaluate_file(ALONE, write(rows, chunk=3), tier)
    assert metrics == expected_metrics(rows)
    assert list(metrics) == ["val/number", "val/odd"]


class Exact:
    """Macro-F1 from a confusion matrix, and AUROC of class 0 from histograms. The model gives logits."""

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        logits, labels = model(batch["x"]), batch["labels"]
        ones = torch.ones(len(labels))
        matrix = torch.zeros(9).scatter_add_(0, 3 * labels + logits.argmax(1), ones)
        histograms = torch.zeros(20).scatter_add_(0, 10 * (labels == 0) + bins_of(logits), ones)
        return {"matrix": matrix.view(3, 3), "histograms": histograms.view(2, 10)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        matrix = sums["matrix"]
        others, positives = sums["histograms"]
        n_below = (positives * (others.cumsum(0) - others / 2)).sum()
        f1 = (2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).mean()
        return {"f1": float(f1), "auroc": float(n_below / positives.sum() / others.sum())}


def bins_of(logits: Tensor) -> Tensor:
    return (10 * logits[:, 0].sigmoid()).long()


X = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (31,), generator=torch.Generator().manual_seed(0))


def exact_metrics(world: World, n_pools: int, batch_size: int) -> dict[str, float]:
    """Of 31 rows, of which each rank has its part in so many pools; the last rank has none of the last pool."""
    parts = torch.arange(31).tensor_split(n_pools * world.world_size)[world.rank :: world.world_size]
    pools = [pool_of(len(ids), batch_size, x=X[ids], labels=LABELS[ids]) for ids in parts]
    return evaluate(nn.Identity(), Exact(), pools, world, precision=FP32)


def test_metrics_of_a_confusion_matrix_and_of_histograms_are_exact_for_any_batch_size():
    (metrics,) = {tuple(exact_metrics(ALONE, n, size).values()) for n in (1, 4) for size in (3, 4, 31)}
    pairs = [(n == LABELS, X.argmax(1) == n) for n in range(3)]
    f1 = [2 * (is_label & is_guess).sum() / (is_label.sum() + is_guess.sum()) for is_label, is_guess in pairs]
    order = bins_of(X)[LABELS == 0][:, None] - bins_of(X)[LABELS != 0]
    assert metrics == pytest.approx((float(sum(f1) / 3), float((order.sign() + 1).double().mean() / 2)))


def evaluate_on_a_rank(world: World, paths: list[str]) -> tuple[list[dict[str, float]], dict[str, float]]:
    return [evaluate_file(world, path) for path in paths], exact_metrics(world, 11, 4)


@pytest.mark.slow
def test_metrics_are_the_same_for_any_number_of_ranks_and_a_rank_without_rows_does_not_hang(write):
    counts = (1, 2, 13, 24, 50)  # of 3 ranks, 2 have no real row of the first file and 1 has none of the second
    paths = [write(rows, chunk=3, name=f"{rows}.h5") for rows in counts]
    expected = [expected_metrics(rows) for rows in counts], exact_metrics(ALONE, 4, 3)
    assert in_world(3, evaluate_on_a_rank, paths) == [expected] * 3


def test_what_did_not_train_before_does_not_train_afterwards():
    """A batch norm that the model keeps in evaluation mode stays so: its statistics are frozen."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    freeze(model[0])
    pool = pool_of(4, 2, x=torch.randn(4, 3), labels=torch.zeros(4, dtype=torch.int64))
    evaluate(model, Exact(), [pool], ALONE, precision=FP32)
    assert [module.training for module in model.modules()] == [True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_a_metric_that_is_no_number_is_told(capsys):
    pool = pool_of(4, 2, x=torch.zeros(4, 3), labels=torch.zeros(4, dtype=torch.int64))  # of one class only: 0 / 0
    evaluate(nn.Identity(), Exact(), [pool], ALONE, precision=FP32)
    assert "warning: val/f1 is nan, " in capsys.readouterr().out
