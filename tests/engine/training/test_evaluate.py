import pytest
import torch
from harness import ALONE, CPU, in_world
from torch import nn

from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from fastgpu.training.evaluate import Sum, evaluate

FIELDS = {"images": "images", "labels": "labels"}


class RowNumbers:
    """Scores each row by its number, so that a row left out or counted twice shows. Odd rows count in `odd` only."""

    metrics = {"number": "higher", "square": "lower", "odd": "higher"}  # noqa: RUF012

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Sum]:
        assert not model.training
        assert not torch.is_grad_enabled()
        number = batch["images"].reshape(len(batch), -1)[:, 0].double() + 1
        is_odd = number % 2 == 1
        return {
            "odd": Sum(number[is_odd].sum(), is_odd.sum()),  # in another order than the names, and n on the device
            "number": Sum(number.sum(), len(batch)),
            "square": Sum((number**2).sum(), len(batch)),
        }


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
        "val/square": sum(number**2 for number in numbers) / rows,
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
    assert list(metrics) == ["val/number", "val/square", "val/odd"]
