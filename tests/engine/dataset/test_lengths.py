"""Datasets whose items have different lengths: the boxes of an image, the words of a text."""

import json
import pickle
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch
from harness import ALONE, CPU, ROOT, TIMEOUT_S, run_train, same_weights, train_command
from torch.utils.data import Dataset

from fastgpu.dataset.items import Items
from fastgpu.dataset.source import ItemDataset, asks_from, rows_per_ask
from fastgpu.feed.sizes import choose_sizes
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Config, Data, Loader, Tier
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged

N_ROWS = 60


def boxes_of(row: int) -> np.ndarray:
    """(row % 5, 4) numbers that only this row has."""
    return np.arange(row * 100, row * 100 + row % 5 * 4, dtype=np.float32).reshape(-1, 4)


class Boxes(Dataset):
    """Detection-like items: an image, and any number of boxes."""

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int):
        return {"images": np.full((1, 4, 4), row, np.uint8), "boxes": boxes_of(row), "words": torch.arange(row % 7 + 1)}


NAMES = {"images": "images", "boxes": "boxes", "words": "words"}


def source_of(dataset: Dataset | None = None, names: dict[str, str] = NAMES) -> ItemDataset:
    return ItemDataset("mine", dataset or Boxes(), names)


def feed_of(source: ItemDataset, n_workers: int, tier: Tier = "disk") -> tuple[Feed, BlockSampler]:
    order = BlockSampler(source.block_rows, 4, pool_batches=3, seed=1)
    return make_feed(source, order, Placement(tier, CPU, n_workers), Loader()), order


@pytest.mark.parametrize("n_workers", [0, 2])
def test_items_of_any_length_are_ragged_rows_also_with_a_trailing_shape(n_workers):
    source = source_of()
    assert str(source.fields["boxes"]) == "float32 (N, any number, 4)"
    assert str(source.fields["words"]) == "int64 (N, any number)"
    feed, order = feed_of(source, n_workers)
    with closing(feed):
        for epoch in (0, 1):
            order.set_epoch(epoch)
            row_ids = iter(order)
            for pool in feed.pools(epoch):
                for batch in pool.rows.batches(4):
                    for row in range(len(batch)):
                        number = next(row_ids)
                        assert batch["images"][row].unique().tolist() == [number]
                        np.testing.assert_array_equal(values_of(batch["boxes"], row), boxes_of(number))
                        assert values_of(batch["words"], row).tolist() == list(range(number % 7 + 1))


def values_of(column: Ragged, row: int) -> np.ndarray:
    lo, hi = column.offsets[row : row + 2].tolist()
    return column.values[lo:hi].numpy()


class Growing(Boxes):
    """Rows that are far longer than the first ones."""

    ragged = ("boxes",)

    def __getitem__(self, row: int):
        return {"boxes": np.full((1000 if row % 9 == 5 else 1, 4), row, np.float32)}


def test_the_memory_of_a_pool_grows_with_rows_that_are_longer_than_expected():
    source = source_of(Growing(), {"boxes": "boxes"})
    feed, order = feed_of(source, 0)
    with closing(feed):
        for pool in feed.pools(0):
            boxes = pool.rows["boxes"]
            lengths = boxes.offsets.diff().tolist()
            rows = pool.plan.row_ids.tolist()
            assert lengths == [1000 if row % 9 == 5 else 1 for row in rows]
            assert boxes.values[:, 0].tolist() == np.repeat(rows, lengths).tolist()


class Same(Boxes):
    """Items that have one length wherever they are compared, and another one elsewhere."""

    def __getitem__(self, row: int):
        return {"boxes": np.zeros((2 if row == 7 else 1, 4), np.float32)}


def test_a_length_that_differs_seldom_is_refused_with_its_cure():
    source = source_of(Same(), {"boxes": "boxes"})
    message = r"mine: row 7 has boxes as float32 \(N, 2, 4\), row 0 as .*an attribute ragged = \('boxes',\) if only"
    feed, _ = feed_of(source, 0)
    with closing(feed), pytest.raises(RankError, match=message):
        list(feed.pools(0))
    Same.ragged = ("boxes",)
    assert source_of(Same(), {"boxes": "boxes"}).fields["boxes"].is_ragged


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_of_unknown_length_stay_on_the_disk_tier(tier):
    with pytest.raises(UserError, match=rf"data.tier is {tier}, but nobody knows how many values boxes of mine have"):
        feed_of(source_of(), 0, tier)


# ---------------------------------------------------------------------------------------------- what workers are asked


def test_asks_are_the_rows_of_the_order_and_end_with_the_last_epoch():
    source = source_of()
    order = BlockSampler(source.block_rows, 4, pool_batches=3, seed=1)
    order.n_epochs = 3
    second = list(order.pools(1))[1]
    asked = [row for ask in asks_from(second, 4) for row in ask.rows.tolist()]
    expected = [row for plan in order.plans(1, 1) for row in plan.reads.starts.tolist()]
    assert asked == expected
    assert len(asked) == 60 - 12 + 60


class Counting(Boxes):
    """Notes which rows were read."""

    def __init__(self):
        self.read: list[int] = []

    def __getitem__(self, row: int):
        self.read.append(row)
        return super().__getitem__(row)


def test_no_row_is_read_that_no_epoch_needs():
    dataset = Counting()
    source = source_of(dataset)
    feed, order = feed_of(source, 0)
    order.n_epochs = 2
    dataset.read.clear()
    with closing(feed):
        for epoch in range(2):
            list(feed.pools(epoch))
    assert sorted(dataset.read) == sorted([*range(N_ROWS)] * 2)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_that_are_kept_are_read_once(tier):
    dataset = Counting()
    source = ItemDataset("mine", dataset, {"images": "images"})
    dataset.read.clear()
    feed, _ = feed_of(source, 0, tier)
    with closing(feed):
        for epoch in range(2):
            list(feed.pools(epoch))
    assert sorted(dataset.read) == list(range(N_ROWS))


def test_a_worker_is_asked_for_four_mib_but_all_workers_have_to_do():
    small = ItemDataset("small", Boxes(), {"images": "images"})
    order = BlockSampler(np.ones(100_000, np.int32), 256, pool_batches=390)
    assert rows_per_ask(small, order) == 390 * 256 // 64
    assert rows_per_ask(small, BlockSampler(np.ones(100, np.int32), 50, pool_batches=2)) == 50
    small.fields = {"x": small.fields["images"]._replace(shape=(1 << 20,))}
    assert rows_per_ask(small, order) == 4


# ---------------------------------------------------------------------------------------------- what is told


class Drawing(Boxes):
    def __getitem__(self, row: int):
        return {"x": torch.rand(2)}


@pytest.mark.parametrize(("dataset", "is_told"), [(Drawing(), True), (Boxes(), False)])
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_tier_that_would_freeze_what_a_dataset_draws_is_told(dataset, is_told, tier, capsys):
    source = ItemDataset("mine", dataset, {"x": "x"} if is_told else {"images": "images"})
    data = Data(train="x", val="y", fields={"x": "x"}, batch_size=4, tier=tier)
    choose_sizes(Config(workload="minimal", data=data), source, source, ALONE)
    told = "data.tier is host: the items of mine are read once, so what they draw at random is the same in each epoch"
    assert (told in capsys.readouterr().out) == (is_told and tier == "host")


def test_items_are_pickled_with_their_types():
    items = pickle.loads(pickle.dumps(Items("mine", Boxes(), NAMES)))
    columns = items.read_rows(np.array([3, 4]), seed=0, epoch=0)
    np.testing.assert_array_equal(columns["boxes"].values, np.concatenate([boxes_of(3), boxes_of(4)]))
    assert columns["boxes"].offsets.tolist() == [0, 3, 7]


# ---------------------------------------------------------------------------------------------- training

WORKLOAD = """
import torch
import torch.nn.functional as F
from torch import nn

import workloads
from fastgpu.process.config import Section


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.parts = nn.Linear(width, 8) if width else nn.Embedding(50, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, values, rows, n_rows):
        hidden = torch.zeros(n_rows, 8).index_add(0, rows, torch.tanh(self.parts(values)))
        return self.head(hidden)


class Workload(workloads.Workload):
    class Options(Section):
        width: int = 0

    inputs = ("parts",)
    best = ("mse", "lower")

    def __init__(self, options, train, val):
        assert train.fields["parts"].is_ragged
        self.width = options.width

    def model(self):
        return Net(self.width)

    def transform(self, batch, rng):
        return batch

    def _predict(self, model, batch):
        parts = batch["parts"]
        return model(parts.values, parts.rows, len(batch)).float()

    def loss(self, model, batch):
        return F.mse_loss(self._predict(model, batch)[:, 0], batch["y"].float())

    def score(self, model, batch):
        return {"mse": self.loss(model, batch) * len(batch)}

    def metrics(self, sums):
        return {"mse": sums["mse"] / sums["n"]}

    def card(self):
        return {}

    def predict(self, model, batch):
        return {"y": self._predict(model, batch)[:, 0]}
"""
DATASETS = '''
import numpy as np
import torch
from torch.utils.data import Dataset


class Boxes(Dataset):
    """Boxes (k, 4) with jitter; y is their area."""

    def __init__(self, path):
        self.n_rows = int(path)

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        rng = np.random.default_rng(row)
        boxes = rng.random((rng.integers(0, 6), 4), np.float32)
        return {"parts": boxes + 0.01 * torch.rand(4).numpy(), "y": boxes[:, :2].prod(1).sum()}


class Texts(Boxes):
    """Words; y is the mean of their numbers."""

    def __getitem__(self, row):
        rng = np.random.default_rng(row)
        words = rng.integers(0, 50, rng.integers(1, 20))
        return {"parts": words, "y": np.float32(words.mean() / 50)}
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with a workload and two Datasets of its own."""
    root = tmp_path_factory.mktemp("own") / "project"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns("runs", "tests", "docs", "data", "__pycache__"))
    (root / "workloads/lengths.py").write_text(WORKLOAD)
    (root / "mine.py").write_text(DATASETS)
    (root / "config.yaml").write_text("{}")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "width"), [("Boxes", 4), ("Texts", 0)])
def test_rows_of_any_length_train_resume_to_equal_weights_on_two_ranks_and_are_predicted_from(project, dataset, width):
    options = [
        "workload=lengths",
        f"model.width={width}",
        f"data.dataset=mine:{dataset}",
        "data.train='400'",
        "data.val='80'",
        "data.fields={parts: parts, y: y}",
        "data.batch_size=16",
        "data.pool_batches=5",
        "loader.num_workers=1",
        "optim.lr=0.01",
        "train.epochs=4",
        "run.checkpoint_every_steps=5",
        "dist.device=cpu",
    ]
    whole = run_train(f"run.name={dataset}-whole", *options, ranks=2, cwd=project, root=project)
    assert whole.returncode == 0, whole.stderr
    run = project / f"runs/{dataset}-killed"
    command = train_command(f"run.name={dataset}-killed", *options, ranks=2, root=project)
    with subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(run.glob("checkpoints/last-00000[6-9]")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for running in (*psutil.Process(process.pid).children(recursive=True), process):
            running.kill()
    resumed = run_train(f"run.name={dataset}-killed", *options, "run.resume=auto", ranks=2, cwd=project, root=project)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(project / f"runs/{dataset}-whole", run)

    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    errors = [point["val/mse"] for point in points if "val/mse" in point]
    assert errors[-1] < errors[0]
    parts = [np.ones((k, 4), np.float32) if width else np.arange(k, dtype=np.int64) for k in (1, 3, 2)]
    with h5py.File(project / "new.h5", "w") as file:
        file["parts/indptr"] = [0, 1, 4, 6]
        file["parts/values"] = np.concatenate(parts)
    predict = [sys.executable, "predict.py", str(run), "new.h5", "-o", f"{dataset}.csv"]
    done = subprocess.run(predict, cwd=project, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert len((project / f"{dataset}.csv").read_text().splitlines()) == 4
