"""Signals that ask for a stop, in one process and in several ranks."""

import os
import signal
import time
from unittest.mock import Mock

import pytest

from fastgpu.process import signals
from fastgpu.process.signals import MAX_CALLS, STOP, StopSignal
from fastgpu.process.world import World
from support.ranks import ALONE, in_world


@pytest.mark.parametrize("number", STOP)
def test_signal_stops_once_and_ends_when_repeated_later(monkeypatch, number):
    kill = Mock()
    monkeypatch.setattr(os, "kill", kill)
    stop_signal = StopSignal(ALONE)
    assert not stop_signal.is_asked_to_stop()
    for _ in range(2):
        signal.raise_signal(number)
    assert stop_signal.is_asked_to_stop()
    assert stop_signal.number == number
    kill.assert_not_called()
    monkeypatch.setattr(signals, "DEBOUNCE_S", 0)
    signal.raise_signal(number)
    assert signal.getsignal(number) == signal.SIG_DFL
    kill.assert_called_once_with(os.getpid(), number)


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
