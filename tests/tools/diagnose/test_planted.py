"""Causes planted in a real feed in front of a simulated device are named, and the gain of the cure is right.

The device is simulated by sleeps, so the times of all parts are known. The rows are those of a file or of a Dataset
with worker processes, and two ranks are two processes.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from torch.utils.data import Dataset as TorchDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.diagnose.ceilings import Loop, Meter, measure, read_pool, repeat
from fastgpu.diagnose.verdict import Cause, Measured, judge
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from support.ranks import ALONE, CPU, in_world
from support.rows import DENSE_FIELDS, config_of

N_ROWS = 2048
BATCH_SIZE = 16
POOL_BATCHES = 4
RUN_POOL_BATCHES = 64
"""Batches of a pool in a run, as the config has them. Measurements are of smaller pools, in as many parts."""
MEASURE_S = 0.3
"""As diagnose.py measures without --seconds."""
N_TRIES = 5
MIN_RIGHT = 4
"""Of all tries, also those that another program has disturbed: measurements are of 3 rounds, where diagnose.py takes up
to 16."""


class SimulatedDevice(Meter):
    """A device that works off its queue while the host goes on. The host is at most one kernel ahead."""

    def __init__(self, world: World) -> None:
        super().__init__(world, MEASURE_S)
        self._end = 0.0
        self._worked_s = 0.0
        self._waited_at: list[str] = []

    def queue(self, seconds: float) -> None:
        """Queue a kernel. Of no length: there is none, and the host does not wait for the one before it."""
        if not seconds:
            return
        now = time.perf_counter()
        self.synchronize()
        self._end = max(self._end, now) + seconds
        self._worked_s += seconds

    def item(self, place: str) -> None:
        """Read a value, which waits for everything that is queued. place: the line of code."""
        self._waited_at.append(place)
        self.synchronize()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))

    def busy_s(self, work: Callable[[], object]) -> float:
        before_s = self._worked_s
        work()
        return self._worked_s - before_s

    def syncs(self, work: Callable[[], object]) -> list[str]:
        self._waited_at = []
        work()
        return self._waited_at[:1]


def slow_down(source: Dataset, disk_s: float, decode_s: float) -> None:
    """Let the rows lie on a slow disk with a page cache, and be slow to decode. disk_s, decode_s: for each block."""
    read_at_once = source.read
    cache: deque[int] = deque(maxlen=24)  # first rows of blocks

    def read(plan: PoolPlan, reads: Reads, out: Mapping[str, Any]) -> None:
        for block in reads.split(1):
            start = int(block.runs.starts[0])
            if start not in cache:
                time.sleep(disk_s)
                cache.append(start)
            time.sleep(decode_s)
            read_at_once(plan, block, out)

    source.read = read


class Items(TorchDataset):
    """Items that wait or that compute."""

    def __init__(self, item_s: float, *, computes: bool):
        self.item_s, self.computes = item_s, computes

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.int64]:
        if self.computes:
            t0 = time.thread_time()
            while time.thread_time() - t0 < self.item_s:
                pass
        else:
            time.sleep(self.item_s)
        return np.zeros((1, 4, 2), np.uint8), np.int64(row)


class Times(NamedTuple):
    """Seconds that each part of the loop takes. A batch of twice the rows takes the device twice as long."""

    step_s: float = 0.004
    slow_rank: int = -1  # whose steps take the device 2.5 times as long
    transform_s: float = 0.0  # of a batch, for the device
    exchange_s: float = 0.0  # of a step, to average the gradients of all ranks
    launch_s: float = 0.0  # for the host to queue the kernels of a step
    reads_value: bool = False  # in each step, from the device
    disk_s: float = 0.0  # to read a block that is not in the page cache
    decode_s: float = 0.0  # of a block
    copy_s: float = 0.0  # of a batch, to the device
    items: Literal["", "wait", "share a disk", "compute"] = ""  # of a Dataset, in place of a file
    item_s: float = 0.004
    n_readers: int = 1  # threads, or worker processes of a Dataset
    batch_size: int = BATCH_SIZE
    echo: float = 1.0
    ranks: int = 1


def open_rows(path: str, times: Times) -> Dataset:
    """The rows of the file, or those of a Dataset."""
    if times.items:
        # A disk that reads for several workers takes that many times as long for each of them.
        item_s = times.item_s * (times.n_readers if times.items == "share a disk" else 1)
        items = Items(item_s, computes=times.items == "compute")
        return ItemDataset("mine", items, {"images": "0", "labels": "1"})
    source = open_store("data.train", path, DENSE_FIELDS)
    slow_down(source, times.disk_s, times.decode_s + times.copy_s)  # a block has the rows of a batch
    return source


def measure_rank(world: World, path: str, times: Times) -> Measured:
    """Every part of a loop that takes these times, in three rounds."""
    device = SimulatedDevice(world)
    factor = times.batch_size / BATCH_SIZE
    step_s = times.step_s * factor * (2.5 if world.rank == times.slow_rank else 1.0)
    source = open_rows(path, times)
    shard = Shard(world.rank, world.world_size)
    sampler = BlockSampler(source, times.batch_size, shard, max(1, int(POOL_BATCHES / factor)))

    def transform(rows: Rows) -> Rows:
        device.queue(times.transform_s * factor)
        return rows

    def local_step(_: Rows) -> None:
        time.sleep(times.launch_s)
        device.queue(step_s)
        if times.reads_value:
            device.item("mine.py:12")

    def step(rows: Rows) -> None:
        local_step(rows)
        device.queue(times.exchange_s)

    config = config_of(n_readers=times.n_readers, echo=times.echo).resolved(data={"pool_batches": RUN_POOL_BATCHES})
    batch = read_pool(source, sampler, config.loader).slice(0, times.batch_size)
    loop = Loop(transform, step, local_step, batch, source, config, CPU)
    copy = partial(repeat, lambda: time.sleep(times.copy_s)) if times.copy_s else None
    measured = measure(device, loop, sampler, copy, stop=lambda m: len(m.loop) == 3)
    source.close()
    return measured


def measure_simulated(path: str, times: Times) -> Measured:
    if times.ranks == 1:
        return measure_rank(ALONE, path, times)
    return in_world(times.ranks, measure_rank, path, times)[0]


SLOW_RANK = "look at the machine of rank 1"
LARGE = 4 * BATCH_SIZE
PLANTED: dict[str, tuple[Times, Cause, str, dict[str, Any]]] = {
    # what is planted: (its times, the cause, how the advice begins, the times that the change has an effect on)
    "a slow disk": (Times(disk_s=0.012), "READ", "loader.num_readers=2", {"n_readers": 2}),
    "slow decoding": (Times(decode_s=0.012), "DECODE", "loader.num_readers=2", {"n_readers": 2}),
    "items that wait": (Times(items="wait"), "READ", "loader.num_workers=2", {"n_readers": 2}),
    "items that share a disk": (Times(items="share a disk", step_s=0.02), "READ", "data.echo=", {}),
    "items that compute": (Times(items="compute"), "DECODE", "loader.num_workers=2", {"n_readers": 2}),
    "a slow bus": (Times(copy_s=0.024), "COPY", "data.echo=4", {}),
    "a transform": (Times(transform_s=0.004), "AUGMENT", "make `transform` lighter", {"transform_s": 0.0}),
    "a value read": (Times(launch_s=0.004, reads_value=True), "HOST", "leave the value", {"reads_value": False}),
    "a small model": (Times(step_s=0.002, launch_s=0.009), "HOST", f"data.batch_size={LARGE}", {"batch_size": LARGE}),
    "a slow rank": (Times(slow_rank=1, ranks=2), "RANKS", SLOW_RANK, {"slow_rank": -1}),
    "many gradients": (Times(exchange_s=0.004, ranks=2), "RANKS", "data.batch_size=64", {"batch_size": 32}),
    "nothing": (Times(step_s=0.008, disk_s=0.002), "COMPUTE", "", {}),
}


@pytest.fixture
def path(dense_file, monkeypatch):
    monkeypatch.setattr("fastgpu.feed.readers.JOB_BYTES", 1)  # a block is a job, however small the rows are
    return dense_file(N_ROWS, (1, 4, 2), chunk=BATCH_SIZE)


def try_readers(path: str, times: Times) -> tuple[str, float]:
    """Twice as many readers as a setting, and the seconds per step of the supply with them, as diagnose.py tries it."""
    n_readers = 2 * times.n_readers
    name = "num_workers" if times.items else "num_readers"
    return f"loader.{name}={n_readers}", measure_simulated(path, times._replace(n_readers=n_readers)).supply.median


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_planted_cause_and_gain_are_right(path, planted):
    """The share of right answers over all tries. The loop takes as long as the longer one of compute and supply."""
    times, cause, change, cure = PLANTED[planted]
    notes: list[str] = []
    for _ in range(N_TRIES):
        slow = measure_simulated(path, times)
        verdict = judge(slow, readers=try_readers(path, times) if cause in ("READ", "DECODE") else None)
        is_named = verdict.cause == cause and verdict.change.startswith(change)
        echo = {"echo": float(verdict.change.partition("=")[2])} if is_named and change.startswith("data.echo=") else {}
        cured = measure_simulated(path, times._replace(**cure | echo))
        gain = cured.batch_size / cured.loop.median / (slow.batch_size / slow.loop.median)
        feed_ratios = [(1 - m.lost.median, min(1.0, m.compute.median / m.supply.median)) for m in (slow, cured)]
        is_predicted = gain == pytest.approx(verdict.gain, rel=0.15)
        is_explained = all(found == pytest.approx(theory, rel=0.05, abs=0.02) for found, theory in feed_ratios)
        if not (is_named and is_predicted and is_explained):
            notes.append(f"{verdict}; gain after the cure {gain:.3f}; feed ratios, found and in theory: {feed_ratios}")
    assert N_TRIES - len(notes) >= MIN_RIGHT, notes
