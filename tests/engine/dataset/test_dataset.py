import errno
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastgpu.dataset import workers
from fastgpu.dataset.source import ItemDataset, open_dataset
from fastgpu.feed import PoolLoader, open_splits, prefetch
from fastgpu.process.config import Data, LoaderConfig
from fastgpu.process.launch import HangError, UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture
from support.datasets import N_ROWS, Made, Numbered, item_feed, numbered_source
from support.ranks import TIMEOUT_S, fork, run_ranks, wait_until
from support.rows import DENSE_FIELDS, numbers_of, open_feed

DRAWN = {"a": "a", "b": "b", "c": "c"}


def rows_are_right(feed: PoolLoader, epoch: int = 0) -> bool:
    """Whether the rows of an epoch come in the order of the sampler."""
    feed.sampler.set_epoch(epoch)
    rows = []
    for pool in feed.pools(epoch):
        rows += zip(numbers_of(pool.rows["images"]), pool.rows["labels"].tolist(), strict=True)
    return rows == [(row, row % 4) for row in feed.sampler]


def worker_pids() -> set[int | None]:
    """Those of worker processes, which are daemons; the ranks of `in_world` are none."""
    return {process.pid for process in multiprocessing.active_children() if process.daemon}


def is_running(pid: int) -> bool:
    """Whether there is such a process, which is not one that only waits to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: set[int]) -> None:
    """On a busy machine, a process that was killed takes a moment to be gone."""
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails if a thread or a process of a feed stays after the test."""
    yield
    wait_until_gone(worker_pids())
    for thread in threading.enumerate():
        if thread.name.startswith(("feeder", "reader")):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


# ---------------------------------------------------------------------------------------------- rows


def test_workers_keep_the_order_of_rows():
    pids = set()
    with closing(item_feed(numbered_source("slow"), 3)) as feed:
        for epoch in range(3):
            assert rows_are_right(feed, epoch)
            pids |= worker_pids()
    assert len(pids) == 3


@pytest.mark.parametrize("tier", ["host", "device"])
def test_workers_end_when_all_rows_are_kept(tier):
    with closing(item_feed(numbered_source(), 2, tier)) as feed:
        wait_until_gone(worker_pids())
        assert rows_are_right(feed)


def test_dataset_draws_do_not_depend_on_workers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("a GPU is seeded"))

    def draw(n_workers: int, epoch: int, first_pool: int, seed: int = 1) -> torch.Tensor:
        with closing(item_feed(numbered_source("random", DRAWN), n_workers, seed=seed)) as feed:
            pools = feed.pools(epoch, first_pool)
            return torch.cat([torch.stack([pool.rows[name].double() for name in DRAWN]) for pool in pools], 1)

    alone = draw(0, 1, 0)
    assert torch.equal(alone, draw(2, 1, 0))
    assert torch.equal(alone[:, 48:], draw(1, 1, 2))  # nor on where the run was resumed
    numbers = {*alone.flatten().tolist()}
    assert len(numbers) == alone.numel()  # no rows draw what others have drawn
    assert numbers.isdisjoint(draw(0, 0, 0).flatten().tolist())  # of another epoch
    assert numbers.isdisjoint(draw(0, 1, 0, seed=3).flatten().tolist())  # and of another run


@pytest.mark.parametrize("kind", ["random", "draws once"])
@pytest.mark.parametrize("n_workers", [0, 2])
def test_dataset_draws_do_not_depend_on_other_rows(kind, n_workers, monkeypatch):
    def draw(ask_bytes: int) -> torch.Tensor:
        monkeypatch.setattr("fastgpu.dataset.source.ASK_BYTES", ask_bytes)
        with closing(item_feed(numbered_source(kind, DRAWN), n_workers)) as feed:
            return torch.cat([torch.stack([*pool.rows.columns.values()]) for pool in feed.pools(0)], 1)

    assert torch.equal(draw(1), draw(4 << 20))  # bytes of a row, of many


def test_dataset_draws_leave_the_loop_its_own():
    source = numbered_source("random", DRAWN)
    drawn = []
    for is_read in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        if is_read:
            source.read_rows(np.arange(8), 1, 0, np.zeros(8, int))
            numbered_source("random", DRAWN)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    assert source.drawn == {"random", "numpy.random", "torch"}


def test_dataset_initial_seed_is_of_the_row():
    """Libraries seed generators of their own with it."""
    source = ItemDataset("mine", Made(lambda row: torch.initial_seed()), {"x": "x"})
    first, second = (
        source.read_rows(np.array(rows), 1, 0, np.zeros(2, int))["x"].tolist() for rows in ([7, 3], [3, 7])
    )
    assert first == second[::-1]
    assert first[0] != first[1]


def test_workers_know_themselves():
    def tell(row: int) -> tuple[int, ...]:
        info = get_worker_info()
        time.sleep(0.002)  # so that both have work
        return info.id, info.num_workers, info.seed % 2**32, info.dataset is made, get_worker_info().seed >= 0

    made = Made(tell)
    with pytest.raises(AttributeError):
        ItemDataset("mine", made, {"x": "x"})  # as in a DataLoader without workers
    names = {name: name for name in ("id", "n", "seed", "is_own", "is_whole")}
    told = []
    for seed in (1, 1, 2):
        source = ItemDataset("mine", made, names, seed=seed, workers_key="key").with_workers(2, 60)
        with closing(item_feed(source, 2)) as feed:
            rows = torch.cat(
                [torch.stack([column.long() for column in pool.rows.columns.values()], 1) for pool in feed.pools(0)]
            )
        told.append({*map(tuple, rows.tolist())})
    assert {row[:2] for row in told[0]} == {(0, 2), (1, 2)}
    assert all(row[3] for row in told[0])
    assert told[0] == told[1]
    assert not {row[2] for row in told[0]} & {row[2] for row in told[2]}


def test_workers_share_no_file_of_the_first_items():
    """A file that is opened in the first item of a process must not be opened before the forks."""
    opened = set()
    made = Made(lambda row: opened.add(os.getpid()) or row)
    source = ItemDataset("mine", made, {"x": "x"}, workers_key="key")
    assert source.fields["x"].dtype == np.int64
    assert not opened
    assert not worker_pids()


def test_dataset_draws_differ_for_a_repeated_row(monkeypatch):
    monkeypatch.setattr("fastgpu.dataset.source.ASK_BYTES", 1)  # one row at a time, as of large rows
    source = numbered_source("random", DRAWN)
    groups = Groups(("rare", "frequent"), (1, 1), np.minimum(np.arange(N_ROWS), 5) // 5)
    source.selection = Mixture(groups, source.block_rows, 8, seed=1)
    with closing(open_feed(source, BlockSampler(source, 8, pool_batches=3, seed=1), n_readers=0)) as feed:
        numbers = torch.cat([torch.stack([pool.rows[name].double() for name in DRAWN]) for pool in feed.pools(0)], 1)
    assert len({*numbers.flatten().tolist()}) == numbers.numel() == 3 * 144


SINGLE = Made(lambda _: torch.zeros(1, 8, 8), n_classes=7)
"""Items that are one tensor alone."""


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"class_names": [b"cat", "dog"]}, ["cat", "dog"]),
        ({"classes": np.array(["cat", "dog"])}, ["cat", "dog"]),
        ({"classes": {"dog": 1, "cat": 0}}, ["cat", "dog"]),
        ({"classes": {0: "cat", 1: "dog"}}, ["cat", "dog"]),
        ({"classes": {"cat": 0, "dog": 1}.keys()}, ["cat", "dog"]),
        ({"classes": [("tench", "Tinca tinca"), ["ray"]]}, ["tench, Tinca tinca", "ray"]),
        ({"classes": torch.tensor([3, 5])}, ["3", "5"]),
        ({"classes": print, "class_names": None}, None),  # as subclasses take an attribute back
        ({"classes": []}, None),
    ],
)
def test_dataset_class_names_are_texts(given, names):
    source = ItemDataset("mine", Made(lambda row: 0, n_classes=torch.tensor(7), **given), {"x": "x"})
    assert source.attributes == {"n_classes": 7} | ({"class_names": names} if names else {})


class Failing(Numbered):
    """Its attribute cannot be read, which is no reason to go on without the names."""

    @property
    def class_names(self):
        raise AttributeError("no file classes.txt")


CLASSES = np.arange(N_ROWS) % 4


@pytest.mark.parametrize(
    ("item", "attributes", "column"),
    [
        (lambda row: np.uint8(row % 4), {"labels": torch.from_numpy(CLASSES)}, CLASSES),
        (lambda row: np.float32(row / 7), {"targets": np.arange(N_ROWS) / 7}, np.arange(N_ROWS) / 7),
        (lambda row: np.nan, {"targets": np.full(N_ROWS, np.nan)}, np.full(N_ROWS, np.nan)),
        (lambda row: row % 4, {"labels": ["a"] * N_ROWS, "targets": CLASSES.tolist()}, CLASSES),
        (lambda row: row % 4, {"targets": CLASSES * 10 + 10}, None),  # numbered in another way
        (lambda row: np.full((2, 2), row % 4), {"targets": CLASSES}, None),  # of images, not of pixels
        (lambda row: row % 4, {"labels": [[0], [0, 1]] * (N_ROWS // 2), "targets": len}, None),
    ],
)
def test_dataset_attribute_is_a_field_if_values_agree(item, attributes, column):
    source = ItemDataset("mine", Made(item, **attributes), {"labels": "labels"})
    np.testing.assert_array_equal(source.stored_column("labels"), column)
    assert source.stored_column("masks") is None


def read_odd(usual: object, odd: object, rows: tuple[int, ...] = (7, 3)) -> np.ndarray:
    """These rows. Rows 7 and 8, which are not among those that are compared at first, are of another kind."""
    source = ItemDataset("mine", Made(lambda row: odd if row in (7, 8) else usual), {"x": "x"})
    return source.read_rows(np.array(rows), 0, 0, np.zeros(len(rows), int))["x"]


def test_dataset_batch_of_several_types_keeps_values():
    assert read_odd(np.int64(300), np.uint8(7)).tolist() == [7, 300]


@pytest.mark.parametrize(("dtype", "read_as"), [(torch.bfloat16, np.float32), (torch.float16, np.float16)])
def test_dataset_floats_that_numpy_lacks_become_float32(dtype, read_as):
    rows = torch.arange(N_ROWS * 4).view(-1, 4).to(dtype).requires_grad_()
    source = ItemDataset("mine", Made(rows.__getitem__), {"x": "x"})
    column = source.read_rows(np.arange(N_ROWS), 0, 0, np.zeros(N_ROWS, int))["x"]
    assert (source.fields["x"].dtype, column.dtype) == (read_as, read_as)
    assert column.tolist() == rows.tolist()


class Endless(Made, IterableDataset):
    def __iter__(self):
        return iter(())


def test_messages_of_datasets(compare_messages):
    def open_items(items: Dataset, *names: str) -> ItemDataset:
        return ItemDataset("mine", items, {name: name for name in names})

    def open_class(name: str) -> ItemDataset:
        return open_dataset("data.train", "x", DENSE_FIELDS, factory=name)

    compare_messages(
        {
            "fewer fields": lambda: open_items(Numbered(), "images"),
            "a tensor is one value": lambda: open_items(SINGLE, "images", "labels"),  # its first axis are no fields
            "other names": lambda: open_items(Made(lambda _: {"x": 1}), "x", "y"),
            "text": lambda: open_items(Made(lambda _: "a"), "x"),
            "a sparse tensor": lambda: open_items(Made(lambda _: torch.eye(2).to_sparse()), "x"),
            "a tensor without values": lambda: open_items(Made(lambda _: torch.ones(2, device="meta")), "x"),
            "a row of a wider type": lambda: read_odd(np.uint8(0), np.int64(256)),
            "a tensor of a wider type": lambda: read_odd(torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
            "a row of another shape": lambda: read_odd(np.uint8(0), np.zeros(2, np.uint8)),
            "a row of text": lambda: read_odd(np.uint8(0), "a"),
            "a row of another length": lambda: read_odd(np.zeros((1, 4)), np.zeros((2, 4))),
            "tensors of another length": lambda: read_odd(torch.zeros(2), torch.zeros(3), (7, 8)),
            "whole numbers in place of floats": lambda: read_odd(0.5, 1, (7, 8)),
            "no module": lambda: open_class("nowhere:Class"),
            "no class": lambda: open_class("test_dataset:Nothing"),
            **{
                f"{name} {shown}": lambda value=value, name=name: open_items(Made(len, **{name: value}), "x")
                for name, shown, value in (
                    ("classes", "a text", "cat"),
                    ("classes", "a set", {"cat"}),
                    ("classes", "a missing name", ["cat", None]),
                    ("classes", "a gap", {"cat": 0, "dog": 2}),
                    ("n_classes", "a text", "10"),
                    ("n_classes", "too small", 0),
                    ("n_classes", "too large", 1 << 40),
                )
            },
            "classes that cannot be read": lambda: open_items(Failing(), "x"),
            "too many rows": lambda: open_items(Made(len, n_rows=10**14), "x"),
            "a class that takes no path": lambda: open_class("torch.utils.data:TensorDataset"),
            "too many workers": lambda: ItemDataset("mine", SINGLE, {"x": "x"}).with_workers(100_000, 60),
            "no rows": lambda: open_items(Made(len, n_rows=0), "x"),
            "no length": lambda: open_items(Dataset(), "x"),
            "an iterable": lambda: open_items(Endless(len), "x"),
        }
    )


@pytest.fixture
def write_module(tmp_path, monkeypatch) -> Callable[[str], int]:
    """write_module(text) writes the module `own` to the current folder, which is imported from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    return (tmp_path / "own.py").write_text


@pytest.mark.parametrize(
    "factory",
    [
        *("antigravity:x", "test.autotest:x", "yaml:load", "torch.utils.data:IterableDataset"),
        *("fastgpu.process.files:FolderLock", "own:run", "own:Shelf", "own:Length"),
    ],
)
def test_dataset_name_of_no_dataset_runs_nothing(tmp_path, write_module, factory):
    """Neither a command nor a class that writes when it is made: it is refused before the call."""
    write_module(HARMFUL)
    before = {*sys.modules}
    with pytest.raises(UserError, match=f"data.dataset is {factory}, which is no map-style Dataset; use a class"):
        open_dataset("data.train", "harm", DENSE_FIELDS, factory=factory)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["own.py"]
    assert not {"antigravity", "test.autotest"} & ({*sys.modules} - before)


HARMFUL = """
from pathlib import Path
from shelve import DbfilenameShelf as Shelf
def run(path: str) -> None:
    Path(path).touch()
class Length:
    def __init__(self, path):
        Path(path).touch()
    def __len__(self):
        return 1
"""
OWN = """
import random
from functools import partial
import numpy as np
import torch
from torch.utils.data import Dataset, Subset, random_split
from support.datasets import Numbered
class Plain:
    def __init__(self, path):
        self.rows = Numbered()
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, row):
        return self.rows[row]
def make(path):
    return Numbered()
def typed(path: str) -> Dataset[object]:
    return Numbered()
def partly(path, kind):
    return Numbered(kind)
of_kind = partial(partly, kind="")
of_class = partial(Numbered)
def split(path):
    return random_split(Numbered(), [0.8, 0.2])[path == "b"]
def shuffled(path):
    rows = list(range(150))
    random.shuffle(rows)
    return Subset(Numbered(), rows[:120] if path == "a" else rows[120:])
def permuted(path):
    rows = np.random.permutation(150)
    return Subset(Numbered(), rows[:120] if path == "a" else rows[120:])
CHOSEN = torch.randperm(150)
def chosen(path):
    return Subset(Numbered(), CHOSEN[:120] if path == "a" else CHOSEN[120:])
"""


@pytest.mark.parametrize("name", ["split", "shuffled", "permuted", "chosen"])
def test_dataset_split_at_random_shares_no_rows(write_module, name):
    write_module(OWN)
    data = Data(train="a", val="b", fields=DENSE_FIELDS, dataset=f"own:{name}")

    def split(seed: int) -> tuple[list[int], ...]:
        sys.modules.pop("own", None)  # a new run
        train, val = open_splits(data, LoaderConfig(num_workers=0), seed)
        return tuple([int(row) for row in part.dataset.indices] for part in (train, val["val"]))

    train, val = split(1)
    assert sorted(train + val) == list(range(N_ROWS))
    torch.rand(1), np.random.rand(), random.random()
    assert split(1) == (train, val)
    assert split(2) != (train, val)


@pytest.mark.parametrize(
    "factory",
    [*("own:Plain", "own:make", "own:typed", "own:of_kind", "own:of_class"), "support.datasets:Numbered"],
)
def test_dataset_name_of_a_class_or_function(write_module, factory):
    write_module(OWN)
    assert len(open_dataset("data.train", "x", DENSE_FIELDS, factory=factory)) == N_ROWS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_library", r"ModuleNotFoundError: No module named 'no_such_library' \(own.py:1\)$"),
        ("def f(:", r"SyntaxError: .* \(own.py, line 1\)$"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(own.py:2\)$"),
        ("", "own has no Rows; use package.module:Class$"),
        (OWN + "class Rows(Numbered):\n    def __init__(self, a, b): ...", r"cannot be called: missing .* 'b'; give"),
    ],
)
def test_dataset_module_that_fails_is_one_line(write_module, text, reason):
    write_module(text)
    with pytest.raises(UserError, match=f"^data.dataset.*{reason}"):
        open_dataset("data.train", "x", DENSE_FIELDS, factory="own:Rows")


# ---------------------------------------------------------------------------------------------- errors of workers


@pytest.mark.parametrize(
    ("kind", "n_workers", "error", "message"),
    [
        ("raise", 0, OSError, r"row 70 cannot be opened\nin row 70 of Numbered$"),
        ("raise", 2, UserError, r"^Numbered: OSError: .* in row 70 of Numbered \(datasets.py:\d+\); .*$"),
        ("die", 2, UserError, r"one of 2 workers \(loader.num_workers\) was killed or crashed while it read Numbered"),
    ],
)
def test_workers_pass_on_errors_as_one_line(kind, n_workers, error, message):
    with closing(item_feed(numbered_source(kind), n_workers)) as feed, pytest.raises(error, match=message):
        list(feed.pools(0))


def test_workers_that_are_slow_cause_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(workers, "SLOW_S", 0.0)
    with closing(item_feed(numbered_source("slow"), 1)) as feed:
        assert rows_are_right(feed)
    told = capsys.readouterr().out
    assert told.startswith("warning: Numbered: a worker has been reading for 0 s, from row ")
    assert told.endswith("use loader.num_workers=0\n")
    assert told.count("warning") == 1


class OfOneThread(Numbered):
    """As a connection to SQLite is."""

    def __getitem__(self, row: int):
        assert threading.current_thread() is threading.main_thread()
        return super().__getitem__(row)


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_dataset_without_workers_is_read_in_the_main_thread(tier, monkeypatch):
    monkeypatch.setattr(prefetch, "WAITS", 1)
    source = ItemDataset("mine", OfOneThread(), DENSE_FIELDS)
    with closing(item_feed(source, 0, tier, timeout_s=1)) as feed:
        pools = feed.pools(0)
        next(pools)
        if tier == "disk":
            time.sleep(1.2)  # at a breakpoint, for longer than timeout_s
        assert len([*pools]) == feed.sampler.pools_per_epoch - 1
        assert rows_are_right(feed, 1)


@pytest.mark.slow
def test_workers_that_hang_are_killed(monkeypatch, capfd):
    for module in (prefetch, workers):
        monkeypatch.setattr(module, "CLOSE_S", 0.2)
    message = r"no rows have come from Numbered in loader.timeout_s \(8 s\)"
    with closing(item_feed(numbered_source("hang"), 2, timeout_s=8)) as feed:
        pools = feed.pools(0)
        next(pools)
        pids = worker_pids()
        with pytest.raises(HangError, match=message):
            list(pools)
    assert "in __getitem__" in capfd.readouterr().err  # the stack of the worker: where its Dataset hangs
    wait_until_gone(pids)


@pytest.mark.slow
def test_workers_survive_a_suspended_run():
    """The job is stopped while a row is read, for longer than loader.timeout_s."""

    def run(pipe: Connection) -> None:
        def read(row: int) -> int:
            if row == 70:
                pipe.send("reading")
                pipe.recv()
            return row

        with closing(item_feed(ItemDataset("x", Made(read), {"x": "x"}), 1, timeout_s=3)) as feed:
            pipe.send(sum(len(pool.rows) for pool in feed.pools(0)))

    process, pipe = fork(run)
    assert pipe.recv() == "reading"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.5)  # no condition can be waited for: this is how long the run is suspended
    os.kill(process.pid, signal.SIGCONT)
    pipe.send("go on")
    assert pipe.recv() == 144
    process.join()


def test_workers_end_with_a_killed_rank():
    def run(pipe: Connection) -> None:
        feed = item_feed(numbered_source("hang"), 2)
        next(feed.pools(0))
        pipe.send(worker_pids())
        os.kill(os.getpid(), signal.SIGKILL)

    _, pipe = fork(run)
    pids = pipe.recv()
    assert len(pids) == 2
    wait_until_gone(pids)


def test_workers_survive_sigterm():
    """It sends SIGTERM to the process group, and the rank still needs rows: it finishes its step."""
    with closing(item_feed(numbered_source(), 2)) as feed:
        pools = feed.pools(1)
        next(pools)
        for pid in worker_pids():
            os.kill(pid, signal.SIGTERM)
        list(pools)
        assert rows_are_right(feed)


def test_workers_end_whenever_the_feed_closes():
    for n_pools in (1, 4):
        feed = item_feed(numbered_source(), 2)
        assert len(list(islice(feed.pools(0), n_pools))) == n_pools
        assert worker_pids()
        feed.close()
        feed.close()


@pytest.mark.parametrize("n_hang", [2, 7])
def test_workers_that_do_not_begin_are_made_again(monkeypatch, tmp_path, n_hang):
    """A fork may wait for ever for a lock of a thread that is not in it."""
    end_with_parent = workers.end_with_parent

    def hang_at_first():
        with (tmp_path / "begun").open("a+") as file:  # "a": each process adds a letter
            file.write("x")
            file.flush()
            if file.tell() <= n_hang:
                signal.pause()
        end_with_parent()

    monkeypatch.setattr(workers, "end_with_parent", hang_at_first)  # with which each of them begins
    monkeypatch.setattr(workers, "START_S", 1.0)
    source = numbered_source()
    if n_hang > 6:
        with pytest.raises(UserError, match=r"loader.num_workers is 2: they do not begin to work; use fewer"):
            source.with_workers(2, TIMEOUT_S)
    else:
        with closing(source.with_workers(2, TIMEOUT_S)) as read:
            assert read.n_workers == 2
            rows = np.arange(5)
            np.testing.assert_array_equal(read.read_rows(rows, 0, 0, 0 * rows)["labels"], rows % 4)
    assert not worker_pids()


def test_workers_that_cannot_start_are_one_line(monkeypatch):
    real = os.fork

    def refuse_the_second() -> int:
        if worker_pids():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real()

    monkeypatch.setattr(os, "fork", refuse_the_second)
    message = "loader.num_workers is 2: Resource temporarily unavailable; use fewer of them"
    with pytest.raises(UserError, match=message):
        item_feed(numbered_source(), 2)


class Line(Numbered):
    """Rows of the workload `minimal`. Reading row 70 fails on rank 1 only."""

    def __getitem__(self, row: int):
        assert not torch.distributed.is_initialized()  # workers are started before
        if os.environ.get("RANK") == "1":
            super().__getitem__(row)
        return np.full(6, row / N_ROWS, np.float32), row / N_ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [("stop", "no rows have come from Line"), ("raise", r"Line.*: OSError: row 70 cannot be opened")],
)
def test_workers_that_fail_on_one_rank_end_both(folder, monkeypatch, kind, message):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the ranks import this module
    words = ("data.dataset=test_dataset:Line", f"data.train={kind}", "data.val=all", "loader.num_workers=1")
    first, second = run_ranks("loader.timeout_s=5", *words, ranks=2, cwd=folder)
    assert (first.returncode, second.returncode) == (2, 2)
    assert re.search(rf"error: \[rank 1\] {message}.*\n", second.stderr), first.stderr + second.stderr
    assert re.fullmatch(r"error: \[rank 0\] the other ranks are gone or hang.*\n", first.stderr)
