"""A simulated device behind a real feed, for causes to be planted in: its times are sleeps, so they are known."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, NamedTuple

import torch

from fastgpu.diagnose.ceilings import Parts, first_batch, make_feeds, measure
from fastgpu.diagnose.verdict import Cause, Facts, Measured
from fastgpu.feed.tiers import Feed
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store

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
    batch_size: int = BATCH,
    **slow: float,
) -> Measured:
    """All ceilings of a loop whose parts take so long; a batch of twice the rows takes the device twice as long."""
    device, times = Simulated(), batch_size / BATCH
    rows: Any = SlowRows(open_store("data.train", path, {"images": "images", "labels": "labels"}), **slow)  # type: ignore[arg-type]
    order = BlockSampler(
        rows.block_rows,
        batch_size,
        rank=world.rank,
        world_size=world.world_size,
        pool_batches=max(1, int(POOL_BATCHES / times)),
    )

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
        if world.world_size > 1:  # gradients are there when the slowest rank's are
            device.synchronize()
            world.all_reduce_max(0.0)

    sizes: Any = type("Sizes", (), {"tier": "disk", "readers": readers})
    feeds = make_feeds(rows, order, sizes, CPU, 2, False)
    if bytes_per_s:
        pool = Pool(None, first_batch(rows, order, 1, CPU))  # type: ignore[arg-type]
        feeds = feeds._replace(real=SlowCopies(feeds.real, bytes_per_s), staged=SlowCopies(Ready(pool), bytes_per_s))
    parts = Parts(transform, step, lambda _: work(step_s), batch_size)
    found = measure(world, device, parts, first_batch(rows, order, 1, CPU), feeds, 0.15, 3)
    feeds.close()
    return found


def speed(m: Measured) -> float:
    """Rows a second of the loop."""
    return m.batch_size / m.loop.step_s


class Planted(NamedTuple):
    """A cause, and its cure."""

    name: str
    slow: dict[str, Any]
    """What `seen` is called with."""
    cause: Cause
    change: str
    """Begin of what is to be said."""
    cured: dict[str, Any]
    """What `seen` is called with when it is done."""
    facts: Facts = Facts()
    tried: dict[str, float] = {}  # noqa: RUF012


BUS = BATCH * 16 / 0.024  # bytes/s: 16 bytes a row as it lies there, a quarter of them as bytes
PLANTED = [
    Planted(
        "a slow disk",
        {"disk_s": 0.012},
        "READ",
        "loader.num_readers=2",
        {"disk_s": 0.012, "readers": 2},
        tried={"loader.num_readers=2": 0.006},
    ),
    Planted("slow decoding", {"decode_s": 0.012}, "DECODE", "data.tier=host", {}, Facts(near_tier="host")),
    Planted(
        "a slow transform",
        {"transform_s": 0.006},
        "AUGMENT",
        "model.color_jitter=0",
        {},
        Facts(lighter=("model.color_jitter=0",)),
        {"model.color_jitter=0": 0.004},
    ),
    Planted(
        "rows of floats, four times the bytes",
        {"bytes_per_s": BUS},
        "COPY",
        "store images as uint8: 4 x fewer bytes",
        {"bytes_per_s": 4 * BUS},
        Facts(float_fields={"images": 4}),
    ),
    Planted(
        "a value read in each step",
        {"launch_s": 0.004, "item": True},
        "SYNC",
        "leave the value on the device at mine.py:12",
        {"launch_s": 0.004},
    ),
    Planted(
        "a model too small for its launches",
        {"step_s": 0.002, "launch_s": 0.009},
        "LAUNCH",
        f"data.batch_size={4 * BATCH}",
        {"step_s": 0.002, "launch_s": 0.009, "batch_rows": 4 * BATCH},
    ),
    Planted(
        "none: the device computes all the time",
        {"step_s": 0.008, "disk_s": 0.002},
        "COMPUTE",
        "nothing",
        {"step_s": 0.008, "disk_s": 0.002},
    ),
]


def slow_second_rank(world: World, path: str, slow_s: float) -> Measured:
    """All ceilings of two ranks, of which the second takes so long for a step."""
    return seen(path, slow_s if world.rank else 0.012, world=world)
