"""Datasets whose items have different lengths: the boxes of an image, the words of a text."""

import shutil
import subprocess
import sys
from contextlib import closing

import h5py
import numpy as np
import psutil
import pytest
import torch
from harness import (
    ALONE,
    ROOT,
    copy_project,
    metrics_of,
    open_feed,
    run_to_end,
    run_train,
    same_weights,
    train_command,
    wait_until,
)
from torch.utils.data import Dataset

from fastgpu.dataset.source import ItemDataset, rows_per_ask
from fastgpu.feed import Feed
from fastgpu.feed.sizes import choose_sizes
from fastgpu.process.config import Config, Data, Tier
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
    return open_feed(source, order, tier, n_workers), order


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
    dataset = Same()
    message = r"mine: row 7 has boxes as float32 \(N, 2, 4\), row 0 as .*an attribute ragged = \('boxes',\) if only"
    feed, _ = feed_of(source_of(dataset, {"boxes": "boxes"}), 0)
    with closing(feed), pytest.raises(RankError, match=message):
        list(feed.pools(0))
    dataset.ragged = ("boxes",)
    assert source_of(dataset, {"boxes": "boxes"}).fields["boxes"].is_ragged


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_of_unknown_length_stay_on_the_disk_tier(tier):
    data = Data(train="x", val="y", fields=NAMES, batch_size=4, tier=tier)
    with pytest.raises(UserError, match=rf"data.tier is {tier}, but nobody knows how many values boxes of mine have"):
        choose_sizes(Config(workload="minimal", data=data), source_of(), source_of(), ALONE)


# ---------------------------------------------------------------------------------------------- what workers are asked


class Counting(Boxes):
    """Notes which rows were read."""

    def __init__(self):
        self.read: list[int] = []

    def __getitem__(self, row: int):
        self.read.append(row)
        return super().__getitem__(row)


@pytest.mark.parametrize(("tier", "n_times"), [("disk", 2), ("host", 1), ("device", 1)])
def test_no_row_is_read_that_no_epoch_needs_and_rows_that_are_kept_are_read_once(tier, n_times):
    dataset = Counting()
    source = source_of(dataset, {"images": "images"})
    dataset.read.clear()
    feed, order = feed_of(source, 0, tier)
    order.n_epochs = 2
    with closing(feed):
        for epoch in range(2):
            list(feed.pools(epoch))
    assert sorted(dataset.read) == sorted([*range(N_ROWS)] * n_times)


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


# ---------------------------------------------------------------------------------------------- training

WORKLOAD = """
import torch
import torch.nn.functional as F
from torch import nn

import workloads
from fastgpu.process.config import Section


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, values, rows, n_rows):
        hidden = torch.zeros(n_rows, 8).index_add(0, rows, torch.tanh(self.parts(values)))
        return self.head(hidden)[:, 0]


class Workload(workloads.Workload):
    Options = Section
    inputs = ("parts",)
    best = ("mse", "lower")

    def __init__(self, options, train, val):
        assert train.fields["parts"].is_ragged

    def model(self):
        return Net()

    def transform(self, batch, rng):
        return batch

    def predict(self, model, batch):
        parts = batch["parts"]
        return {"y": model(parts.values, parts.rows, len(batch)).float()}

    def loss(self, model, batch):
        return F.mse_loss(self.predict(model, batch)["y"], batch["y"].float())

    def score(self, model, batch):
        return {"mse": self.loss(model, batch) * len(batch)}

    def metrics(self, sums):
        return {"mse": sums["mse"] / sums["n"]}

    def card(self):
        return {}
"""
DATASET = '''
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
'''
CONFIG = """
workload: lengths
data:
  {dataset: mine:Boxes, train: "400", val: "80", fields: {parts: parts, y: y}, batch_size: 16, pool_batches: 5}
loader: {num_workers: 1}
optim: {lr: 0.01}
train: {epochs: 4}
run: {checkpoint_every_steps: 5}
dist: {device: cpu}
"""


@pytest.mark.slow
def test_rows_of_any_length_train_resume_to_equal_weights_on_two_ranks_and_are_predicted_from(tmp_path):
    project = copy_project(tmp_path)
    shutil.copyfile(ROOT / "predict.py", project / "predict.py")
    (project / "workloads/lengths.py").write_text(WORKLOAD)
    (project / "mine.py").write_text(DATASET)
    (project / "config.yaml").write_text(CONFIG)
    where = {"ranks": 2, "cwd": project, "root": project}
    whole = run_train("run.name=whole", **where)
    assert whole.returncode == 0, whole.stderr
    run = project / "runs/killed"
    command = train_command("run.name=killed", ranks=2, root=project)
    with subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(list(run.glob("checkpoints/last-00000[6-9]"))), process)
        for running in (*psutil.Process(process.pid).children(recursive=True), process):
            running.kill()
    resumed = run_train("run.name=killed", "run.resume=auto", **where)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(project / "runs/whole", run)

    errors = [point["val/mse"] for point in metrics_of(run) if "val/mse" in point]
    assert errors[-1] < errors[0]
    with h5py.File(project / "new.h5", "w") as file:
        file["parts/indptr"] = [0, 1, 4, 6]
        file["parts/values"] = np.ones((6, 4), np.float32)
    done = run_to_end([sys.executable, "predict.py", str(run), "new.h5", "-o", "new.csv"], project)
    assert done.returncode == 0, done.stderr
    assert len((project / "new.csv").read_text().splitlines()) == 4
