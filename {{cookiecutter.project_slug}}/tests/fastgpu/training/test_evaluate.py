import pytest
import torch
from harness import in_world
from torch import Tensor, nn

from fastgpu.feed.tiers import make_feed
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from fastgpu.training.evaluate import evaluate

CPU = torch.device("cpu")


class RowNumbers:
    """Scores each row by its number, so that a row left out or counted twice shows."""

    metrics = ("number", "square")

    def score(self, model: nn.Module, batch: Rows) -> tuple[int, list[Tensor]]:
        assert not model.training
        assert not torch.is_grad_enabled()
        number = batch["images"].reshape(len(batch), -1)[:, 0].double() + 1
        return len(batch), [number.sum(), (number**2).sum()]


def _metrics(world: World, path: str, tier: str) -> tuple[dict[str, float], bool]:
    store = open_store("data.val", path, {"images": "images", "labels": "labels"})
    order = BlockSampler(
        store.block_rows,
        4,
        rank=world.rank,
        world_size=world.world_size,
        pool_batches=2,
        shuffle=False,
        drop_last=False,
    )
    feed, model = make_feed(store, order, tier, CPU, 1, 1), nn.BatchNorm1d(2)
    found = [
        evaluate(model, RowNumbers(), feed.pools(epoch), 4, torch.autocast("cpu", enabled=False), world)
        for epoch in range(2)
    ]
    feed.close()
    assert found[0] == found[1]
    return found[0], model.training


@pytest.mark.parametrize("rows", [1, 2, 13, 24, 50])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_row_counts_once_whatever_the_ranks(write, rows, ranks):
    path = write(rows, chunk=3)
    numbers = [float(n + 1) for n in range(rows)]
    expected = {"val/number": sum(numbers) / rows, "val/square": sum(n * n for n in numbers) / rows}
    alone = [_metrics(World(0, 1, 1, CPU), path, tier) for tier in ("device", "disk")] if ranks == 1 else []
    for metrics, training in alone or in_world(ranks, _metrics, path, "disk"):
        assert metrics == expected
        assert training
