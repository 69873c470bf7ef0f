"""Datasets whose items have different lengths: the boxes of an image, the words of a text."""

import shutil
import subprocess
import sys
from contextlib import closing

import h5py
import numpy as np
import pytest
import torch
from harness import (
    ALONE,
    ROOT,
    copy_project,
    kill_tree,
    metrics_of,
    open_feed,
    run_to_end,
    run_train,
    same_weights,
    train_command,
    wait_for_step,
)
from torch.utils.data import Dataset

from fastgpu.dataset.source import ItemDataset, rows_per_ask
from fastgpu.feed import Feed
from fastgpu.feed.sizes import choose_sizes
from fastgpu.process.config import Config, Data, Tier
from fastgpu.process.launch import UserError
from fastgpu.rows.order import BlockSampler

N_ROWS = 60


class Boxes(Dataset):
    """Detection-like items: an image, any number of boxes, and any number of words."""

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int):
        boxes = np.full((row % 5, 4), row, np.float32)
        return {"images": np.full((1, 4, 4), row, np.uint8), "boxes": boxes, "words": torch.arange(row % 7 + 1)}


def source_of(dataset: Dataset, *names: str) -> ItemDataset:
    return ItemDataset("mine", dataset, {name: name for name in names})


def feed_of(source: ItemDataset, tier: Tier = "disk") -> Feed:
    return open_feed(source, BlockSampler(source.block_rows, 4, pool_batches=3, seed=1), tier, 0)


def config_of(tier: Tier) -> Config:
    return Config(workload="minimal", data=Data(train="x", val="y", fields={"x": "x"}, batch_size=4, tier=tier))


def test_items_of_any_length_are_ragged_rows_also_with_a_trailing_shape():
    fields = source_of(Boxes(), "images", "boxes", "words").fields
    described = ["uint8 (N, 1, 4, 4)", "float32 (N, any number, 4)", "int64 (N, any number)"]
    assert [*map(str, fields.values())] == described


class Growing(Boxes):
    """Rows that are far longer than the first ones."""

    ragged = ("boxes",)

    def __getitem__(self, row: int):
        return {"boxes": np.full((1000 if row % 9 == 5 else 1, 4), row, np.float32)}


def test_the_memory_of_a_pool_grows_with_rows_that_are_longer_than_expected():
    source = source_of(Growing(), "boxes")
    assert source.fields["boxes"].is_ragged  # although the items that were compared have one length
    with closing(feed_of(source)) as feed:
        for pool in feed.pools(0):
            boxes = pool.rows["boxes"]
            rows = pool.plan.row_ids
            assert boxes.offsets.diff().tolist() == np.where(rows % 9 == 5, 1000, 1).tolist()
            assert boxes.values[:, 0].tolist() == np.repeat(rows, boxes.offsets.diff()).tolist()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_of_unknown_length_stay_on_the_disk_tier(tier):
    source = source_of(Boxes(), "boxes")
    with pytest.raises(UserError, match=rf"data.tier is {tier}, but nobody knows how many values boxes of mine have"):
        choose_sizes(config_of(tier), source, source, ALONE)


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
    source = source_of(dataset, "images")
    dataset.read.clear()
    with closing(feed_of(source, tier)) as feed:
        feed.order.n_epochs = 2
        for epoch in range(2):
            list(feed.pools(epoch))
    assert sorted(dataset.read) == sorted([*range(N_ROWS)] * n_times)


def test_a_worker_is_asked_for_four_mib_but_all_workers_have_to_do():
    small = source_of(Boxes(), "images")
    order = BlockSampler(np.ones(100_000, np.int32), 256, pool_batches=390)
    assert rows_per_ask(small, order) == 390 * 256 // 64
    assert rows_per_ask(small, BlockSampler(np.ones(100, np.int32), 50, pool_batches=2)) == 50
    small.fields = {"x": small.fields["images"]._replace(shape=(1 << 20,))}
    assert rows_per_ask(small, order) == 4


# ---------------------------------------------------------------------------------------------- what is told


class Drawing(Boxes):
    def __getitem__(self, row: int):
        return {"images": torch.rand(2)}


@pytest.mark.parametrize(
    ("dataset", "tier", "is_told"), [(Drawing(), "host", True), (Drawing(), "disk", False), (Boxes(), "host", False)]
)
def test_a_tier_that_would_freeze_what_a_dataset_draws_is_told(dataset, tier, is_told, capsys):
    source = source_of(dataset, "images")
    choose_sizes(config_of(tier), source, source, ALONE)
    told = "data.tier is host: the items of mine are read once, so what they draw at random is the same in each epoch"
    assert (told in capsys.readouterr().out) == is_told


# ---------------------------------------------------------------------------------------------- training

WORKLOAD = """
import torch
from torch import nn

from workloads import minimal


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, values, rows, n_rows):
        hidden = torch.zeros(n_rows, 8).index_add(0, rows, torch.tanh(self.parts(values)))
        return self.head(hidden)[:, 0]


class Workload(minimal.Workload):
    def model(self):
        return Net()

    def predict(self, model, batch):
        parts = batch["x"]
        return {"prediction": model(parts.values, parts.rows, len(batch)).float()}
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
        return {"x": boxes + 0.01 * torch.rand(4).numpy(), "y": boxes[:, :2].prod(1).sum()}
'''
CONFIG = """
workload: lengths
data:
  {dataset: mine:Boxes, train: "400", val: "80", fields: {x: x, y: y}, batch_size: 16, pool_batches: 5}
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
        wait_for_step(run, 20, process)
        kill_tree(process)
    resumed = run_train("run.name=killed", "run.resume=auto", **where)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(project / "runs/whole", run)

    errors = [point["val/mse"] for point in metrics_of(run) if "val/mse" in point]
    assert errors[-1] < errors[0]
    with h5py.File(project / "new.h5", "w") as file:
        file["x/indptr"] = [0, 1, 4, 6]
        file["x/values"] = np.ones((6, 4), np.float32)
    done = run_to_end([sys.executable, "predict.py", str(run), "new.h5", "-o", "new.csv"], project)
    assert done.returncode == 0, done.stderr
    assert len((project / "new.csv").read_text().splitlines()) == 4
