import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fastgpu.process.signals import SAVE, STOP, Requests, listen

ROOT = Path(__file__).parents[3]
ORPHAN = """
import os, sys, time
from fastgpu.process.signals import listen
launcher = os.getpid()
if os.fork():
    time.sleep(600)
requests = listen(watch_parent=True)
print(os.getpid(), flush=True)
while not requests.stop_signal:
    time.sleep(0.01)
print("asked to stop", flush=True)
time.sleep(600)
"""


@pytest.fixture
def requests() -> Iterator[Requests]:
    before = {number: signal.getsignal(number) for number in (*STOP, SAVE)}
    yield listen(watch_parent=False)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP)
def test_a_signal_asks_for_a_stop(requests, number):
    assert not requests.stop_signal
    os.kill(os.getpid(), number)
    assert requests.stop_signal == number
    assert not requests.save


def test_another_signal_asks_for_a_checkpoint_only(requests):
    os.kill(os.getpid(), SAVE)
    os.kill(os.getpid(), SAVE)
    assert requests.save
    assert not requests.stop_signal


@pytest.mark.parametrize("number", STOP)
def test_the_second_signal_ends_the_process(number):
    code = (
        "import os, signal; from fastgpu.process.signals import listen; listen(watch_parent=False);"
        f"os.kill(os.getpid(), signal.SIGTERM); print('alive', flush=True); os.kill(os.getpid(), {int(number)})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"
    assert done.returncode == -number


def test_an_orphan_is_asked_to_stop_and_then_ended():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        assert launcher.stdout.readline() == "asked to stop\n"
        orphan.wait(timeout=60)
        assert not orphan.is_running()


def test_a_child_of_a_living_parent_goes_on(requests):
    living = listen(watch_parent=True)
    time.sleep(1.2)
    assert not living.stop_signal
