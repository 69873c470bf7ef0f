import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from harness import ALONE, ROOT, TIMEOUT_S

from fastgpu.process import signals
from fastgpu.process.launch import Launch
from fastgpu.process.signals import STOP, Agreement, end_with_launcher

HEAD = """
import os, signal, sys, time
from types import SimpleNamespace
from fastgpu.process import signals
from fastgpu.process.launch import Launch
agreement = signals.Agreement(SimpleNamespace(world_size=1, all_reduce_max=lambda value: value))
"""
ORPHAN = """
if os.fork():
    time.sleep(600)
signals.end_with_launcher(Launch(is_launched=True))
agreement.listen(0)
print(os.getpid(), flush=True)
while not agreement.is_asked_to_stop(0):
    time.sleep(0.01)
print("asked to stop", flush=True)
time.sleep(600)
"""
BORN_AN_ORPHAN = """
if os.fork():
    os._exit(0)
while os.getppid() != 1:
    time.sleep(0.01)
print(os.getpid(), flush=True)
signals.end_with_launcher(Launch(is_launched=True))
time.sleep(600)
"""
TOLD_TO_END = """
signals.LAST_WORDS_S = 0.5
signal.signal(signal.SIGTERM, signals.end_soon)
os.kill(os.getpid(), signal.SIGTERM)
print("last words", flush=True)
"""


def start(*code: str) -> subprocess.Popen:
    """A process with these lines of Python."""
    program = HEAD + "\n".join(code)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def run(*code: str) -> tuple[int, str]:
    """(exit code, output) of a process with these lines of Python."""
    with start(*code) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


@pytest.fixture
def agreement() -> Iterator[Agreement]:
    agreement = Agreement(ALONE)
    agreement.listen(0)
    yield agreement
    agreement.close()


@pytest.mark.parametrize("number", STOP)
def test_a_signal_asks_for_a_stop(agreement, number):
    assert not agreement.is_asked_to_stop(0)
    os.kill(os.getpid(), number)
    assert agreement.is_asked_to_stop_now()
    assert agreement.is_asked_to_stop(1)
    assert agreement.stop_signal == number


@pytest.mark.parametrize("number", STOP)
def test_a_signal_that_comes_again_later_ends_the_process(number):
    again = f"os.kill(os.getpid(), {int(number)})"
    later = "print('alive', flush=True); signals.ECHO_S = 0"
    assert run("agreement.listen(0)", again, again, later, again) == (-number, "alive\n")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(2)", 2), ("time.sleep(600)", 128 + signal.SIGTERM)])
def test_a_rank_that_is_told_to_end_may_say_why_first(end, code):
    assert run(TOLD_TO_END, end) == (code, "last words\n")


def test_a_signal_that_came_before_the_run_listened_asks_for_a_stop_and_ends_nothing():
    timer = "timer = signals._ending[0][1]"
    listen = "agreement.listen(0); timer.join(); print(agreement.is_asked_to_stop(0))"  # the end was called off
    assert run(TOLD_TO_END, timer, listen) == (0, "last words\nTrue\n")


def test_an_orphan_is_asked_to_stop_and_then_ended():
    with start(ORPHAN) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        assert launcher.stdout.readline() == "asked to stop\n"
        orphan.wait(TIMEOUT_S)


def test_a_rank_whose_launcher_died_before_it_looked_ends():
    """As when torchrun is killed while its ranks still start."""
    if "python" in " ".join(psutil.Process(1).cmdline()):
        pytest.skip("process 1 could be a launcher")
    with start(BORN_AN_ORPHAN) as launcher, suppress(psutil.NoSuchProcess):
        psutil.Process(int(launcher.stdout.readline())).wait(TIMEOUT_S)


def test_a_child_of_a_living_parent_goes_on(agreement, monkeypatch):
    looked = threading.Semaphore(0)

    class Time:
        @staticmethod
        def sleep(seconds: float) -> None:
            looked.release()
            time.sleep(0.01)

    monkeypatch.setattr(signals, "time", Time)
    end_with_launcher(Launch(is_launched=True))
    for _ in range(3):
        assert looked.acquire(timeout=TIMEOUT_S)
    monkeypatch.undo()
    assert not agreement.is_asked_to_stop_now()
