from collections.abc import Mapping

import pytest
import torch
from harness import ALONE, CPU, in_world
from torch import Tensor, nn

from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from fastgpu.training.evaluate import evaluate
from fastgpu.training.parallel import freeze

FIELDS = {"images": "images", "labels": "labels"}


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


def evaluate_twice(world: World, path: str, tier: str) -> tuple[dict[str, float], bool]:
    """The metrics of a file, and whether the model is in training mode again."""
    store = open_store("data.val", path, FIELDS)
    shard = Shard(world.rank, world.world_size)
    order = BlockSampler(store.block_rows, 4, shard=shard, pool_batches=2, seed=None, drop_last=False)
    feed = make_feed(store, order, Placement(tier, CPU, 1))
    model = nn.BatchNorm1d(2)
    autocast = torch.autocast("cpu", enabled=False)
    metrics = [
        evaluate(model, RowNumbers(), feed.pools(epoch), batch_size=4, autocast=autocast, world=world)
        for epoch in range(2)
    ]
    feed.close()
    assert metrics[0] == metrics[1]
    return metrics[0], model.training


def evaluate_files(world: World, paths: list[str]) -> list[tuple[dict[str, float], bool]]:
    return [evaluate_twice(world, path, "disk") for path in paths]


def expected_metrics(rows: int) -> dict[str, float]:
    numbers = [float(n + 1) for n in range(rows)]
    odd = [number for number in numbers if number % 2 == 1]
    return {
        "val/number": sum(numbers) / rows,
        "val/odd": sum(odd) / len(odd),
    }


@pytest.mark.parametrize("rows", [1, 2, 13, 24, 50])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_each_row_counts_once(write, rows, tier):
    metrics, is_training = evaluate_twice(ALONE, write(rows, chunk=3), tier)
    assert metrics == expected_metrics(rows)
    assert is_training


@pytest.mark.slow
def test_each_row_counts_once_whatever_the_number_of_ranks_and_a_rank_without_rows_does_not_hang(write):
    counts = (1, 2, 13, 24, 50)  # of 3 ranks, 2 have no real row of the first file and 1 has none of the second
    paths = [write(rows, chunk=3, name=f"{rows}.h5") for rows in counts]
    for results in in_world(3, evaluate_files, paths):
        for rows, (metrics, is_training) in zip(counts, results, strict=True):
            assert metrics == expected_metrics(rows)
            assert is_training


def evaluate_no_pools(world: World) -> dict[str, float]:
    """Rank 0 has three rows; the others have no pool at all."""
    store_rows = Rows({"images": torch.arange(3, dtype=torch.uint8)[:, None]})

    class Plan:
        n_real_rows = 3

    class OnePool:
        plan = Plan()
        rows = store_rows

    pools = [OnePool()] if world.is_main else []
    autocast = torch.autocast("cpu", enabled=False)
    return evaluate(nn.BatchNorm1d(2), RowNumbers(), pools, batch_size=2, autocast=autocast, world=world)


@pytest.mark.slow
def test_a_rank_without_any_pool_gets_the_metrics_of_the_others():
    assert in_world(2, evaluate_no_pools) == [expected_metrics(3)] * 2


def test_running_statistics_are_averaged_before_and_the_names_keep_their_order():
    autocast = torch.autocast("cpu", enabled=False)
    store_rows = Rows({"images": torch.arange(3, dtype=torch.uint8)[:, None]})

    class Plan:
        n_real_rows = 2  # the third row is padding

    class OnePool:
        plan = Plan()
        rows = store_rows

    metrics = evaluate(nn.BatchNorm1d(2), RowNumbers(), [OnePool()], batch_size=2, autocast=autocast, world=ALONE)
    assert metrics == expected_metrics(2)
    assert list(metrics) == ["val/number", "val/odd"]


class MacroF1:
    """Macro-F1 from a confusion matrix. The model gives logits."""

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        predicted = model(batch["x"]).argmax(1)
        matrix = torch.zeros(9).scatter_add_(0, 3 * batch["labels"] + predicted, torch.ones(len(predicted)))
        return {"matrix": matrix.view(3, 3)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        matrix = sums["matrix"]
        return {"f1": float((2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).mean())}


def macro_f1(world: World, n_pools: int, batch_size: int) -> float:
    """Of 31 rows, of which each rank has its part in so many pools; the last rank has none of the last pool."""
    rng = torch.Generator().manual_seed(0)
    x, labels = torch.randn(31, 3, generator=rng), torch.randint(3, (31,), generator=rng)

    class OnePool:
        def __init__(self, ids: Tensor):
            self.rows = Rows({"x": x[ids], "labels": labels[ids]})
            self.plan = type("Plan", (), {"n_real_rows": len(ids)})

    parts = torch.arange(31).tensor_split(n_pools * world.world_size)[world.rank :: world.world_size]
    autocast = torch.autocast("cpu", enabled=False)
    pools = [OnePool(part) for part in parts]
    return evaluate(nn.Identity(), MacroF1(), pools, batch_size=batch_size, autocast=autocast, world=world)["val/f1"]


def test_a_metric_of_a_confusion_matrix_is_the_same_for_any_batch_size():
    assert len({macro_f1(ALONE, n_pools, batch_size) for n_pools in (1, 4) for batch_size in (3, 4, 31)}) == 1


@pytest.mark.slow
def test_a_metric_of_a_confusion_matrix_is_the_same_for_any_number_of_ranks():
    assert {macro_f1(ALONE, 1, 31), *in_world(2, macro_f1, 2, 5), *in_world(3, macro_f1, 11, 4)} == {
        macro_f1(ALONE, 4, 3)
    }


def test_what_did_not_train_before_does_not_train_afterwards():
    """A batch norm that the model keeps in evaluation mode stays so: its statistics are frozen."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    freeze(model[0])
    autocast = torch.autocast("cpu", enabled=False)
    macro = Rows({"x": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.int64)})
    pool = type("Pool", (), {"rows": macro, "plan": type("Plan", (), {"n_real_rows": 4})})
    evaluate(model, MacroF1(), [pool], batch_size=2, autocast=autocast, world=ALONE)
    assert [module.training for module in model.modules()] == [True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_a_metric_that_is_no_number_is_told(capsys):
    class Nothing(MacroF1):
        def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
            return {"f1": float("nan")}

    rows = Rows({"x": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.int64)})
    pool = type("Pool", (), {"rows": rows, "plan": type("Plan", (), {"n_real_rows": 4})})
    autocast = torch.autocast("cpu", enabled=False)
    evaluate(nn.Identity(), Nothing(), [pool], batch_size=2, autocast=autocast, world=ALONE)
    assert "warning: val/f1 is nan, " in capsys.readouterr().out
