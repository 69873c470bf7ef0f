"""Causes planted in a real feed in front of a simulated device are named, and what their cure gives is foretold."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from conftest import in_world

from fastgpu.bottleneck import Facts, Measured, Verdict, judge
from fastgpu.ceilings import Feeds, Parts, Pools, TorchDevice, first_batch, make_feeds, measure
from fastgpu.dist import World
from fastgpu.feed import Feed, Pool
from fastgpu.order import BlockSampler
from fastgpu.rows import Rows
from fastgpu.store import open_store

CPU, ALONE = torch.device("cpu"), World(0, 1, 1, torch.device("cpu"))
BATCH, POOL_BATCHES, ROWS, BLOCK = 16, 4, 2048, 16


class Simulated:
    """A device that works off what is queued, while the host goes on: at most one step ahead, as its memory is."""

    def __init__(self) -> None:
        self.end = self.worked = 0.0
        self.waited: list[str] = []

    def run(self, seconds: float) -> None:
        """Queue a kernel."""
        now = time.perf_counter()
        if self.end > now:
            time.sleep(self.end - now)
            now = self.end
        self.end = now + seconds
        self.worked += seconds

    def item(self, place: str) -> None:
        """Read a value: wait for all that is queued."""
        self.waited.append(place)
        self.synchronize()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))

    def busy_s(self, work: Callable[[], object]) -> float:
        before = self.worked
        work()
        return self.worked - before

    def syncs(self, work: Callable[[], object]) -> list[str]:
        self.waited = []
        work()
        return list(dict.fromkeys(self.waited))


class SlowRows:
    """A store whose disk, or whose decoding, takes its time; the disk has a page cache in front of it."""

    def __init__(self, store: Any, disk_s: float = 0.0, decode_s: float = 0.0, cache_blocks: int = 24):
        self._store, self._disk_s, self._decode_s, self._cache_blocks = store, disk_s, decode_s, cache_blocks
        self._cache: OrderedDict[int, None] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_store" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._store, name)

    def __len__(self) -> int:
        return int(self.block_rows.sum())

    def read(self, reads: Any, out: Any) -> None:
        for read in reads:
            if read.block not in self._cache:
                time.sleep(self._disk_s)
            self._cache[read.block] = None
            while len(self._cache) > self._cache_blocks:
                self._cache.popitem(last=False)
            time.sleep(self._decode_s)
            self._store.read([read], out)


class SlowCopies:
    """A feed whose pools come over a bus: each takes its time on it, while the one before is trained on."""

    def __init__(self, feed: Feed, bytes_per_s: float):
        self._feed, self._bytes_per_s = feed, bytes_per_s

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        ready: Queue[Any] = Queue(1)

        def copies() -> None:
            for pool in self._feed.pools(epoch, consumed):
                time.sleep(pool.rows.nbytes / self._bytes_per_s)
                ready.put(pool)
            ready.put(None)

        threading.Thread(target=copies, daemon=True).start()
        while pool := ready.get():
            yield pool

    def supply_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self._feed.close()


class Ready:
    """A feed whose pools lie there already."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[Pool]:
        yield self._pool

    def supply_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def seen(
    path: str,
    step_s: float = 0.004,
    *,
    world: World = ALONE,
    launch_s: float = 0.0,
    transform_s: float = 0.0,
    item: bool = False,
    readers: int = 1,
    bytes_per_s: float = 0.0,
    batch_rows: int = BATCH,
    alone_s: float | None = None,
    **slow: float,
) -> Measured:
    """All ceilings of a loop whose parts take so long; a batch of twice the rows takes the device twice as long."""
    device, times = Simulated(), batch_rows / BATCH
    rows: Any = SlowRows(open_store("data.train", path, {"images": "images", "labels": "labels"}), **slow)  # type: ignore[arg-type]
    order = BlockSampler(rows.block_rows, batch_rows, rank=world.rank, world_size=world.size,
                         pool_batches=max(1, int(POOL_BATCHES / times)))  # fmt: skip

    def transform(batch: Rows) -> Rows:
        if transform_s:
            device.run(transform_s * times)
        return batch

    def work(seconds: float) -> None:
        time.sleep(launch_s)
        device.run(seconds * times)
        if item:
            device.item("mine.py:12")

    def step(_: Rows) -> None:
        work(step_s)
        if world.size > 1:  # gradients are there when the slowest rank's are
            device.synchronize()
            world.max(0.0)

    sizes: Any = type("Sizes", (), {"tier": "disk", "readers": readers})
    feeds = make_feeds(rows, order, sizes, CPU, 2, False)
    if bytes_per_s:
        pool = Pool(None, first_batch(rows, order, 1, CPU))  # type: ignore[arg-type]
        feeds = feeds._replace(real=SlowCopies(feeds.real, bytes_per_s), staged=SlowCopies(Ready(pool), bytes_per_s))
    parts = Parts(transform, step, lambda _: work(alone_s or step_s), batch_rows)
    found = measure(world, device, parts, first_batch(rows, order, 1, CPU), feeds, 0.15, 3)
    feeds.close()
    return found


def speed(m: Measured) -> float:
    """Rows a second of the loop."""
    return m.batch_rows / m.loop.step_s


def as_foretold(verdict: Verdict, before: Measured, after: Measured) -> bool:
    return speed(after) / speed(before) == pytest.approx(verdict.gain, rel=0.15)


@pytest.fixture
def path(write, monkeypatch):
    monkeypatch.setattr("fastgpu.prefetch.JOB_BYTES", 1)  # a block is a job, however small the rows
    return write(ROWS, (1, 4, 2), chunk=BLOCK)


def test_slow_disk(path):
    slow = seen(path, disk_s=0.012)
    verdict = judge(slow, Facts(), {"data.readers=2": 0.006})
    assert verdict.cause == "READ"
    assert verdict.change == "data.readers=2"
    assert as_foretold(verdict, slow, seen(path, disk_s=0.012, readers=2))


def test_slow_decoding(path):
    slow = seen(path, decode_s=0.012)
    verdict = judge(slow, Facts(near_tier="host"))
    assert (verdict.cause, verdict.change) == ("DECODE", "data.tier=host")
    assert as_foretold(verdict, slow, seen(path))


def test_slow_transform(path):
    slow = seen(path, transform_s=0.006)
    verdict = judge(slow, Facts(lighter=("augment.jitter=0",)), {"augment.jitter=0": 0.004})
    assert (verdict.cause, verdict.change) == ("AUGMENT", "augment.jitter=0")
    assert as_foretold(verdict, slow, seen(path))


def test_rows_of_floats(path):
    bytes_per_s = BATCH * 16 / 0.016  # 16 bytes a row as they lie there; a quarter of them as bytes
    slow = seen(path, bytes_per_s=bytes_per_s)
    verdict = judge(slow, Facts(float_fields={"images": 4}))
    assert verdict.cause == "COPY"
    assert verdict.change.startswith("store images as uint8: 4 x fewer bytes")
    assert as_foretold(verdict, slow, seen(path, bytes_per_s=4 * bytes_per_s))


def test_a_value_read_in_each_step(path):
    slow = seen(path, launch_s=0.004, item=True)
    verdict = judge(slow, Facts())
    assert verdict.cause == "SYNC"
    assert "mine.py:12" in verdict.change
    assert as_foretold(verdict, slow, seen(path, launch_s=0.004))


def test_a_model_too_small_for_its_launches(path):
    slow = seen(path, 0.001, launch_s=0.008)
    verdict = judge(slow, Facts())
    assert (verdict.cause, verdict.change) == ("LAUNCH", f"data.batch_rows={8 * BATCH}")
    assert as_foretold(verdict, slow, seen(path, 0.001, launch_s=0.008, batch_rows=8 * BATCH))


def test_a_device_that_computes_all_the_time(path):
    m = seen(path, 0.008, disk_s=0.002)
    verdict = judge(m, Facts())
    assert (verdict.cause, verdict.gain) == ("COMPUTE", 1.0)
    assert m.feed_ratio.step_s == pytest.approx(1, abs=0.05)


def _slow_second_rank(world: World, path: str, slow_s: float) -> Measured:
    return seen(path, slow_s if world.rank else 0.012, world=world)


@pytest.mark.slow
def test_one_slow_rank_of_two(path):
    slow = in_world(2, _slow_second_rank, path, 0.03)
    verdicts = [judge(m, Facts()) for m in slow]
    assert verdicts[0].cause == verdicts[1].cause == "STRAGGLER"
    assert verdicts[0].change.startswith("look at the machine of rank 1")
    assert as_foretold(verdicts[0], slow[0], in_world(2, _slow_second_rank, path, 0.012)[0])


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8, 1.25, 2, 4])  # supply / demand
def test_feed_ratio_is_that_of_theory(path, load):
    m = seen(path, 0.012, decode_s=0.012 / load - 0.0002)
    theory = min(1.0, m.compute.step_s / m.supply.step_s)  # as the sleeps really were
    assert m.feed_ratio.step_s == pytest.approx(theory, rel=0.03)
    assert theory == pytest.approx(min(1.0, load), rel=0.1)


def test_pools_are_those_of_the_feed(path):
    """The parts see each row of an epoch once, echoed or not, and feeds of few blocks only those."""
    rows = open_store("data.train", path, {"images": "images", "labels": "labels"})
    order = BlockSampler(rows.block_rows, BATCH, pool_batches=POOL_BATCHES)
    sizes: Any = type("Sizes", (), {"tier": "disk", "readers": 2})
    feeds: Feeds = make_feeds(rows, order, sizes, CPU, 2, False)
    batches = list[Rows]()

    def keep(batch: Rows) -> None:
        batches.append(batch.take(torch.arange(BATCH)))

    for times in (1, 2):
        batches.clear()
        pools = Pools(feeds.real, Parts(lambda rows: rows, keep, keep, BATCH, times))
        assert pools.train(order.pools_an_epoch) == len(batches) == times * ROWS // BATCH
        numbers = torch.cat([batch["images"].flatten(1)[:, :4].contiguous().view(torch.int32) for batch in batches])
        assert sorted(numbers.flatten().tolist()) == sorted([*range(ROWS)] * times)
    assert feeds.cached
    few = {n for pool in feeds.cached.pools(3) for n in pool.rows["images"].flatten(1)[:, :4].contiguous()
           .view(torch.int32).flatten().tolist()}  # fmt: skip
    assert few == set(range(len(few)))
    assert len(few) <= 2 * POOL_BATCHES * BATCH + BLOCK
    feeds.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_syncs_and_work_are_seen():
    device, x = TorchDevice(torch.device("cuda", 0)), torch.ones(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(20):
            torch.mm(x, x)

    assert device.syncs(work) == []
    assert device.syncs(lambda: x.sum().item())[0].startswith("tests/test_ceilings.py")
    work()
    device.synchronize()
    t0 = time.perf_counter()
    work()
    device.synchronize()
    assert 0 < (device.busy_s(work) or 0) < 1.2 * (time.perf_counter() - t0) + 0.01
