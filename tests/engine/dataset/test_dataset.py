import errno
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import numpy as np
import psutil
import pytest
import torch
from harness import PLAN, TIMEOUT_S, numbered, numbers_of, open_feed, reads_of, run_ranks
from torch.utils.data import Dataset, IterableDataset

from fastgpu.dataset import source as dataset_source
from fastgpu.dataset.source import ItemDataset, open_dataset
from fastgpu.feed import Feed, prefetch
from fastgpu.process.launch import HangError, RankError, UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture, hold_out

FIELDS = {"images": "images", "labels": "labels"}
DRAWN = {"a": "a", "b": "b", "c": "c"}
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
                    raise OSError("row 70 cannot be opened")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    threading.Event().wait()
                case "exit":
                    os._exit(5)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
        match self.kind:
            case "random":
                return random.random(), np.random.rand(), torch.rand(())
            case "mapping":
                return {"labels": row % 4, "images": torch.from_numpy(self.images[row])}
            case "mirrored":  # a view that goes backwards, which torch takes for no array
                return self.images[row][:, :, ::-1], row % 4
            case "slow":  # items take a time of their own each, so that workers overtake each other
                time.sleep(row * 7919 % 11 / 5000)
        return self.images[row], row % 4


def source_of(kind: str = "", fields: dict[str, str] = FIELDS) -> ItemDataset:
    return ItemDataset("Numbered", Numbered(kind), fields)


def order_of(source: ItemDataset, **options) -> BlockSampler:
    return BlockSampler(source.block_rows, 8, **({"pool_batches": 3, "seed": 1} | options))


def feed_of(source: ItemDataset, order: BlockSampler, n_workers: int, tier: str = "disk", **loader: int) -> Feed:
    return open_feed(source, order, tier, n_workers, **loader)


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


def is_running(pid: int) -> bool:
    """Whether there is such a process, which is not one that only waits to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: set[int]) -> None:
    """On a busy machine, a process that was killed takes a moment to be gone."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing_is_left() -> bool:
    """Wait for the threads and processes of a feed that was closed. Fails if one of them stays."""
    wait_until_gone(worker_pids())
    for thread in threading.enumerate():
        if thread.name.startswith(("prefetch", "reader")):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    return True


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(("kind", "n_workers"), [("", 0), ("", 2), ("mapping", 0), ("mapping", 2), ("slow", 3)])
def test_rows_come_in_the_order_of_the_sampler(kind, n_workers):
    source = source_of(kind)
    order = order_of(source, drop_last=False)
    feed = feed_of(source, order, n_workers)
    pids = set()
    for epoch in range(3):
        assert epoch_of(feed, epoch) == expected_of(order, epoch)
        pids |= worker_pids()
    assert len(pids) == n_workers  # they go on from epoch to epoch
    assert epoch_of(feed, 5, 2) == expected_of(order, 5)[48:]  # resumed at a pool
    feed.close()
    assert nothing_is_left()


def test_mirrored_images_are_arrays():
    source = source_of("mirrored")
    out = {"images": np.zeros((4, 1, 8, 8), np.uint8), "labels": np.zeros(4, int)}
    source.read(PLAN, reads_of(*[(row, np.array([row])) for row in range(4)]), out)
    assert numbers_of(out["images"][:, :, :, ::-1]) == [0, 1, 2, 3]


def test_a_part_of_a_dataset_comes_with_balanced_classes():
    source = source_of()
    source.dataset.targets = np.arange(len(source)) % 4
    labels = source.column("labels").copy()
    labels[hold_out(source.block_rows, 50)[1].rows()] = -1
    groups = Groups(("0", "1", "2", "3"), (1, 1, 1, 1), labels, by_block=False)
    order = BlockSampler(Mixture(groups, source.block_rows, 8, 1), 8, pool_batches=3, seed=1)
    with closing(feed_of(source, order, 2)) as feed:
        for epoch in range(2):
            assert epoch_of(feed, epoch) == expected_of(order, epoch)
            counts = np.bincount(labels[list(order)])  # fails for -1, a row for validation
            assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("tier", ["host", "device"])
def test_workers_end_when_all_rows_are_kept(tier):
    source = source_of()
    order = order_of(source)
    with closing(feed_of(source, order, 2, tier)) as feed:
        wait_until_gone(worker_pids())
        assert epoch_of(feed, 0) == expected_of(order, 0)


def test_random_numbers_of_items_leave_gpus_alone(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    items = source_of("random", DRAWN)
    rows = np.array([5, 9])
    drawn = [items.read_rows(rows, seed, epoch)["c"].tolist() for seed, epoch in ((0, 3), (0, 3), (1, 3), (0, 4))]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2], *drawn[3]}) == 6  # other ones in each row, run and epoch
    assert not seeds


def test_random_numbers_of_a_dataset_do_not_depend_on_the_workers():
    def draw(n_workers: int, epoch: int, first_pool: int, seed: int = 1) -> torch.Tensor:
        source = source_of("random", DRAWN)
        columns = []
        with closing(feed_of(source, order_of(source, seed=seed), n_workers)) as feed:
            for pool in feed.pools(epoch, first_pool):
                columns.append(torch.stack([pool.rows[name].double() for name in source.fields]))
        return torch.cat(columns, 1)

    alone = draw(0, 1, 0)
    assert torch.equal(alone, draw(2, 1, 0))
    assert torch.equal(alone[:, 48:], draw(1, 1, 2))  # nor on where the run was resumed
    numbers = {*alone.flatten().tolist()}
    assert len(numbers) == alone.numel()  # no rows draw what others have drawn
    assert numbers.isdisjoint(draw(0, 0, 0).flatten().tolist())  # of another epoch
    assert numbers.isdisjoint(draw(0, 1, 0, seed=2).flatten().tolist())  # and of another run


# ---------------------------------------------------------------------------------------------- columns, types


class Single(Numbered):
    """Items that are one tensor alone, (1, 8, 8)."""

    def __getitem__(self, row: int):
        return torch.from_numpy(self.images[row])


def test_columns_and_class_names():
    assert ItemDataset("x", Single(), {"images": "images"}).fields["images"].shape == (1, 8, 8)
    source = source_of()
    assert source.attributes == {"class_names": ["a", "b", "c", "d"]}
    assert numbers_of(source.column("images")) == list(range(N_ROWS))
    assert source.column("labels") is None  # the Dataset has no such attribute
    assert source.column("masks") is None  # nor such a field


CLASSES = np.arange(N_ROWS) % 4


@pytest.mark.parametrize(
    ("item", "attributes", "column"),
    [
        (lambda row: row % 4, {"targets": CLASSES.tolist()}, CLASSES),
        (lambda row: np.uint8(row % 4), {"labels": torch.from_numpy(CLASSES)}, CLASSES),
        (lambda row: np.float32(row / 7), {"targets": np.arange(N_ROWS) / 7}, np.arange(N_ROWS) / 7),
        (lambda row: float("nan"), {"targets": np.full(N_ROWS, np.nan)}, np.full(N_ROWS, np.nan)),
        (lambda row: row % 4, {"labels": ["a"] * N_ROWS, "targets": CLASSES}, CLASSES),
        (lambda row: row % 4, {"targets": CLASSES * 10 + 10}, None),  # numbered in another way
        (lambda row: row % 4, {"targets": CLASSES[:-1]}, None),
        (lambda row: np.full((2, 2), row % 4), {"targets": CLASSES}, None),  # of images, not of pixels
        (lambda row: row % 4, {"labels": [[0], [0, 1]] * (N_ROWS // 2), "targets": len}, None),
    ],
)
def test_an_attribute_is_a_field_only_if_it_has_the_values_of_the_items(item, attributes, column):
    class WithAttributes(Numbered):
        def __getitem__(self, row: int):
            return self.images[row], item(row)

    rows = WithAttributes()
    vars(rows).update(attributes)
    source = ItemDataset("Numbered", rows, FIELDS)
    np.testing.assert_array_equal(source.column("labels"), column)


class Changing(Dataset):
    """Rows of another type, or another shape, than the first ones."""

    def __init__(self, first: object, later: object):
        self.first = first
        self.later = later

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"x": self.later if row > 3 else self.first}


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize(
    ("later", "found"), [(np.int64(256), r"int64 \(N\)"), (np.zeros(2, np.uint8), r"uint8 \(N, 2\)"), ("a", "str")]
)
def test_rows_of_another_type_than_the_first_are_refused_by_their_number(n_workers, later, found):
    source = ItemDataset("mine", Changing(np.uint8(0), later), {"x": "x"})
    message = rf"^mine: row 4 has x as {found}, row 0 as uint8 \(N\); give all rows"
    with (
        closing(feed_of(source, order_of(source, seed=None), n_workers)) as feed,  # all rows in one batch
        pytest.raises(RankError, match=message),
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


@pytest.mark.parametrize(
    ("items", "fields", "message"),
    [
        (Numbered(), ("images",), "have 2 values; data.fields .* names images: name what they have"),
        (Numbered(), ("images", "labels", "x"), "have 2 values; data.fields .* names images, labels, x: name"),
        (Single(), ("images", "labels"), "have 1 values; data.fields .* names images, labels: name"),
        (Numbered("mapping"), ("labels", "x"), "have labels, images; data.fields .* names labels, x: name"),
        (Changing("a", "b"), ("x",), "data.dataset: x has x as str; use numbers, arrays or CPU tensors"),
    ],
)
def test_items_that_are_no_rows_are_one_line(items, fields, message):
    """A tensor is one value: its first axis are no fields."""
    with pytest.raises(UserError, match=message):
        ItemDataset("x", items, {name: name for name in fields})


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


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nowhere:Class", "data.dataset is nowhere:Class: No module named 'nowhere'; name a class"),
        ("test_dataset:Nothing", "has no attribute 'Nothing'"),
        (
            "test_dataset:Endless",
            r"Endless\('x'\) of data.train is no map-style Dataset; rows need a length and numbers",
        ),
        ("test_dataset:Empty", r"Empty\('x'\) of data.train has no rows"),
        ("test_dataset:WithoutLength", r"WithoutLength\('x'\) of data.train is no map-style Dataset"),
    ],
)
def test_datasets_that_cannot_be_used(factory, message):
    with pytest.raises(UserError, match=message):
        open_dataset("data.train", "x", FIELDS, factory=factory)


# ---------------------------------------------------------------------------------------------- errors of workers


@pytest.mark.parametrize("n_workers", [0, 2])
def test_an_error_of_the_dataset_reaches_the_loop(n_workers):
    """From a worker as one line, which names the place in the code; without workers as it is."""
    source = source_of("raise")
    with (
        closing(feed_of(source, order_of(source), n_workers)) as feed,
        pytest.raises(RankError if n_workers else OSError, match="row 70 cannot be opened") as raised,
    ):
        epoch_of(feed, 0)
    text = str(raised.value)
    if n_workers:
        assert re.fullmatch(r"Numbered: OSError: .* in row 70 of Numbered \(test_dataset.py:\d+\); .*", text)
    assert "in row 70 of Numbered" in text + "".join(getattr(raised.value, "__notes__", []))
    assert nothing_is_left()


@pytest.mark.parametrize("kind", ["die", "exit"])
def test_a_dead_worker_is_one_clear_error(kind):
    source = source_of(kind)
    message = r"one of the loader.num_workers \(2\) was killed or crashed reading Numbered"
    with closing(feed_of(source, order_of(source), 2)) as feed, pytest.raises(RankError, match=message):
        epoch_of(feed, 0)
    assert nothing_is_left()


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(prefetch, "CLOSE_S", 0.2)
    monkeypatch.setattr(dataset_source, "CLOSE_S", 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "stop"])
@pytest.mark.usefixtures("short_waits")
def test_a_worker_that_hangs_or_is_stopped_is_one_clear_error_and_is_killed(kind, capfd):
    source = source_of(kind)
    message = r"no rows have come from Numbered in loader.timeout_s \(8 s\)"
    with closing(feed_of(source, order_of(source), 2, timeout_s=8)) as feed:
        pools = feed.pools(0)
        next(pools)
        pids = worker_pids()
        with pytest.raises(HangError, match=message):
            list(pools)
    if kind == "hang":
        assert "in __getitem__" in capfd.readouterr().err  # the stack of the worker: where its Dataset hangs
    wait_until_gone(pids)
    assert nothing_is_left()


@pytest.mark.usefixtures("short_waits")
def test_workers_that_were_stopped_do_not_keep_a_feed_from_closing():
    source = source_of()
    with closing(feed_of(source, order_of(source), 2)) as feed:
        next(feed.pools(0))
        pids = worker_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    wait_until_gone(pids)
    assert nothing_is_left()


def test_workers_go_on_when_torchrun_asks_all_processes_of_a_rank_to_stop():
    """It sends SIGTERM to the process group, and the rank still needs rows: it finishes its step."""
    source = source_of()
    order = order_of(source)
    with closing(feed_of(source, order, 2)) as feed:
        pools = feed.pools(1)
        next(pools)
        for pid in worker_pids():
            os.kill(pid, signal.SIGTERM)
        for _ in pools:
            pass
        assert epoch_of(feed, 0) == expected_of(order, 0)


def test_closing_at_any_moment_leaves_no_thread_or_process():
    for n_pools in (1, 1, 2, 4):
        source = source_of()
        feed = feed_of(source, order_of(source), 2)
        for _ in zip(range(n_pools), feed.pools(0), strict=False):
            pass
        assert worker_pids()
        feed.close()
        feed.close()
        assert nothing_is_left()


def test_a_machine_that_refuses_the_second_worker_is_one_line_and_none_is_left(monkeypatch):
    fork = os.fork

    def refuse_the_second() -> int:
        if worker_pids():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refuse_the_second)
    source = source_of()
    message = "loader.num_workers is 2: Resource temporarily unavailable; use fewer of them"
    with pytest.raises(UserError, match=message):
        feed_of(source, order_of(source), 2)
    assert nothing_is_left()


# ---------------------------------------------------------------------------------------------- ranks

KILLED = """
import multiprocessing, os, signal
from test_dataset import feed_of, order_of, source_of
source = source_of({kind!r})
feed = feed_of(source, order_of(source), 2)
next(feed.pools(0))
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "hang"])
def test_workers_end_with_a_rank_that_is_killed(tmp_path, kind):
    (tmp_path / "killed.py").write_text(KILLED.format(kind=kind))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "killed.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout
        pids = {int(word) for word in rank.stdout.readline().split()}
    assert len(pids) == 2
    wait_until_gone(pids)


STOPS = """
import os, signal
import numpy as np
from torch.utils.data import Dataset

class Line(Dataset):
    def __init__(self, path):
        self.n_rows = int(path)
    def __len__(self):
        return self.n_rows
    def __getitem__(self, row):
        if os.environ["RANK"] == "1" and row == 300:
            os.kill(os.getpid(), signal.SIGSTOP)
        x = np.random.default_rng(row).random(4, np.float32)
        return x, x.sum()
"""


@pytest.mark.slow
def test_a_stopped_worker_of_one_rank_ends_both_with_a_line_each(tmp_path):
    (tmp_path / "mine.py").write_text(STOPS)
    (tmp_path / "config.yaml").write_text("""
workload: minimal
data: {dataset: mine:Line, train: "512", val: "64", fields: {x: x, y: y}, batch_size: 32}
loader: {num_workers: 1}
dist: {device: cpu}
""")
    for timeout_s in (2, 30):  # on a busy machine, any batch may take longer than two seconds
        first, second = run_ranks(f"loader.timeout_s={timeout_s}", ranks=2, cwd=tmp_path)
        if "no rows have come" in second.stderr:
            break
    assert (first.returncode, second.returncode) == (2, 2)
    line = r"error: no rows have come from Line\('512'\) of data.train in loader.timeout_s .*\n"
    assert re.search(line, second.stderr), first.stderr + second.stderr
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith("error: rank 0 lost the others")
