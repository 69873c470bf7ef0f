import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from copy import copy

import numpy as np
import pytest
import torch
from harness import ROOT, numbers_of

from fastgpu.feed import prefetch
from fastgpu.feed.prefetch import Prefetcher
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import Store, open_store

CPU = torch.device("cpu")


@pytest.fixture
def store(write) -> Store:
    return open_store("data.train", write(120, chunk=5), {"images": "images", "labels": "labels"})


def order_of(store: Store, pool_batches: int = 2) -> BlockSampler:
    return BlockSampler(store.block_rows, 8, pool_batches=pool_batches)


def prefetcher(store: Store, read=None, readers: int = 2, slots: int = 2, device: torch.device = CPU) -> Prefetcher:
    rows = copy(store)
    rows.read = read or store.read
    return Prefetcher(rows, 16, device, readers, slots)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("prefetch", "reader"))}


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("readers", [1, 4])
def test_rows_arrive_in_the_order_of_the_plan(store, readers, slots):
    order, got = order_of(store), []
    feed = prefetcher(store, readers=readers, slots=slots)
    for epoch in range(3):
        feed.start(order.pools(epoch))
        got += [n for plan, rows in feed for n in numbers_of(rows["images"])]
    expected = []
    for epoch in range(3):
        order.set_epoch(epoch)
        expected += list(order)
    assert got == expected
    assert not threads()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_the_loop_goes_before_its_readers(store):
    seen = set()

    def read(reads, out):
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    feed = prefetcher(store, read)
    feed.start(order_of(store).pools(0))
    list(feed)
    assert seen == {min(19, before + 5)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_supply_is_the_time_of_reading_and_not_of_waiting_for_the_loop(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: now[0])

    def read(reads, out):
        now[0] += 0.25 * sum(len(each.places) for each in reads)

    feed = prefetcher(store, read, readers=1, slots=1)  # reading and training take turns
    feed.start(order_of(store).pools(0))
    for number, _ in enumerate(feed):
        if number == 3:
            assert feed.supply_s() == 0.25
        now[0] += 1000
    assert feed.supply_s() == 0.25  # of the rows since
    assert feed.supply_s() == 0  # none since


def test_rows_stay_whole_while_the_loop_is_slow_and_the_readers_are_ahead(store):
    order = order_of(store)
    feed = prefetcher(store, slots=2)
    feed.start(order.pools(0))
    for plan, rows in feed:
        time.sleep(0.02)  # the readers fill every slot that is not this one
        assert numbers_of(rows["images"]) == order.row_ids(plan).tolist()
    feed.close()


def test_never_more_pools_ahead_than_slots(store):
    asked: list[int] = []

    def plans() -> Iterator[PoolPlan]:
        for plan in order_of(store).pools(0):
            asked.append(plan.number)
            yield plan

    feed = prefetcher(store, slots=3)
    feed.start(plans())
    iterator = iter(feed)
    for taken in range(1, 6):
        next(iterator)
        time.sleep(0.02)
        assert len(asked) <= taken + 2  # the one in use, and two ahead
    feed.close()


def test_memory_is_allocated_once(store):
    feed, where = prefetcher(store), set()
    for epoch in range(4):
        feed.start(order_of(store).pools(epoch))
        where |= {rows["images"].data_ptr() for _, rows in feed}
    assert len(where) == 2


def test_an_error_in_a_reader_reaches_the_loop_with_its_traceback(store):
    def read(reads, out):
        for each in reads:
            if each.block == 3:
                raise EOFError("cut while in use")
            store.read([each], out)

    feed = prefetcher(store, read)
    feed.start(order_of(store).pools(0))
    with pytest.raises(EOFError, match="cut while in use") as error:
        list(feed)
    assert any(entry.name == "read" for entry in error.traceback)
    assert not threads()
    with pytest.raises(EOFError):  # asked again, it does not hang
        list(feed)


def test_an_error_in_the_plan_reaches_the_loop(store):
    def plans() -> Iterator[PoolPlan]:
        yield from list(order_of(store).pools(0))[:1]
        raise RuntimeError("no more")

    feed = prefetcher(store)
    feed.start(plans())
    with pytest.raises(RuntimeError, match="no more"):
        list(feed)


def test_leaving_early_and_closing_ends_every_thread(store):
    for _ in range(5):
        feed = prefetcher(store)
        feed.start(order_of(store).pools(0))
        next(iter(feed))
        assert threads()
        feed.close()
        feed.close()
        assert not threads()


def test_starting_again_drops_what_was_prepared(store):
    feed, order = prefetcher(store), order_of(store)
    feed.start(order.pools(0))
    next(iter(feed))
    feed.start(order.pools(1))
    order.set_epoch(1)
    assert [n for _, rows in feed for n in numbers_of(rows["images"])] == list(order)
    feed.close()


def test_a_plan_without_pools_ends_at_once(store):
    feed = prefetcher(store)
    feed.start(iter(()))
    assert not list(feed)


LEAVE = """
import os, signal, sys, torch
from fastgpu.feed.tiers import make_feed
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store

store = open_store("x", sys.argv[1], {"images": "images", "labels": "labels"})
feed = make_feed(store, BlockSampler(store.block_rows, 8), "disk", torch.device("cpu"), 2, 2)
pools = feed.pools(0)
next(pools)
if sys.argv[2] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    for _ in pools:
        pass
elif sys.argv[2] == "raise":
    raise RuntimeError("left")
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("interrupt", -signal.SIGINT)])
def test_no_thread_outlives_a_process_that_leaves_without_closing(store, write, how, code):
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, write(120, name="y.h5"), how],
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert done.returncode == code, done.stderr


def test_memory_stays_flat_over_many_epochs(store):
    feed, sizes = prefetcher(store), []
    for epoch in range(60):
        feed.start(order_of(store).pools(epoch))
        for _ in feed:
            pass
        if epoch % 20 == 19:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[2] - sizes[1] < 50  # objects that an epoch left behind would be thousands


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_rows_stay_whole_under_a_slow_kernel(store):
    device, order = torch.device("cuda", 0), order_of(store)
    feed, kept, expected = prefetcher(store, slots=2, device=device), [], []
    busy = torch.randn(2048, 2048, device=device)
    for epoch in range(5):
        feed.start(order.pools(epoch))
        for plan, rows in feed:
            for _ in range(20):
                busy = busy @ busy / 2048  # the copy below runs on the device long after the host has moved on
            kept.append(rows["images"].clone())
            expected.append(order.row_ids(plan))
    feed.close()
    for images, numbers in zip(kept, expected, strict=True):
        assert numbers_of(images.cpu()) == np.asarray(numbers).tolist()
