"""How fast rows are read and trained on, and how long the step waits for them.

On a GPU the time that the host spends in `next(pools)` is not the wait, because the host runs ahead of the device. The
wait is the time from the end of the queued work to the arrival of the next pool, so both ends are CUDA events on the
stream of the loop. On a CPU nothing is queued and plain clocks give the same result.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from fastgpu.process.world import World

T = TypeVar("T")


class Throughput(NamedTuple):
    """An interval of training, as sums. Rows are counted over all ranks."""

    seconds: float
    wait_s: float
    """Part of `seconds` spent waiting for rows."""
    fresh_rows: float
    """Rows read."""
    trained_rows: float
    """Rows trained on: fresh rows x echo."""
    steps: int
    """Optimizer steps."""

    def scalars(self) -> dict[str, float]:
        """{tag: value}."""
        return {
            "train/step_ms": 1000 * self.seconds / max(1, self.steps),
            "train/trained_rows_per_s": self.trained_rows / self.seconds,
            "data/fresh_rows_per_s": self.fresh_rows / self.seconds,
            "data/wait_pct": 100 * self.wait_s / self.seconds,
            "data/echo": self.trained_rows / self.fresh_rows,
        }

    def __str__(self) -> str:
        fresh_rows_per_s, wait_pct = self.fresh_rows / self.seconds, 100 * self.wait_s / self.seconds
        return f"{fresh_rows_per_s:,.0f} fresh rows/s, {wait_pct:.1f} % of the time waiting for data"


class Clock:
    """Wraps the iterable of pools and counts the steps between them."""

    def __init__(self, world: World):
        self._world = world
        self._is_cuda = world.device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin a new interval here and forget the current one."""
        self._waits: list[tuple[Any, Any]] = []  # begin and end of each, as `_mark` returns them
        self._fresh_rows = 0.0
        self._trained_rows = 0.0
        self._steps = 0
        self._t0 = time.perf_counter()

    def timed(self, pools: Iterable[T]) -> Iterator[T]:
        """The same items; the time that the device waits for each is measured. A new interval begins with them."""
        self.restart()
        begin = self._mark()
        for item in pools:
            self._waits.append((begin, self._mark()))
            yield item
            begin = self._mark()

    def count(self, fresh_rows: float, trained_rows: int) -> None:
        """Count one step of all ranks."""
        self._steps += 1
        self._fresh_rows += fresh_rows
        self._trained_rows += trained_rows

    def take(self) -> Throughput:
        """The interval since the last call; a new one begins. Call it where the host has just waited for the device.

        The wait is the longest one of any rank.
        """
        own_wait_s = sum(_seconds(begin, end) for begin, end in self._waits)
        seconds = time.perf_counter() - self._t0
        wait_s = self._world.all_reduce_max(own_wait_s)
        throughput = Throughput(seconds, wait_s, self._fresh_rows, self._trained_rows, self._steps)
        self.restart()
        return throughput

    def _mark(self) -> Any:
        """This point of the stream as a CUDA event, or the time in seconds on a CPU."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Any, end: Any) -> float:
    """The time between two marks."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000
