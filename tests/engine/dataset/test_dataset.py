import errno
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import psutil
import pytest
import torch
import yaml
from harness import PLAN, TIMEOUT_S, numbered, numbers_of, reads_of, run_ranks, run_train
from torch.utils.data import Dataset, IterableDataset

from fastgpu.dataset import source as dataset_source
from fastgpu.dataset.source import ItemDataset, open_dataset
from fastgpu.feed import prefetch
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.launch import HangError, RankError, UserError
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.selection import Groups, Mixture, hold_out

# The iterator that torch could not finish, because a worker could not be started, is deleted at any later time.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <function _MultiProcessingDataLoaderIter.__del__")
CPU = torch.device("cpu")
FIELDS = {"images": "images", "labels": "labels"}
N_ROWS = 150
BAD_ROW = 70


class Numbered(Dataset):
    """Rows that carry their numbers. `kind` says what the items are, or how reading row 70 fails."""

    class_names = ("a", "b", "c", "d")

    def __init__(self, kind: str = ""):
        self.kind = kind
        self.images = numbered(N_ROWS, (1, 8, 8))

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int):
        if row == BAD_ROW:
            match self.kind:
                case "raise":
                    raise RuntimeError("row 70 is bad")
                case "raise OSError":
                    raise OSError("row 70 cannot be opened")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(1000)
                case "exit":
                    os._exit(5)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "random":
            return random.random(), np.random.rand(), torch.rand(())
        if self.kind == "mapping":
            return {"labels": row % 4, "images": torch.from_numpy(self.images[row])}
        return self.images[row], row % 4


class Single(Numbered):
    """Items that are one tensor alone, (1, 8, 8)."""

    def __getitem__(self, row: int):
        return torch.from_numpy(self.images[row])


class Endless(IterableDataset):
    def __init__(self, path):
        pass

    def __iter__(self):
        return iter(())


class Empty(Numbered):
    def __len__(self) -> int:
        return 0


class WithoutLength(Dataset):
    def __init__(self, path):
        pass

    def __getitem__(self, row: int):
        return row


def source_of(kind: str = "", fields: dict[str, str] = FIELDS) -> ItemDataset:
    return ItemDataset("Numbered", Numbered(kind), fields)


def order_of(source: ItemDataset, **options) -> BlockSampler:
    return BlockSampler(source.block_rows, 8, **({"pool_batches": 3, "seed": 1} | options))


def feed_of(source: ItemDataset, order: BlockSampler, n_workers: int, tier: str = "disk", **loader: int) -> Feed:
    return make_feed(source, order, Placement(tier, CPU, n_workers), Loader(**loader))


def epoch_of(feed: Feed, epoch: int, first_pool: int = 0) -> list[tuple[int, int]]:
    """(number, label) of each row of an epoch."""
    pairs = []
    for pool in feed.pools(epoch, first_pool):
        pairs += zip(numbers_of(pool.rows["images"]), pool.rows["labels"].tolist(), strict=True)
    return pairs


def expected_of(order: BlockSampler, epoch: int) -> list[tuple[int, int]]:
    order.set_epoch(epoch)
    return [(row, row % 4) for row in order]


def worker_pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


@contextmanager
def start_method(method: str) -> Iterator[None]:
    """How processes are started meanwhile: fork, spawn or forkserver."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def wait_for_workers() -> None:
    """Fails if workers are left. On a busy machine, one that was killed takes a moment to be gone."""
    deadline = time.monotonic() + TIMEOUT_S
    while worker_pids():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("kind", ["", "mapping"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_rows_come_in_the_order_of_the_sampler(kind, n_workers):
    source = source_of(kind)
    order = order_of(source)
    feed = feed_of(source, order, n_workers)
    pids = set()
    for epoch in range(3):
        assert epoch_of(feed, epoch) == expected_of(order, epoch)
        pids |= worker_pids()
    assert len(pids) == n_workers
    assert epoch_of(feed, 5, 2) == expected_of(order, 5)[48:]  # resumed at a pool
    feed.close()
    wait_for_workers()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("prefetch", "reader"))]


class Slow(Numbered):
    """Items that take a time of their own each, so that workers overtake each other."""

    def __getitem__(self, row: int):
        time.sleep(row * 7919 % 11 / 5000)
        return super().__getitem__(row)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("n_workers", [1, 3])
def test_workers_that_overtake_each_other_keep_the_order(n_workers):
    source = ItemDataset("Slow", Slow(), FIELDS)
    order = order_of(source, pool_batches=2, drop_last=False)
    with closing(feed_of(source, order, n_workers)) as feed:
        for epoch in range(2):
            assert epoch_of(feed, epoch) == expected_of(order, epoch)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_read_the_same(method):
    source = source_of()
    order = order_of(source)
    with start_method(method):
        with closing(feed_of(source, order, 2)) as feed:
            assert epoch_of(feed, 0) == expected_of(order, 0)
        with multiprocessing.Pool(1) as pool:  # what other code starts can be terminated
            assert pool.map(signal_mask, [0]) == [set()]


def signal_mask(_: int) -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_machine_that_refuses_the_second_worker_is_one_line_and_none_is_left(monkeypatch):
    start = multiprocessing.Process.start

    def refuse_the_second(process):
        if worker_pids():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(multiprocessing.Process, "start", refuse_the_second)
    source = source_of()
    message = r"the loader.num_workers \(2\) cannot be started: Resource temporarily unavailable; use fewer of them"
    with closing(feed_of(source, order_of(source), 2)) as feed, pytest.raises(RankError, match=message):
        next(feed.pools(0))
    wait_for_workers()


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_workers_that_cannot_be_started_are_the_same_error_again():
    source = source_of()
    source.items.dataset.transform = lambda image: image
    order = order_of(source)
    reader = source.with_workers(1, order)
    plan = next(order.pools(0))
    reads = next(plan.reads.portions(reader._rows_per_ask))
    out = {"images": np.zeros((24, 1, 8, 8), np.uint8), "labels": np.zeros(24, int)}
    with (
        start_method("spawn"),
        ThreadPoolExecutor(1) as threads,
    ):  # torch leaves a handler of signals in the main thread
        for _ in range(2):
            with pytest.raises(UserError, match="cannot be sent to worker processes"):
                threads.submit(reader.read, plan, reads, out).result()


KILLED = """
import multiprocessing, os, signal
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    from test_dataset import feed_of, order_of, source_of
    source = source_of()
    feed = feed_of(source, order_of(source), 2)
    next(feed.pools(0))
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_with_a_rank_that_is_killed(tmp_path, method):
    (tmp_path / "killed.py").write_text(KILLED.format(method=method))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "killed.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout
        pids = [int(word) for word in rank.stdout.readline().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + TIMEOUT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether there is such a process, which is not one that only waits to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Mirrored(Numbered):
    """Views that go backwards, which torch takes for no array."""

    def __getitem__(self, row: int):
        return self.images[row][:, :, ::-1], row % 4


@pytest.mark.parametrize("n_workers", [0, 1])
def test_mirrored_images_are_arrays(n_workers):
    source = ItemDataset("Mirrored", Mirrored(), FIELDS)
    order = order_of(source, seed=None)
    with closing(feed_of(source, order, n_workers)) as feed:
        pool = next(feed.pools(0))
        images = pool.rows["images"].numpy()
        np.testing.assert_array_equal(images, source.items.dataset.images[: len(images), :, :, ::-1])


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_part_of_a_dataset_comes_with_balanced_classes(n_workers):
    whole = source_of()
    whole.items.dataset.targets = np.arange(len(whole)) % 4
    source = whole
    labels = source.column("labels").copy()
    val = hold_out(whole.block_rows, 50)[1].rows()
    labels[val] = -1
    groups = Groups(("0", "1", "2", "3"), (1, 1, 1, 1), labels, by_block=False)
    order = BlockSampler(Mixture(groups, whole.block_rows, 8, 1), 8, pool_batches=3, seed=1)
    feed = feed_of(source, order, n_workers)
    for epoch in range(2):
        order.set_epoch(epoch)
        rows = epoch_of(feed, epoch)
        row_ids = list(order)
        assert [label for _, label in rows] == labels[row_ids].tolist()
        assert [number for number, _ in rows] == row_ids
        counts = np.bincount(labels[row_ids])
        assert counts.max() - counts.min() <= 1
    feed.close()


@pytest.mark.parametrize("tier", ["host", "device"])
def test_rows_that_are_read_once_and_kept(tier):
    source = source_of()
    order = order_of(source)
    feed = feed_of(source, order, 2, tier)
    wait_for_workers()
    assert epoch_of(feed, 0) == expected_of(order, 0)
    feed.close()


def test_ranks_share_the_rows_and_validation_sees_each_once():
    numbers = []
    for rank in range(2):
        source = source_of()
        feed = feed_of(source, order_of(source, shard=Shard(rank, 2), seed=None, drop_last=False), 1)
        for pool in feed.pools(0):
            numbers += numbers_of(pool.rows["images"][: pool.plan.n_real_rows])
        feed.close()
    assert sorted(numbers) == list(range(N_ROWS))


def test_random_numbers_of_items_leave_gpus_alone(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    items = source_of("random", {"a": "a", "b": "b", "c": "c"}).items
    rows = np.array([5, 9])
    drawn = [items.read_rows(rows, seed, epoch)["c"].tolist() for seed, epoch in ((0, 3), (0, 3), (1, 3), (0, 4))]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2], *drawn[3]}) == 6  # other ones in each row, run and epoch
    assert not seeds


def test_random_numbers_of_a_dataset_do_not_depend_on_the_workers():
    def draw(n_workers: int, epoch: int, first_pool: int, seed: int = 1) -> torch.Tensor:
        source = source_of("random", {"a": "a", "b": "b", "c": "c"})
        order = order_of(source, seed=seed)
        feed = feed_of(source, order, n_workers)
        columns = []
        for pool in feed.pools(epoch, first_pool):
            columns.append(torch.stack([pool.rows[name].double() for name in source.fields]))
        feed.close()
        return torch.cat(columns, 1)

    alone = draw(0, 1, 0)
    assert torch.equal(alone, draw(2, 1, 0))
    assert torch.equal(alone[:, 48:], draw(1, 1, 2))  # nor on where the run was resumed
    numbers = {*alone.flatten().tolist()}
    assert numbers.isdisjoint(draw(0, 0, 0).flatten().tolist())  # of another epoch
    assert numbers.isdisjoint(draw(0, 1, 0, seed=2).flatten().tolist())  # and of another run


def test_rows_columns_and_class_names_without_a_feed():
    source = source_of()
    assert source.attributes == {"class_names": ["a", "b", "c", "d"]}
    numbers = [5, 149, 0]
    out = {"images": np.zeros((3, 1, 8, 8), np.uint8), "labels": np.zeros(3, int)}
    source.read(PLAN, reads_of(*[(row, np.array([place])) for place, row in enumerate(numbers)]), out)
    assert numbers_of(out["images"]) == numbers
    assert out["labels"].tolist() == [1, 1, 0]
    assert numbers_of(source.column("images")) == list(range(N_ROWS))
    with pytest.raises(KeyError):
        source.column("labels")  # the Dataset has no such attribute


FLOATS = torch.linspace(0, 1, N_ROWS, dtype=torch.float64)


@pytest.mark.parametrize(
    ("item", "attributes", "column"),
    [
        (lambda row: row % 4, {"targets": [row % 4 for row in range(N_ROWS)]}, np.arange(N_ROWS) % 4),
        (lambda row: np.uint8(row % 4), {"labels": torch.arange(N_ROWS) % 4}, np.arange(N_ROWS) % 4),
        (lambda row: FLOATS[row].float(), {"targets": FLOATS}, FLOATS.numpy()),
        (lambda row: float("nan"), {"targets": np.full(N_ROWS, np.nan)}, np.full(N_ROWS, np.nan)),
        (lambda row: row % 4, {"labels": ["a"] * N_ROWS, "targets": np.arange(N_ROWS) % 4}, np.arange(N_ROWS) % 4),
        (lambda row: row % 4, {"targets": np.arange(N_ROWS) % 4 * 10 + 10}, None),  # numbered in another way
        (lambda row: row % 4, {"targets": np.arange(N_ROWS - 1) % 4}, None),
        (lambda row: row % 4, {"targets": np.zeros(N_ROWS)}, None),  # floats, for which labels of classes are no match
        (lambda row: np.full((2, 2), row % 4), {"targets": np.arange(N_ROWS) % 4}, None),  # of images, not of pixels
        (lambda row: row % 4, {"labels": ["a.png"] * N_ROWS}, None),
        (lambda row: row % 4, {"labels": [[0], [0, 1]] * (N_ROWS // 2)}, None),
        (lambda row: row % 4, {"labels": len, "targets": 5}, None),
    ],
)
def test_an_attribute_is_a_field_only_if_it_has_the_values_of_the_items(item, attributes, column):
    class WithAttributes(Numbered):
        def __getitem__(self, row: int):
            return self.images[row], item(row)

    rows = WithAttributes()
    vars(rows).update(attributes)
    source = ItemDataset("Numbered", rows, FIELDS)
    if column is None:
        with pytest.raises(KeyError):
            source.column("labels")
    else:
        np.testing.assert_array_equal(source.column("labels"), column)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [("raise", RuntimeError, "row 70 is bad"), ("raise OSError", OSError, "row 70 cannot be opened")],
)
def test_an_error_of_the_dataset_reaches_the_loop(n_workers, kind, error, message):
    """From a worker as one line, which names the place in the code; without workers as it is."""
    source = source_of(kind)
    feed = feed_of(source, order_of(source), n_workers)
    with pytest.raises(RankError if n_workers else error, match=message) as raised:
        epoch_of(feed, 0)
    text = str(raised.value)
    if n_workers:
        assert re.fullmatch(rf"Numbered: {error.__name__}: .* \(test_dataset.py:\d+\) in row 70 of Numbered; .*", text)
    assert "in row 70 of Numbered" in text + "".join(getattr(raised.value, "__notes__", []))
    feed.close()
    wait_for_workers()


@pytest.mark.parametrize("kind", ["die", "exit"])
def test_a_dead_worker_is_one_clear_error(kind):
    source = source_of(kind)
    feed = feed_of(source, order_of(source), 2)
    message = r"one of the loader.num_workers \(2\) was killed or crashed while it read Numbered"
    with pytest.raises(RankError, match=message):
        epoch_of(feed, 0)
    feed.close()


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.2)
    monkeypatch.setattr(dataset_source, "GRACE_S", 0.2)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_dataset_that_cannot_be_sent_to_a_process_is_one_line():
    source = source_of()
    source.items.dataset.transform = lambda image: image
    refused = pytest.raises(UserError, match=r"lambda.*; define")
    with start_method("spawn"), closing(feed_of(source, order_of(source), 2)) as feed, refused:
        next(feed.pools(0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "stop"])
@pytest.mark.usefixtures("short_waits")
def test_a_worker_that_hangs_or_is_stopped_is_one_clear_error_and_is_killed(kind, capfd):
    source = ItemDataset("Numbered", Numbered(kind), FIELDS, timeout_s=8)
    feed = feed_of(source, order_of(source), 2, timeout_s=8)
    message = r"no rows have come from Numbered: it hangs, or is slower than loader.timeout_s \(8\) allows"
    with closing(feed):
        pools = feed.pools(0)
        next(pools)
        processes = multiprocessing.active_children()
        with pytest.raises(HangError, match=message):
            list(pools)
    if kind == "hang":
        assert "in __getitem__" in capfd.readouterr().err  # the stack of the worker: where its Dataset hangs
    for worker in processes:
        worker.join(TIMEOUT_S)
        assert not worker.is_alive()
    wait_for_threads()


def test_workers_go_on_when_torchrun_asks_all_processes_of_a_rank_to_stop():
    """It sends SIGTERM to the process group, and the rank still needs rows: it finishes its step."""
    source = source_of()
    with closing(feed_of(source, order_of(source), 2)) as feed:
        expected = epoch_of(feed, 0)
        pools = feed.pools(1)
        next(pools)
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGTERM)
        for _ in pools:
            pass
        assert epoch_of(feed, 0) == expected


@pytest.mark.usefixtures("short_waits")
def test_workers_that_were_stopped_do_not_keep_a_feed_from_closing():
    source = source_of()
    feed = feed_of(source, order_of(source), 2)
    next(feed.pools(0))
    processes = multiprocessing.active_children()
    for worker in processes:
        os.kill(worker.pid, signal.SIGSTOP)
    feed.close()
    for worker in processes:
        worker.join(TIMEOUT_S)
        assert not worker.is_alive()
    wait_for_threads()


def test_closing_at_any_moment_leaves_no_thread_or_process():
    rng = random.Random(0)
    for _ in range(5):
        source = source_of()
        feed = feed_of(source, order_of(source), 2)
        for _, _ in zip(range(rng.randrange(1, 4)), feed.pools(0), strict=False):
            time.sleep(rng.random() / 50)
        assert worker_pids()
        feed.close()
        feed.close()
        wait_for_workers()
        wait_for_threads()


def wait_for_threads() -> None:
    """Return when no thread of a feed is left."""
    for thread in threading.enumerate():
        if thread.name.startswith(("prefetch", "reader")):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nowhere:Class", "data.dataset is nowhere:Class: No module named 'nowhere'; name a class"),
        ("test_dataset:Nothing", "has no attribute 'Nothing'"),
        ("test_dataset:Endless", "test_dataset:Endless, which is not a map-style Dataset; rows need numbers"),
        ("test_dataset:Empty", r"Empty\('x'\) of data.train has no rows"),
        ("test_dataset:WithoutLength", r"WithoutLength\('x'\) of data.train has no length"),
    ],
)
def test_datasets_that_cannot_be_used(factory, message):
    with pytest.raises(UserError, match=message):
        open_dataset("data.train", "x", FIELDS, factory=factory)


# ---------------------------------------------------------------------------------------------- training

LINE = """
import numpy as np
from torch.utils.data import Dataset

class Line(Dataset):
    def __init__(self, path):
        self.n_rows = int(path)
    def __len__(self):
        return self.n_rows
    def __getitem__(self, row):
        x = np.random.default_rng(row).random(4, np.float32)
        return x, x.sum()
"""


@pytest.mark.slow
def test_trains(tmp_path):
    (tmp_path / "mine.py").write_text(LINE)
    config = {
        "workload": "minimal",
        "data": {
            "dataset": "mine:Line",
            "train": "512",
            "val": "64",
            "fields": {"x": "x", "y": "y"},
            "batch_size": 32,
        },
        "loader": {"num_workers": 1},
        "optim": {"lr": 0.02},
        "train": {"epochs": 5},
        "run": {"folder": str(tmp_path / "runs")},
        "dist": {"device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = run_train("--config", str(tmp_path / "config.yaml"), cwd=tmp_path, ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "worker processes on each rank: 1" in result.stdout
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    errors = [point["val/mse"] for point in map(json.loads, metrics.read_text().splitlines()) if "val/mse" in point]
    assert errors[-1] < 0.05  # the variance of y is 1/3


class Changing(Dataset):
    """Rows of another type, or another shape, than the first one."""

    def __init__(self, first: object, later: object):
        self.first = first
        self.later = later

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"x": self.later if row > 3 else self.first}


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize(
    ("later", "found"),
    [
        (np.int64(256), r"int64 \(N\)"),
        (np.float32(1), r"float32 \(N\)"),
        (np.zeros(2, np.uint8), r"uint8 \(N, 2\)"),
        ("a", "str"),
    ],
)
def test_rows_of_another_type_than_the_first_are_refused_by_their_number(n_workers, later, found):
    source = ItemDataset("mine", Changing(np.uint8(0), later), {"x": "x"})
    out = {"x": np.zeros(8, np.uint8)}
    with pytest.raises(RankError, match=rf"^mine: row 5 has x as {found}, row 0 as uint8 \(N\); give all rows"):
        source.read(PLAN, reads_of((5, np.array([5]))), out)
    with (
        closing(feed_of(source, order_of(source, seed=None), n_workers)) as feed,  # all rows in one batch
        pytest.raises(RankError, match=rf"^mine: row 4 has x as {found}, row 0 as uint8 \(N\); give all rows"),
    ):
        list(feed.pools(0))


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_batch_with_rows_of_several_types_keeps_their_values(n_workers):
    source = ItemDataset("mine", Changing(np.int64(300), np.uint8(7)), {"x": "x"})
    order = order_of(source)
    order.set_epoch(0)
    rows = list(order)
    assert rows[0] > 3  # the first row of the batch is a uint8
    with closing(feed_of(source, order, n_workers)) as feed:
        assert next(feed.pools(0)).rows["x"].tolist() == [300 if row < 4 else 7 for row in rows]


def test_a_dataset_of_words_is_refused():
    with pytest.raises(UserError, match="data.dataset: mine has x as str; use numbers, arrays or CPU tensors"):
        ItemDataset("mine", Changing("a", "b"), {"x": "x"})


STOPS = LINE.replace(
    "def __getitem__(self, row):",
    """def __getitem__(self, row):
        import os, signal
        if os.environ["RANK"] == "1" and row == 300:
            os.kill(os.getpid(), signal.SIGSTOP)""",
)


@pytest.mark.slow
def test_a_stopped_worker_of_one_rank_ends_both_with_a_line_each(tmp_path):
    (tmp_path / "mine.py").write_text(STOPS)
    arguments = [
        "workload=minimal",
        "data.dataset=mine:Line",
        "data.train='512'",
        "data.val='64'",
        "data.fields={x: x, y: y}",
        "data.batch_size=32",
        "loader.num_workers=1",
        "dist.device=cpu",
    ]
    (tmp_path / "config.yaml").write_text("{}")
    for timeout_s in (2, 30):  # on a busy machine, any batch may take longer than two seconds
        first, second = run_ranks(*arguments, f"loader.timeout_s={timeout_s}", ranks=2, cwd=tmp_path)
        if "no rows have come" in second.stderr:
            break
    assert (first.returncode, second.returncode) == (2, 2)
    line = r"error: no rows have come from Line\('512'\) of data.train: it hangs, .*\n"
    assert re.search(line, second.stderr), first.stderr + second.stderr
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith("error: rank 0 lost the others")


def test_items_of_another_number_of_values_than_are_named_are_one_line():
    for fields in ({"images": "images"}, {**FIELDS, "weights": "weights"}):
        message = f"have 2 values; data.fields .* names {', '.join(fields)}: name what they have"
        with pytest.raises(UserError, match=message):
            ItemDataset("x", Numbered(), fields)


def test_an_item_that_is_a_tensor_is_one_value():
    """Its first axis are no fields."""
    source = ItemDataset("x", Single(), {"images": "images"})
    assert source.fields["images"].shape == (1, 8, 8)
    with pytest.raises(UserError, match="have 1 values; data.fields .* names images, labels"):
        ItemDataset("x", Single(), FIELDS)
