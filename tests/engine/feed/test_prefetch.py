import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from copy import copy
from itertools import count, islice
from unittest.mock import Mock, call

import pytest
import torch

from fastgpu.feed import prefetch, readers
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import HangError, UserError
from fastgpu.rows import rows as rows_module
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.file import OpenFile
from fastgpu.storage.store import HDF5Dataset, open_store
from support import PROJECT
from support.ranks import CPU, TIMEOUT_S, needs_gpu, no_host_sync, run_to_end, wait_until
from support.rows import DENSE_FIELDS, RAGGED_FIELDS, is_ragged, numbers_of, open_feed, rows_before

TWO_READERS = LoaderConfig(num_readers=2)


@pytest.fixture
def store(dense_file, monkeypatch) -> HDF5Dataset:
    """120 rows in blocks of 5. Each reader is given one block at a time."""
    monkeypatch.setattr(readers, "JOB_BYTES", 1)
    return open_store("data.train", dense_file(120, chunk=5), DENSE_FIELDS)


def sampler_of(store: HDF5Dataset) -> BlockSampler:
    return BlockSampler(store.block_rows, 8, pool_batches=2)


def make_prefetcher(
    store: HDF5Dataset,
    read: Callable | None = None,
    *,
    sampler: BlockSampler | None = None,
    n_readers: int = 2,
    timeout_s: float = TIMEOUT_S,
) -> PrefetchLoader:
    """A prefetcher with two pools of 16 rows, of one epoch unless there is an `order`. read: instead of the store's."""
    source = copy(store)
    if read:
        source.read = read
        source.gathers = lambda *_: []
    loader = LoaderConfig.model_construct(num_readers=n_readers, prefetch_pools=1, timeout_s=timeout_s)
    return PrefetchLoader(source, sampler or sampler_of(store), CPU, loader, n_epochs=sys.maxsize if sampler else 1)


def feed_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("feeder", "reader"))}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails if a thread stays after the test. Feeds that raise, or are read to their end, end them without `close`."""
    yield
    assert not feed_threads()


def test_prefetch_signal_between_thread_starts_is_not_hidden(store, monkeypatch):
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if thread.name == "reader_1":
            raise SystemExit(143)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    prefetcher = make_prefetcher(store)
    with pytest.raises(SystemExit):
        next(prefetcher.pools(0))
    prefetcher.close()


def test_prefetch_epochs_past_the_last_are_whole(store):
    with closing(PrefetchLoader(store, sampler_of(store), CPU, TWO_READERS, n_epochs=2)) as prefetcher:
        n_rows = [sum(len(rows) for _, rows in prefetcher.pools(epoch)) for epoch in range(6)]
    assert n_rows == [n_rows[0]] * 6
    assert n_rows[0] > 0


def test_prefetch_readers_share_a_pool_at_low_priority(store):
    all_readers = threading.Barrier(3)
    parts = count()
    priorities = set()

    def read(plan, reads, out):
        priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if plan.number == 0 and next(parts) < all_readers.parties:
            all_readers.wait(TIMEOUT_S)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with closing(make_prefetcher(store, read, n_readers=all_readers.parties)) as prefetcher:
        list(prefetcher.pools(0))
    assert priorities == {min(19, before + 5)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_prefetch_rows_stay_whole_while_the_loop_is_slow(store):
    sampler = sampler_of(store)
    n_rows_read: list[int] = []

    def read(plan, reads, out):
        store.read(plan, reads, out)
        n_rows_read.append(len(reads.places))

    with closing(make_prefetcher(store, read)) as prefetcher:
        for plan, rows in prefetcher.pools(0):
            n_ahead = rows_before(sampler, plan.number + 2)
            wait_until(lambda n_ahead=n_ahead: sum(n_rows_read) >= n_ahead)  # every slot but this one is filled
            assert numbers_of(rows["images"]) == plan.row_ids.tolist()


@pytest.mark.parametrize("where", ["reader", "plan"])
def test_prefetch_errors_keep_their_traceback(store, where):
    def fail(*_: object) -> None:
        raise EOFError("cut while in use")

    sampler = sampler_of(store)
    if where == "plan":
        sampler.pools = lambda *_: map(fail, [sampler])
    prefetcher = make_prefetcher(store, fail if where == "reader" else None, sampler=sampler)
    with pytest.raises(EOFError, match="cut while in use") as error:
        list(prefetcher.pools(0))
    assert any(entry.name == "fail" for entry in error.traceback)


@pytest.mark.parametrize("method", ["read", "check_unchanged"])
def test_prefetch_read_that_hangs_shows_its_stack(store, monkeypatch, capfd, method):
    is_back = threading.Event()
    real = getattr(OpenFile, method)

    def hang(*arguments):
        if method == "check_unchanged" or arguments[1] >= offset:
            is_back.wait(TIMEOUT_S)
        return real(*arguments)

    offset = store.parts[0].columns["images"].chunks[3, 0]
    monkeypatch.setattr(OpenFile, "cached", lambda *_: None)  # as on a network file system
    monkeypatch.setattr(OpenFile, method, hang)
    sampler = BlockSampler(store.block_rows, 8, pool_batches=2, seed=None)
    prefetcher = make_prefetcher(store, sampler=sampler, n_readers=1, timeout_s=0.2)
    try:
        with pytest.raises(HangError, match="no rows have come from .*rows.h5 in loader.timeout_s"):
            list(prefetcher.pools(0))
        assert "in hang" in capfd.readouterr().err
        with pytest.raises(HangError):  # the slots are not safe: the read may come back
            list(prefetcher.pools(1))
    finally:
        is_back.set()
    prefetcher.close()


def test_prefetch_closes_while_a_read_hangs(store, monkeypatch):
    is_reading = threading.Event()
    is_back = threading.Event()

    def hang_after_the_first_pool(plan, reads, out):
        if plan.number:
            is_reading.set()
            is_back.wait(TIMEOUT_S)

    monkeypatch.setattr(prefetch, "CLOSE_S", 0.1)
    prefetcher = make_prefetcher(store, hang_after_the_first_pool)
    next(prefetcher.pools(0))
    assert is_reading.wait(TIMEOUT_S)
    prefetcher.close()
    assert feed_threads()
    is_back.set()
    next(prefetcher.pools(0))  # waits for the end of the threads
    prefetcher.close()
    wait_until(lambda: not feed_threads())


def test_prefetch_closes_at_any_moment(store):
    rng = random.Random(0)
    prefetcher = make_prefetcher(store, sampler=sampler_of(store))
    for epoch in range(50):  # drops the pools that were prepared
        for plan, rows in islice(prefetcher.pools(epoch), rng.randrange(8)):
            assert numbers_of(rows["images"]) == plan.row_ids.tolist()
        if rng.random() < 0.5 or epoch == 49:
            prefetcher.close()
            prefetcher.close()
            assert not feed_threads()


def test_prefetch_reads_the_next_epoch_early(store):
    sampler = sampler_of(store)
    sampler.pools = Mock(side_effect=sampler.pools)
    with closing(make_prefetcher(store, sampler=sampler)) as prefetcher:
        assert len(list(prefetcher.pools(0))) == 8
        wait_until(lambda: call(1) in sampler.pools.mock_calls)


@pytest.fixture
def sparse(ragged_file) -> HDF5Dataset:
    return open_store("data.train", ragged_file(700, chunks=(16,)), RAGGED_FIELDS)


def test_prefetch_pool_with_too_many_values_is_refused(sparse, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_VALUES", 100)
    message = r"a pool has 1,\d+ values of items, too many to count; use fewer data.pool_batches"
    sampler = BlockSampler(sparse.block_rows, 8, pool_batches=500)
    with closing(open_feed(sparse, sampler)) as feed, pytest.raises(UserError, match=message):
        list(feed.pools(0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_prefetch_rows_stay_whole_on_a_gpu(sparse, tier):
    device = torch.device("cuda", 0)
    sampler = BlockSampler(sparse.block_rows, 8, pool_batches=3)
    feed = open_feed(sparse, sampler, tier, device=device, prefetch_pools=1)
    kept = []
    list(feed.pools(0))
    torch.cuda.synchronize()
    with no_host_sync():
        for pool in feed.pools(1):
            torch.cuda._sleep(10_000_000)  # cycles: what follows runs on the device long after the host has moved on
            for batch in pool.rows.batches(8):
                items = batch["items"]
                kept.append((items.values.clone(), items.offsets.clone(), batch["number"].clone()))
    for values, offsets, number in kept:
        assert is_ragged(RaggedArray(values.cpu().numpy(), offsets.cpu().numpy()), number.tolist())
    feed.close()


LEAVE = """
import sys, torch
from fastgpu.feed import PrefetchLoader
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store

store = open_store("x", sys.argv[1], {"images": "images", "labels": "labels"})
feed = PrefetchLoader(store, BlockSampler(store.block_rows, 8), torch.device("cpu"))
next(feed.pools(0))
sys.exit(7)
"""


@pytest.mark.slow
def test_prefetch_threads_end_with_the_process(dense_file):
    done = run_to_end([sys.executable, "-c", LEAVE, dense_file(120)], PROJECT)
    assert done.returncode == 7, done.stderr


def test_prefetch_in_a_loop_of_somebody_else(tmp_path):
    """The program of docs/code.md, as it is."""
    page = (PROJECT / "docs/code.md").read_text()
    program = re.search(r"## Our loader in another loop.*?```python\n(.*?)```", page, re.DOTALL)
    assert program
    (tmp_path / "data").symlink_to(PROJECT / "data")
    done = run_to_end([sys.executable, "-c", program[1]], tmp_path, PYTHONPATH=str(PROJECT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 3
    assert losses[0] > losses[2] < 1.5  # by chance it would be 2.3


def test_prefetch_device_without_a_number(store, monkeypatch):
    """The stand-in for torch.cuda takes what the real one takes: `set_device` refuses a device without a number."""
    devices = []

    def set_device(device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        devices.append(device.index)

    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    empty = rows_module.Rows.empty
    monkeypatch.setattr(rows_module.Rows, "empty", lambda fields, n_rows, device, pinned: empty(fields, n_rows, CPU))
    monkeypatch.setattr(rows_module.Rows, "to", lambda rows, device: rows)
    feed = PrefetchLoader(store, sampler_of(store), torch.device("cuda"), TWO_READERS, n_epochs=1)
    assert sum(len(batch) for batch in feed.batches(0)) == 120
    feed.close()
    assert devices == [1]
