import subprocess
import sys

import pytest
from harness import ROOT, TIMEOUT_S

from fastgpu.process import launch as launch_module
from fastgpu.process.launch import (
    Launch,
    RankError,
    UserError,
    exit_with_message,
    read_launch,
    warn,
)


def test_launch_reads_the_values_that_torchrun_sets(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == Launch()
    for number, name in enumerate(names, 3):
        monkeypatch.setenv(name, str(number))
    assert read_launch() == Launch(3, 4, 5, 6, 7)


@pytest.mark.parametrize(("local_rank", "message"), [(0, "error: too many\n"), (1, "")])
def test_a_user_error_is_one_line_for_a_machine_and_the_same_exit_code_on_every_rank(
    monkeypatch, capsys, local_rank, message
):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(SystemExit) as stop, exit_with_message():
        raise UserError("too many")
    assert stop.value.code == 2
    assert capsys.readouterr().err == message


def test_under_torchrun_the_first_rank_ends_first_so_that_its_message_is_seen(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(launch_module.time, "sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    for local_rank in (0, 1):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        with pytest.raises(SystemExit), exit_with_message():
            raise UserError("too many")
    assert slept == [launch_module.SPEAKER_S]
    assert capsys.readouterr().err == "error: too many\n"


def test_an_error_of_one_rank_is_printed_by_that_rank(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit) as stop, exit_with_message():
        raise RankError("my disk is gone")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: my disk is gone\n"


def test_an_interruption_has_no_traceback(capsys):
    with pytest.raises(SystemExit) as stop, exit_with_message():
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert "run.resume=auto" in capsys.readouterr().err


def test_a_message_does_not_repeat_a_whole_file(capsys):
    with pytest.raises(SystemExit), exit_with_message():
        raise UserError(f"x.csv:2: {'a' * 10**6} is no number\nx.csv:3: is empty")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: x.csv:2: aaa")
    assert len(first) < 1100
    assert second == "x.csv:3: is empty"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), exit_with_message():
        raise ZeroDivisionError


def test_a_warning_is_printed_once_for_the_whole_job(monkeypatch, capsys):
    printed = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        warn("the file is sorted")
        printed.append(capsys.readouterr().out)
    assert printed == ["warning: the file is sorted\n", "", "", ""]


def test_a_plain_process_prints_its_warnings(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    warn("the file is sorted")
    assert capsys.readouterr().out == "warning: the file is sorted\n"


HANGS = """
import atexit, threading
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
atexit.register(print, "report written")
with exit_with_message():
    raise HangError("no rows have come")
"""


def test_a_thread_that_holds_the_lock_of_hdf5_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "report written\n", "error: no rows have come\n")
