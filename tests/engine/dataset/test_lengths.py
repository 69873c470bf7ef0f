"""Datasets whose items have different lengths: the boxes of an image, the words of a text."""

import sys
from contextlib import closing
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import workloads
from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import PoolLoader, Splits, resolve_auto
from fastgpu.predict.command import Predict
from fastgpu.predict.program import run as predict
from fastgpu.process.config import Config, Data, Tier
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from support.datasets import Made
from support.ranks import ALONE, in_world
from support.rows import open_feed
from support.runs import train_rank, val_points
from workloads import minimal


class Boxes(Dataset):
    """Items of any length: boxes `x`, whose areas have the sum `y`."""

    def __init__(self, n_rows: str):
        self.n_rows = int(n_rows)
        self.read: list[int] = []
        """The rows that were read."""

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int):
        self.read.append(row)
        boxes = np.random.default_rng(row).random((row % 5, 4), np.float32)
        jitter = 0.01 * torch.rand(4).numpy()
        return {"x": boxes + jitter, "y": boxes[:, :2].prod(1).sum()}


def items_of(dataset: Dataset, *names: str) -> ItemDataset:
    return ItemDataset("mine", dataset, {name: name for name in names})


def open_lengths(source: ItemDataset, tier: Tier = "disk", *, n_epochs: int = 100) -> PoolLoader:
    sampler = BlockSampler(source.block_rows, 4, pool_batches=3, seed=1)
    return open_feed(source, sampler, tier, 0, n_epochs=n_epochs)


def choose_tier(source: ItemDataset, tier: Tier) -> None:
    data = Data(train="x", val="y", fields={"x": "x"}, batch_size=4, tier=tier)
    resolve_auto(Config(workload="minimal", data=data), Splits(source, {"val": source}), ALONE)


def test_lengths_longer_than_expected_get_more_memory():
    growing = Made(lambda row: np.full((1000 if row % 9 == 5 else 1, 4), row, np.float32), ragged=("boxes",))
    source = items_of(growing, "boxes")
    assert source.fields["boxes"].is_ragged  # although the items that were compared have one length
    with closing(open_lengths(source)) as feed:
        for pool in feed.pools(0):
            boxes = pool.rows["boxes"]
            rows = pool.plan.row_ids
            assert boxes.offsets.diff().tolist() == np.where(rows % 9 == 5, 1000, 1).tolist()
            assert boxes.values[:, 0].tolist() == np.repeat(rows, boxes.offsets.diff()).tolist()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_lengths_unknown_need_the_disk_tier(tier):
    with pytest.raises(UserError, match=rf"data.tier is {tier}, but the lengths of x of mine are unknown"):
        choose_tier(items_of(Boxes("60"), "x"), tier)


@pytest.mark.parametrize(("tier", "is_told"), [("host", True), ("disk", False), ("auto", False)])
def test_lengths_kept_freeze_random_draws_with_a_warning(tier, is_told, capsys):
    choose_tier(items_of(Made(torch.tensor), "images"), tier)
    told = "data.tier is host: the items of mine are read once, so their random numbers are the same in each epoch"
    assert (told in capsys.readouterr().out) == is_told


@pytest.mark.parametrize(("tier", "n_times"), [("disk", 2), ("host", 1), ("device", 1)])
def test_lengths_read_only_rows_that_are_needed(tier, n_times):
    dataset = Boxes("60")
    source = items_of(dataset, "y")
    dataset.read.clear()
    with closing(open_lengths(source, tier, n_epochs=2)) as feed:
        for epoch in range(2):
            list(feed.pools(epoch))
    assert sorted(dataset.read) == sorted([*range(60)] * n_times)


@pytest.mark.parametrize("n_workers", [0, 1])
def test_lengths_are_shown_as_in_a_batch(n_workers):
    made = Made(lambda row: (np.full((row % 4, 2), row, np.float32), row))
    source = items_of(made, "x", "y")
    source = source.with_workers(n_workers, 60) if n_workers else source
    with closing(source):
        rows, one = source[5:9], source[7]
    assert (rows["x"].shape, rows["y"].shape) == ((4, None, 2), (4,))
    assert (rows["y"].tolist(), rows["x"].values[:, 0].tolist()) == ([5, 6, 7, 8], [5] + [6] * 2 + [7] * 3)
    assert (one["x"].tolist(), one["y"].item()) == ([[7, 7]] * 3, 7)


class Workload(minimal.Workload):
    """Regression of the sum over a row's boxes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def predict(self, model, batch):
        boxes = batch["x"]
        return {"prediction": torch.zeros(len(batch)).index_add(0, boxes.rows, model(boxes.values)[:, 0].float())}


def train_lengths(world: World, *words: str) -> int | str:
    with patch.object(workloads, "load", lambda _: Workload):
        return train_rank(world, *words)


@pytest.mark.slow
def test_lengths_train_and_predict(folder, monkeypatch):
    monkeypatch.setattr(workloads, "load", lambda _: Workload)
    words = ("data.dataset=test_lengths:Boxes", "data.train='400'", "data.val='80'", "loader.num_workers=1")
    assert in_world(2, train_lengths, *words, "optim.lr=0.01") == [0, 0]
    run = folder / "runs/a"
    errors = [point["val/mse"] for point in val_points(run)]
    assert errors[-1] < errors[0]
    with h5py.File("new.h5", "w") as file:
        file["x/indptr"] = [0, 1, 4, 6]
        file["x/values"] = np.ones((6, 4), np.float32)
    predict(Predict(checkpoint=str(run), inputs=("new.h5",), output="new.csv"), ALONE, sys.stdout)
    one, three, two = (float(line.split(",")[1]) for line in (folder / "new.csv").read_text().splitlines()[1:])
    assert (three, two) == pytest.approx((3 * one, 2 * one))
