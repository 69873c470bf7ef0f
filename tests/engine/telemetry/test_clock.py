from itertools import pairwise
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from fastgpu.process.world import World
from fastgpu.telemetry import clock as clock_module
from fastgpu.telemetry.clock import Clock
from support.ranks import ALONE, needs_gpu


@pytest.fixture
def time(monkeypatch) -> SimpleNamespace:
    """A clock that moves only when it is told to."""
    fake = SimpleNamespace(now=0.0, perf_counter=lambda: fake.now)
    monkeypatch.setattr(clock_module, "time", fake)
    return fake


def test_clock_waits_and_rates(time):
    clock = Clock(ALONE, 10, echo=2)
    time.now += 128  # validation, say

    def batches():
        for batch in range(6):
            time.now += 0.25 * (batch % 2)  # reading
            yield batch

    for _ in clock.timed(batches()):
        time.now += 0.375  # training
    throughput = clock.interval()
    assert throughput == (3, 0.75, 30, 60, 6)
    assert throughput.scalars() == {
        "train/step_ms": 500,
        "train/trained_rows_per_s": 20,
        "data/fresh_rows_per_s": 10,
        "data/wait_pct": 25,
        "data/echo": 2,
    }
    assert str(throughput) == "10 fresh rows/s, 25.0 % of the time waiting for data"
    next(clock.timed(batches()))
    clock.restart()
    time.now += 1
    assert clock.interval() == (1, 0, 0, 0, 0)


def test_clock_wait_is_that_of_the_slowest_rank(time):
    class Slower(World):
        def all_reduce_max(self, value: float) -> float:
            return value + 1

    clock = Clock(Slower(0, 2, 2, torch.device("cpu")), 8)
    next(clock.timed([0]))
    time.now += 4
    assert clock.interval().scalars()["data/wait_pct"] == 25


def test_clock_events_are_recorded_again(time, monkeypatch):
    made = []

    class Event:
        """Of CUDA. The time at which it is recorded counts."""

        def __init__(self, *, enable_timing: bool):
            made.append(self)

        def record(self) -> None:
            self.now = time.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.now - self.now)

    def batches():
        for batch in range(12):
            time.now += 0.25  # reading
            yield batch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(World(0, 1, 1, torch.device("cuda", 0)), 8)
    for batch in clock.timed(batches()):
        time.now += 0.75  # training
        if batch % 3 == 2:
            assert clock.interval()[:2] == (3, 0.75)
    assert len(made) == 2 * 3


@pytest.mark.gpu
@pytest.mark.real_gpu
@needs_gpu
@pytest.mark.parametrize("read_s", [0, 0.2])  # at once; longer than the work that is queued, on an H100 about 0.06 s
def test_clock_wait_on_a_gpu_is_that_of_a_trace(read_s):
    clock = Clock(World(0, 1, 1, torch.device("cuda", 0)), 1)
    x = torch.randn(4096, 4096, device="cuda")

    def pools():
        for number in range(6):
            if number:
                sleep(read_s)
            yield number

    def work():
        nonlocal x
        for _ in range(20):
            x = x @ x / 4096

    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        clock.restart()
        for _ in clock.timed(pools()):
            work()
        torch.cuda.synchronize()
        throughput = clock.interval()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((event.time_range.start, event.time_range.end) for event in on_device)
    gaps_s = sum(max(0, later[0] - earlier[1]) for earlier, later in pairwise(kernels)) / 1e6
    assert throughput.wait_s == pytest.approx(gaps_s, abs=0.01 * throughput.seconds)
