import os
import subprocess
import sys

import psutil
import pytest
from harness import ALONE, ROOT, TIMEOUT_S

from fastgpu.process.signals import STOP, Agreement

HEAD = """
import os, time
from types import SimpleNamespace
from fastgpu.process import signals
from fastgpu.process.launch import exit_with_message
world = SimpleNamespace(world_size=1, all_gather=lambda value: [value])
"""
AGAIN = """
signals.Agreement(world, 0)
for _ in range(2):
    os.kill(os.getpid(), {number})
print("alive", flush=True)
signals.ECHO_S = 0
os.kill(os.getpid(), {number})
"""
ORPHAN = """
if os.fork():
    time.sleep(600)
os.environ["TORCHELASTIC_RUN_ID"] = "job"
with exit_with_message():
    signals.Agreement(world, 0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def start(code: str) -> subprocess.Popen:
    """A process with these lines of Python."""
    return subprocess.Popen([sys.executable, "-c", HEAD + code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", STOP)
def test_a_signal_asks_for_a_stop(number):
    agreement = Agreement(ALONE, 0)
    assert not agreement.is_asked_to_stop(0)
    os.kill(os.getpid(), number)
    assert agreement.is_asked_to_stop(1)
    assert agreement.is_asked_to_stop(1, at_once=True)
    assert agreement.stop_signal == number


@pytest.mark.parametrize("number", STOP)
def test_a_signal_that_comes_again_later_ends_the_process(number):
    with start(AGAIN.format(number=int(number))) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-number, "alive\n")


@pytest.mark.skipif(not psutil.LINUX, reason="a call of Linux")
def test_an_orphan_ends_whatever_it_is_doing():
    with start(ORPHAN) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        orphan.wait(TIMEOUT_S)
