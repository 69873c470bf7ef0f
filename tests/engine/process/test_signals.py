import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fastgpu.process.launch import Launch
from fastgpu.process.signals import STOP, Requests, end_with_launcher

ROOT = Path(__file__).parents[3] / "{{cookiecutter.project_slug}}"
ORPHAN = """
import os, sys, time
from fastgpu.process.launch import Launch
from fastgpu.process.signals import Requests, end_with_launcher
launcher = os.getpid()
if os.fork():
    time.sleep(600)
end_with_launcher(Launch(is_launched=True))
requests = Requests()
requests.listen()
print(os.getpid(), flush=True)
while not requests.stop_signal:
    time.sleep(0.01)
print("asked to stop", flush=True)
time.sleep(600)
"""


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    requests.listen()
    yield requests
    requests.close()


@pytest.mark.parametrize("number", STOP)
def test_a_signal_asks_for_a_stop(requests, number):
    assert not requests.stop_signal
    os.kill(os.getpid(), number)
    assert requests.stop_signal == number


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP)
def test_a_signal_that_comes_again_later_ends_the_process(number):
    code = (
        "import os, signal; from fastgpu.process.signals import Requests; Requests().listen();"
        f"os.kill(os.getpid(), {int(number)}); os.kill(os.getpid(), {int(number)});"
        f"print('alive', flush=True); import time; time.sleep(2.2); os.kill(os.getpid(), {int(number)})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"
    assert done.returncode == -number


@pytest.mark.parametrize(("what", "code"), [("sys.exit(2)", 2), ("time.sleep(600)", 128 + signal.SIGTERM)])
def test_a_rank_that_is_told_to_end_may_say_why_first(what, code):
    script = (
        "import os, signal, sys, time; from fastgpu.process import signals; signals.LAST_WORDS_S = 0.5;"
        "signal.signal(signal.SIGTERM, signals.end_soon); os.kill(os.getpid(), signal.SIGTERM);"
        f"print('last words', flush=True); {what}"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "last words\n"
    assert done.returncode == code


def test_a_signal_that_came_before_the_run_listened_asks_for_a_stop_and_ends_nothing():
    script = (
        "import os, signal, time; from fastgpu.process import signals; signals.LAST_WORDS_S = 0.5;"
        "signal.signal(signal.SIGTERM, signals.end_soon); os.kill(os.getpid(), signal.SIGTERM);"
        "requests = signals.Requests(); requests.listen(); time.sleep(1); print(requests.stop_signal)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGTERM)}\n")


@pytest.mark.slow
def test_an_orphan_is_asked_to_stop_and_then_ended():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        assert launcher.stdout.readline() == "asked to stop\n"
        orphan.wait(timeout=60)
        assert not orphan.is_running()


def test_a_child_of_a_living_parent_goes_on(requests):
    end_with_launcher(Launch(is_launched=True))
    time.sleep(1.2)
    assert not requests.stop_signal


@pytest.mark.slow
def test_a_rank_whose_launcher_died_before_it_looked_ends():
    """As when torchrun is killed while its ranks still start."""
    code = """
import os, sys, time
from fastgpu.process.launch import Launch
from fastgpu.process.signals import end_with_launcher
if os.fork():
    os._exit(0)
while os.getppid() != int(sys.argv[1]):
    time.sleep(0.01)
print(os.getpid(), flush=True)
end_with_launcher(Launch(is_launched=True))
time.sleep(600)
"""
    reaper = psutil.Process(1)
    if "python" in " ".join(reaper.cmdline()):
        pytest.skip("process 1 could be a launcher")
    with subprocess.Popen([sys.executable, "-c", code, "1"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        orphan = int(launcher.stdout.readline())
        with suppress(psutil.NoSuchProcess):
            psutil.Process(orphan).wait(60)
