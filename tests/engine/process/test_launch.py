"""What torchrun tells a process, and how processes end: with a message, or with their launcher."""

import os
import re
import socket

import psutil
import pytest

from fastgpu.process import launch as launch_module
from fastgpu.process.launch import (
    Launch,
    SharedError,
    UserError,
    check_alone,
    check_parent,
    exit_with_message,
    read_launch,
    say,
    without_secrets,
)
from support.ranks import TIMEOUT_S, start_python

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def slept(monkeypatch) -> list[float]:
    """Where this process was started without torchrun: the seconds that it has slept."""
    slept: list[float] = []
    monkeypatch.setattr(launch_module.time, "sleep", slept.append)
    monkeypatch.setattr(launch_module, "end_with_parent", lambda: None)
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return slept


def test_launch_reads_the_variables_of_torchrun(monkeypatch):
    assert read_launch() == Launch()
    for name, text in zip(VARIABLES, "39267", strict=True):
        monkeypatch.setenv(name, text)
    for name, text in (("TORCHELASTIC_RUN_ID", "job"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, text)
    assert read_launch() == Launch(3, 9, 2, 6, 7, is_launched=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("RANK= WORLD_SIZE= LOCAL_RANK= MASTER_ADDR= MASTER_PORT= TORCHELASTIC_RUN_ID=", ""),
        ("MASTER_ADDR=a MASTER_PORT=tcp://10.0.0.1:80", ""),  # of a Service of Kubernetes
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", ""),
        ("RANK=x", "RANK is 'x' in the environment; it should be a number: start with torchrun"),
        ("WORLD_SIZE=-2", "WORLD_SIZE is '-2'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=tcp://a:80", "MASTER_PORT is 'tcp://a:80'"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2, but no RANK, MASTER_ADDR, MASTER_PORT: start with torchrun, .* or unset RANK"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=", "RANK=0, WORLD_SIZE=2, but no MASTER_PORT"),
        ("RANK=1", "RANK=1, which do not fit 1 processes"),
        ("LOCAL_RANK=3", "LOCAL_RANK=3, which do not fit"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK=2, WORLD_SIZE=2, which do not fit"),
        ("WORLD_SIZE=0", "WORLD_SIZE=0, but no RANK"),
        ("LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0, which do not fit"),
    ],
)
def test_launch_variables_left_over_are_one_line(monkeypatch, capsys, given, message):
    for word in given.split():
        monkeypatch.setenv(*word.split("=", 1))
    if not message:
        assert read_launch() == Launch()
        return
    with pytest.raises(SystemExit) as stop, exit_with_message():
        pytest.fail("it went on")
    assert stop.value.code == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


def test_launch_tasks_of_srun_without_torchrun_are_refused(monkeypatch):
    for variables in ({"SLURM_NTASKS": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": ""}):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        check_alone()  # a script of sbatch, the shell of salloc, a single task
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(SharedError, match=r"srun started 4 tasks, .* torchrun once on each node .*launch/slurm.sh"):
        check_alone()
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(SystemExit, match="2"):
        check_alone()
    monkeypatch.setenv("WORLD_SIZE", "4")  # of torchrun, or of a script that sets all
    check_alone()


def test_launch_prints_what_terminals_obey_as_text(capsys):
    say("a\nb\x1b[31m\x07\rc\udcfc\x9b é")
    with pytest.raises(SystemExit), exit_with_message():
        raise SharedError("\x1b]0;title\x07")
    assert capsys.readouterr() == ("a\nb\\x1b[31m\\x07\\x0dc\\xfc\\x9b é\n", "error: \\x1b]0;title\\x07\n")


ASCII = """
import sys
from fastgpu.process.launch import SharedError, exit_with_message, say
with exit_with_message():
    say(f"ü {sys.argv[1]}")
    print("ü")
    raise SharedError("ü")
"""


def test_launch_output_that_cannot_encode_ends_nothing(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with start_python(ASCII, os.fsdecode(b"\xfc.h5")) as process:
        printed = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, printed) == (2, ("\\xfc \\xfc.h5\n\\xfc\n", "error: \\xfc\n"))


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SharedError("too many"), 2, "error: too many\n"),
        (UserError("my disk is gone"), 2, "error: [rank {rank}] my disk is gone\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_launch_shows_one_message_per_failure(monkeypatch, capsys, slept, error, code, message):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    for local_rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("RANK", str(local_rank + 2))
        with pytest.raises(SystemExit) as stop, exit_with_message():
            raise error
        assert stop.value.code == code
        speaks = local_rank == 0 or type(error) is UserError
        assert capsys.readouterr().err == (message.format(rank=local_rank + 2) if speaks else "")
        # torchrun ends all ranks with the first that ends: they wait until that one has printed its message
        assert slept == ([] if speaks or code == 130 else [launch_module.EXIT_DELAY_S])
    with pytest.raises(ZeroDivisionError), exit_with_message():  # a bug keeps its traceback
        raise ZeroDivisionError


def test_launch_rank_of_a_dead_torchrun_ends(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.create_server(("localhost", 0)) as store:
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        check_parent()
    with pytest.raises(UserError, match="torchrun, which started this process, has ended"):
        check_parent()


HANGS = """
from threading import Event, Thread
from h5py._objects import phil
from fastgpu.process.launch import HangError, exit_with_message
is_stuck = Event()
Thread(target=lambda: (phil.acquire(), is_stuck.set(), Event().wait()), daemon=True).start()
is_stuck.wait()
print("a line")
with exit_with_message():
    raise HangError("no rows have come")
"""
ORPHAN = """
import os, time
from fastgpu.process.launch import exit_with_message
if os.fork():
    time.sleep(600)
os.environ["TORCHELASTIC_RUN_ID"] = "job"
with exit_with_message():
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


INTERRUPTED = """
import os, signal, sys
from contextlib import suppress
from fastgpu.process.launch import exit_with_message
with exit_with_message():
    pass
if sys.argv[1] == "import":
    with suppress(BaseException):  # as a module does that tries to import another one
        os.kill(os.getpid(), signal.SIGINT)
with exit_with_message():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print("tidied up")
"""


@pytest.mark.parametrize(("when", "printed"), [("import", ""), ("later", "tidied up\n")])
def test_launch_interrupt_is_one_line(when, printed):
    with start_python(INTERRUPTED, when) as process:
        output = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (130, (printed, "\ninterrupted\n"))


def test_launch_thread_with_the_hdf5_lock_does_not_block_exit():
    with start_python(HANGS) as process:
        printed = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, printed) == (2, ("a line\n", "error: no rows have come\n"))


@pytest.mark.skipif(not psutil.LINUX, reason="a call of Linux")
def test_launch_orphan_ends():
    with start_python(ORPHAN) as launcher:
        orphan = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        orphan.wait(TIMEOUT_S)


SHOWN = {
    "s3://b/part-?.h5::/train": "s3://b/part-?.h5::/train",
    "https://h/x.h5?sig=a%2Fb&c=1::/train": "https://h/x.h5?...::/train",
    "HTTP://h/x.h5?...": "HTTP://h/x.h5?...",
    "data.train=[https://h/x.h5?a=1,https://h/y.h5?b=2]": "data.train=[https://h/x.h5?...,https://h/y.h5?...",
    "{'https://h/x.h5?a=1': 2}": "{'https://h/x.h5?...': 2}",
    "  https://h/x.h5?a=1: 2.0": "  https://h/x.h5?...: 2.0",
    r'["https://h/x.h5?a=\"b", "https://me@h/x?y\\"]': r'["https://h/x.h5?...\"b", "https://h/x?...\\"]',
    "s3://key:top/secret@b/x.h5 of http://me@h/x": "s3://b/x.h5 of http://h/x",
    "http://h:8080/a@b/x.h5": "http://h:8080/a@b/x.h5",
    "http://alice:pw@h/x.h5": "http://h/x.h5",
    "abfss://files@account.dfs.core.windows.net/x": "abfss://files@account.dfs.core.windows.net/x",
    "is it? see https://h/docs": "is it? see https://h/docs",
}


@pytest.mark.parametrize("text", SHOWN)
def test_launch_shows_no_secret_of_a_url(capfd, text):
    assert without_secrets(text) == SHOWN[text] == without_secrets(SHOWN[text])
    say(text)
    assert capfd.readouterr().out == f"{SHOWN[text]}\n"
