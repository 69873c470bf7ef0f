from signal import SIGINT, SIGTERM, SIGUSR2

import psutil
import pytest
from harness import TIMEOUT_S, start_python

HEAD = """
import os, time
from types import SimpleNamespace
from fastgpu.process import signals
from fastgpu.process.launch import exit_with_message
world = SimpleNamespace(world_size=1, all_gather=lambda value: [value])
"""
AGAIN = """
agreement = signals.Agreement(world, 0)
assert not agreement.is_asked_to_stop(0)
for _ in range(2):
    os.kill(os.getpid(), {number})
print(agreement.is_asked_to_stop(1), agreement.stop_signal, flush=True)
signals.ECHO_S = 0
os.kill(os.getpid(), {number})
"""
ORPHAN = """
if os.fork():
    time.sleep(600)
os.environ["TORCHELASTIC_RUN_ID"] = "job"
with exit_with_message():
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [int(SIGTERM), int(SIGINT), int(SIGUSR2)])
def test_a_signal_asks_for_a_stop_and_one_that_comes_again_later_ends_the_process(number):
    with start_python(HEAD + AGAIN.format(number=number)) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-number, f"True {number}\n")


@pytest.mark.skipif(not psutil.LINUX, reason="a call of Linux")
def test_an_orphan_ends_whatever_it_is_doing():
    with start_python(HEAD + ORPHAN) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        orphan.wait(TIMEOUT_S)
