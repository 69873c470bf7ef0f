import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import numbered, numbers_of, run_train
from torch.utils.data import Dataset, IterableDataset

from fastgpu.feed.tiers import Feed, make_feed
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.dataset import DatasetSource, LoaderOptions, WorkerPool, open_dataset

CPU = torch.device("cpu")
FIELDS = {"images": "images", "labels": "labels"}


class Numbered(Dataset):
    """Rows that carry their numbers; `what` makes them misbehave."""

    class_names = ("a", "b", "c", "d")

    def __init__(self, what: str = "", rows: int = 150):
        self.what, self.images = what, numbered(rows, (1, 8, 8))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int):
        if row == 70:
            match self.what:
                case "raise":
                    raise RuntimeError("row 70 is bad")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(1000)
        if self.what == "random":
            return random.random(), np.random.rand(), torch.rand(())
        if self.what == "mapping":
            return {"labels": row % 4, "images": torch.from_numpy(self.images[row])}
        return self.images[row], row % 4


class Endless(IterableDataset):
    def __init__(self, path):
        pass

    def __iter__(self):
        return iter(())


class Empty(Numbered):
    def __len__(self) -> int:
        return 0


def rows_of(what: str = "", fields=FIELDS, **options) -> DatasetSource:
    return DatasetSource("Numbered", Numbered(what), fields, LoaderOptions(**options))


def feed_of(rows: DatasetSource, workers: int, tier="disk", **order) -> tuple[Feed, BlockSampler]:
    sampler = BlockSampler(rows.block_rows, 8, **({"pool_batches": 3, "seed": 1} | order))
    return make_feed(rows, sampler, tier, CPU, workers), sampler


def epoch_of(feed: Feed, epoch: int, consumed: int = 0) -> list[tuple[int, int]]:
    return [
        pair
        for pool in feed.pools(epoch, consumed)
        for pair in zip(numbers_of(pool.rows["images"]), pool.rows["labels"].tolist(), strict=True)
    ]


def workers_alive() -> bool:
    return bool(multiprocessing.active_children())


@pytest.mark.parametrize("what", ["", "mapping"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, True), (2, True), (2, False)])
def test_rows_come_in_the_order_of_the_sampler(what, workers, persistent):
    feed, order = feed_of(rows_of(what, persistent_workers=persistent), workers)
    pids = set()
    for epoch in range(3):
        order.set_epoch(epoch)
        assert epoch_of(feed, epoch) == [(row, row % 4) for row in order]
        pids |= {process.pid for process in multiprocessing.active_children()}
    assert len(pids) == 2 * (workers > 0) or not persistent
    order.set_epoch(5)
    assert epoch_of(feed, 5, 32) == [(row, row % 4) for row in order][32:]  # resumed inside a pool
    feed.close()
    assert not workers_alive()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("prefetch", "reader"))]


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_that_are_read_once_and_kept(tier):
    feed, order = feed_of(rows_of(), 2, tier)
    assert not workers_alive()
    assert epoch_of(feed, 0) == [(row, row % 4) for row in order]
    feed.close()


def test_ranks_share_the_rows_and_validation_sees_each_once():
    seen = []
    for rank in range(2):
        feed, _ = feed_of(rows_of(), 1, rank=rank, world_size=2, shuffle=False, drop_last=False)
        seen += [n for pool in feed.pools(0) for n in numbers_of(pool.rows["images"][: pool.plan.n_real_rows])]
        feed.close()
    assert sorted(seen) == list(range(150))


def test_what_a_dataset_draws_does_not_depend_on_the_workers():
    def draw(workers: int, epoch: int, consumed: int) -> torch.Tensor:
        fields = {"a": "a", "b": "b", "c": "c"}
        feed, _ = feed_of(rows_of("random", fields), workers)
        pools = [torch.stack([pool.rows[name].double() for name in fields]) for pool in feed.pools(epoch, consumed)]
        feed.close()
        return torch.cat(pools, 1)

    assert torch.equal(draw(0, 1, 0), draw(2, 1, 0))
    assert torch.equal(draw(0, 1, 0)[:, 40:], draw(1, 1, 40))  # nor on where the run was resumed
    assert not torch.equal(draw(0, 0, 0), draw(0, 1, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_reaches_the_loop(workers):
    feed, _ = feed_of(rows_of("raise"), workers)
    with pytest.raises(RuntimeError, match="row 70 is bad"):
        epoch_of(feed, 0)
    feed.close()
    assert not workers_alive()


def test_a_dead_worker_is_one_clear_error():
    feed, _ = feed_of(rows_of("die"), 2)
    with pytest.raises(
        RankError, match=r"one of the loader.num_workers \(2\) was killed or crashed while it read Numbered"
    ):
        epoch_of(feed, 0)
    feed.close()


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_the_same_error():
    loading = WorkerPool(rows_of(), BlockSampler(np.ones(150, np.int32), 8), 2)
    for error in (ConnectionResetError(), EOFError(), FileNotFoundError()):
        loading._batches = (_ for _ in map(_raise, [error]))
        with pytest.raises(RankError, match="was killed or crashed"):
            loading._next()
    loading._batches = (_ for _ in map(_raise, [OSError("Caught OSError in DataLoader worker process 0.")]))
    with pytest.raises(OSError, match="Caught OSError"):  # the Dataset's own
        loading._next()


def _raise(error: BaseException):
    raise error


def test_a_hung_worker_is_one_clear_error():
    feed, _ = feed_of(rows_of("hang", timeout_s=2), 2)
    with pytest.raises(RankError, match=r"no worker has sent a batch of Numbered for 2 s: it hangs, or is slower than"):
        epoch_of(feed, 0)
    feed.close()
    assert not workers_alive()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nowhere:Class", "data.dataset is nowhere:Class: No module named 'nowhere'; name a class"),
        ("test_dataset:Nothing", "has no attribute 'Nothing'"),
        ("test_dataset:Endless", "test_dataset:Endless, no map-style Dataset: its rows have no numbers"),
        ("test_dataset:Empty", r"Empty\('x'\) of data.train has no rows"),
    ],
)
def test_datasets_that_cannot_be_used(factory, message):
    with pytest.raises(UserError, match=message):
        open_dataset("data.train", "x", FIELDS, factory=factory, options=LoaderOptions())


@pytest.mark.slow
def test_trains(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from torch.utils.data import Dataset\n"
        "class Stripes(Dataset):\n"
        "    classes = ['down', 'across']\n"
        "    def __init__(self, path): self.rows = int(path)\n"
        "    def __len__(self): return self.rows\n"
        "    def __getitem__(self, row):\n"
        "        x = np.zeros((1, 8, 8), np.uint8)\n"
        "        x[:, ::2] = 255\n"
        "        return (x if row % 2 else x.swapaxes(1, 2).copy()), row % 2\n"
    )
    root = Path(__file__).parents[3]
    done = run_train(
        "--config",
        str(root / "config.yaml"),
        "data.dataset=mine:Stripes",
        "data.train='256'",
        "data.val='64'",
        "train.epochs=3",
        "data.batch_size=32",
        "loader.num_workers=1",
        "model.width=8",
        f"run.folder={tmp_path}",
        cwd=tmp_path,
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "worker processes: 1" in done.stdout
    assert "top1_pct 100" in done.stdout + done.stderr
