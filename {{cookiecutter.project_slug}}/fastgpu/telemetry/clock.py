"""How fast rows were read and trained on, and how long the step waited for them.

On a GPU the host's time inside `next(pools)` is not the wait: the host runs ahead of the device. What counts is how
long the device stood between the end of the work queued before and the arrival of the next pool, so both ends are CUDA
events on the loop's stream. On a CPU, where nothing is queued, plain clocks tell the same.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Lap(NamedTuple):
    """What passed between two reports. Rows count over all ranks."""

    seconds: float = 0.0
    wait_s: float = 0.0
    """Of them, without rows to train on."""
    fresh_rows: float = 0.0
    """Read."""
    trained_rows: float = 0.0
    """Stepped on: fresh x echo."""
    steps: float = 0.0

    @property
    def train_s(self) -> float:
        """To train on a row, where none had to be waited for."""
        return (self.seconds - self.wait_s) / self.trained_rows

    @property
    def rows_per_s(self) -> float:
        """Trained."""
        return self.trained_rows / self.seconds

    def plus(self, other: "Lap") -> "Lap":
        return Lap(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def scalars(self) -> dict[str, float]:
        """As TensorBoard's tags."""
        return {
            "train/step_ms": 1000 * self.seconds / max(1, self.steps),
            "train/trained_rows_per_s": self.rows_per_s,
            "data/fresh_rows_per_s": self.fresh_rows / self.seconds,
            "data/wait_pct": 100 * self.wait_s / self.seconds,
            "data/echo": self.trained_rows / self.fresh_rows,
        }

    def __str__(self) -> str:
        if not self.fresh_rows:
            return "no rows"
        text = f"{self.fresh_rows / self.seconds:,.0f} fresh rows/s, data wait {100 * self.wait_s / self.seconds:.1f} %"
        factor = self.trained_rows / self.fresh_rows
        return text if factor < 1.005 else f"{text}, echo {factor:.3g}"


class Clock:
    """Wraps the iterable of pools and counts the steps between them."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin a lap here, forgetting what passed since the last."""
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._wait_s, self._fresh_rows, self._trained_rows, self.steps = 0.0, 0.0, 0.0, 0
        self._t0 = time.perf_counter()

    def waits(self, pools: Iterable[T]) -> Iterator[T]:
        """The same items; the time that the device stands waiting for each is counted."""
        iterator = iter(pools)
        while True:
            began, t0 = self._mark(), time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            ended = self._mark()
            if began and ended:
                self._waits.append((began, ended))
            else:
                self._wait_s += time.perf_counter() - t0
            yield item

    def count(self, fresh_rows: float, trained_rows: int) -> None:
        """One step, over all ranks."""
        self.steps += 1
        self._fresh_rows += fresh_rows
        self._trained_rows += trained_rows

    def lap(self, slowest: Callable[[float], float] = float) -> Lap:
        """Since the last lap. Call it where the host has just waited for the device, or it will wait here.

        slowest: of this rank's wait the longest of any rank's.
        """
        for began, ended in self._waits:
            ended.synchronize()
            self._wait_s += began.elapsed_time(ended) / 1000
        seconds = time.perf_counter() - self._t0
        lap = Lap(seconds, slowest(self._wait_s), self._fresh_rows, self._trained_rows, self.steps)
        self.restart()
        return lap

    def _mark(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
