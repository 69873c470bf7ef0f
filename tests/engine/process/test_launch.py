import subprocess
import sys

import pytest
from harness import ROOT, TIMEOUT_S

from fastgpu.process import launch as launch_module
from fastgpu.process.launch import Launch, RankError, UserError, exit_with_message, read_launch, warn

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def slept(monkeypatch) -> list[float]:
    """Where this process was started without torchrun: the seconds that it has slept."""
    slept: list[float] = []
    monkeypatch.setattr(launch_module.time, "sleep", slept.append)
    monkeypatch.setattr(launch_module, "end_with_parent", lambda: None)
    for name in (*VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return slept


def ends_with(error: BaseException) -> int:
    """The exit code that an error becomes."""
    with pytest.raises(SystemExit) as stop, exit_with_message():
        raise error
    return stop.value.code


def test_launch_reads_the_values_that_torchrun_sets(monkeypatch):
    assert read_launch() == Launch()
    for number, name in enumerate(VARIABLES, 3):
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert read_launch() == Launch(3, 4, 5, 6, 7, is_launched=True)


@pytest.mark.parametrize(
    ("error", "code", "first", "other"),
    [
        (UserError("too many"), 2, "error: too many\n", ""),
        (RankError("my disk is gone"), 2, "error: my disk is gone\n", "error: my disk is gone\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n", ""),
    ],
)
def test_a_person_sees_one_message_of_a_machine_or_that_of_the_rank_that_alone_failed(
    monkeypatch, capsys, error, code, first, other
):
    for local_rank, message in enumerate((first, other)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert ends_with(error) == code
        assert capsys.readouterr().err == message


def test_under_torchrun_the_first_rank_ends_first_so_that_its_message_is_seen(monkeypatch, slept):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    ends_with(UserError("too many"))
    assert slept == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    ends_with(UserError("too many"))
    assert slept == [launch_module.SPEAKER_S]


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), exit_with_message():
        raise ZeroDivisionError


def test_a_warning_is_printed_once_for_the_whole_job(monkeypatch, capsys):
    warn("the file is sorted")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        warn("the file is sorted")
    assert capsys.readouterr().out == 2 * "warning: the file is sorted\n"  # of a plain process and of rank 0


HANGS = """
import threading
import h5py
from h5py._objects import phil
from fastgpu.process.launch import HangError, exit_with_message

file = h5py.File("rows.h5", "w", driver="core", backing_store=False)
def hang():
    phil.acquire()
    is_stuck.set()
    threading.Event().wait()
is_stuck = threading.Event()
threading.Thread(target=hang, daemon=True).start()
is_stuck.wait()
print("a line")
with exit_with_message():
    raise HangError("no rows have come")
"""


def test_a_thread_that_holds_the_lock_of_hdf5_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "a line\n", "error: no rows have come\n")
