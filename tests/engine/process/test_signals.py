"""Signals that ask for a stop, in one process and in several ranks."""

import os
import signal
import time

import pytest

from fastgpu.process.signals import MAX_CALLS, STOP, StopSignal
from fastgpu.process.world import World
from support.ranks import ALONE, TIMEOUT_S, in_world, start_python

AGAIN = """
import os, torch
from fastgpu.process import signals
from fastgpu.process.world import World
stop_signal = signals.StopSignal(World(0, 1, 1, torch.device("cpu")))
assert not stop_signal.is_asked_to_stop()
for _ in range(2):
    os.kill(os.getpid(), signals.STOP[0])
print(stop_signal.is_asked_to_stop(), flush=True)
signals.DEBOUNCE_S = 0
os.kill(os.getpid(), signals.STOP[0])
"""


def test_signal_repeated_at_once_asks_once():
    with start_python(AGAIN) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-signal.SIGTERM, "True\n")


@pytest.mark.parametrize("number", STOP)
def test_signal_stops_a_single_process_at_once(number):
    stop_signal = StopSignal(ALONE)
    for _ in range(3):
        assert not stop_signal.is_asked_to_stop()
    os.kill(os.getpid(), number)
    assert stop_signal.is_asked_to_stop()
    assert stop_signal.number == number


def test_signal_hangup_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_signal = StopSignal(ALONE)
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop_signal.is_asked_to_stop()


def calls_to_stop(world: World, step_s: float, n_before: int) -> tuple[int, int, int]:
    """Calls, and questions among them, until a rank knows of a signal that the last rank got after `n_before` calls."""
    questions: list[tuple[float, ...]] = []

    class Asked(World):
        def start_max(self, *values):
            questions.append(values)
            return super().start_max(*values)

    stop_signal = StopSignal(Asked(world.rank, world.world_size, world.local_world_size, world.device))
    for n_calls in range(1, 1000):
        time.sleep(step_s * (1 + world.rank))  # one rank is slower
        if n_calls == n_before and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        if stop_signal.is_asked_to_stop():
            break
    return n_calls, len(questions), stop_signal.number


@pytest.mark.slow
@pytest.mark.parametrize(("step_s", "most_calls"), [(0, 2 * MAX_CALLS), (0.04, 13), (0.3, 0)])
def test_signal_reaches_all_ranks_at_one_step(step_s, most_calls):
    n_before = 4 if step_s == 0.3 else 60
    ours, theirs = in_world(2, calls_to_stop, step_s, n_before)
    assert ours == theirs
    n_calls, n_questions, number = ours
    assert n_before <= n_calls <= n_before + most_calls
    assert number == signal.SIGUSR2
    assert n_questions <= (8 if step_s == 0 else n_calls)
