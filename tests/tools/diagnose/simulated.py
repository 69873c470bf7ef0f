"""A simulated device behind a real feed, for planting causes. Its times are sleeps, so they are known."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from harness import CPU, sizes_of

from fastgpu.diagnose.ceilings import Loop, Meter, measure, read_pool, repeat
from fastgpu.diagnose.verdict import Cause, Measured
from fastgpu.process.config import Loader
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store

BATCH_SIZE = 16
POOL_BATCHES = 4
N_ROWS = 2048
BLOCK_ROWS = 16
FIELDS = {"images": "images", "labels": "labels"}


class SimulatedDevice(Meter):
    """A device that works off its queue while the host goes on. The host is at most one kernel ahead."""

    def __init__(self, world: World) -> None:
        super().__init__(world, 0.15)
        self._end = 0.0
        self._worked_s = 0.0
        self._waited_at: list[str] = []

    def queue(self, seconds: float) -> None:
        """Queue a kernel."""
        now = time.perf_counter()
        if self._end > now:
            time.sleep(self._end - now)
            now = self._end
        self._end = now + seconds
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
        return list(dict.fromkeys(self._waited_at))


def slow_down(source: Dataset, disk_s: float, decode_s: float) -> None:
    """Let the rows lie on a slow disk with a page cache, and be slow to decode. disk_s, decode_s: for each block."""
    read_at_once = source.read
    cache: deque[int] = deque(maxlen=24)  # first rows of blocks

    def read(plan: PoolPlan, reads: Reads, out: Mapping[str, Any]) -> None:
        for read in reads.portions(1):
            start = int(read.starts[0])
            if start not in cache:
                time.sleep(disk_s)
                cache.append(start)
            time.sleep(decode_s)
            read_at_once(plan, read, out)

    source.read = read


class Times(NamedTuple):
    """How long each part of the loop takes. A batch of twice the rows takes the device twice as long."""

    step_s: float = 0.004
    slow_step_s: float = 0.0
    """The same on the second rank, if that is another time."""
    transform_s: float = 0.0
    launch_s: float = 0.0
    """For the host to queue the kernels of a step."""
    reads_value: bool = False
    """Each step reads a value from the device."""
    disk_s: float = 0.0
    """To read a block that is not in the page cache."""
    decode_s: float = 0.0
    """To decode a block."""
    copy_s: float = 0.0
    """To copy a batch to the device."""
    n_readers: int = 1
    batch_size: int = BATCH_SIZE
    echo: float = 1.0


def measure_simulated(world: World, path: str, times: Times) -> Measured:
    """Every part of a loop that takes these times, in three rounds."""
    device = SimulatedDevice(world)
    factor = times.batch_size / BATCH_SIZE
    step_s = times.slow_step_s if world.rank and times.slow_step_s else times.step_s
    source = open_store("data.train", path, FIELDS)
    slow_down(source, times.disk_s, times.decode_s + times.copy_s)  # a block has the rows of a batch
    shard = Shard(world.rank, world.world_size)
    pool_batches = max(1, int(POOL_BATCHES / factor))
    order = BlockSampler(source.block_rows, times.batch_size, shard=shard, pool_batches=pool_batches)

    def transform(batch: Rows) -> Rows:
        if times.transform_s:
            device.queue(times.transform_s * factor)
        return batch

    def local_step(_: Rows) -> None:
        time.sleep(times.launch_s)
        device.queue(step_s * factor)
        if times.reads_value:
            device.item("mine.py:12")

    def train_step(batch: Rows) -> None:
        local_step(batch)
        if world.world_size > 1:  # the gradients arrive when those of the slowest rank do
            device.synchronize()
            world.all_reduce_max(0.0)

    batch = read_pool(source, order, 1).slice(0, times.batch_size)
    sizes, loader = sizes_of("disk", times.n_readers), Loader(prefetch_pools=2)
    loop = Loop(transform, train_step, local_step, batch, source, sizes, CPU, loader, times.echo)
    copy = partial(repeat, lambda: time.sleep(times.copy_s)) if times.copy_s else None
    return measure(device, loop, order, copy, stop=lambda m: len(m.loop) == 3)


class Planted(NamedTuple):
    """A cause and its cure."""

    times: Times
    cause: Cause
    change: str
    """The beginning of the advice."""
    cure: Mapping[str, Any]
    """The times that the change has an effect on."""
    n_ranks: int = 1


MORE_READERS = "loader.num_readers=2"
PLANTED = {
    "a slow disk": Planted(Times(disk_s=0.012), "READ", MORE_READERS, {"n_readers": 2}),
    "slow decoding": Planted(Times(decode_s=0.012), "DECODE", MORE_READERS, {"n_readers": 2}),
    "a slow transform": Planted(Times(transform_s=0.006), "AUGMENT", "make `transform`", {"transform_s": 0.0}),
    "a slow bus": Planted(Times(copy_s=0.024), "COPY", "data.echo=4", {"echo": 4.0}),
    "a value read in each step": Planted(
        Times(launch_s=0.004, reads_value=True),
        "HOST",
        "leave the value on the device at mine.py:12",
        {"reads_value": 0},
    ),
    "a model too small for its launches": Planted(
        Times(step_s=0.002, launch_s=0.009), "HOST", f"data.batch_size={4 * BATCH_SIZE}", {"batch_size": 4 * BATCH_SIZE}
    ),
    "none: the device computes all the time": Planted(Times(step_s=0.008, disk_s=0.002), "COMPUTE", "", {}),
    "one slow rank of two": Planted(
        Times(step_s=0.012, slow_step_s=0.03), "RANKS", "look at the machine of rank 1", {"slow_step_s": 0.0}, 2
    ),
}
