import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Timer

import pytest

from fastgpu.process import lock
from fastgpu.process.launch import UserError
from fastgpu.process.lock import FILE_BYTES, NAME, FolderLock

ROOT = Path(__file__).parents[3] / "{{cookiecutter.project_slug}}"
HOLD = """
import os, sys, time
from pathlib import Path
from fastgpu.process.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def hold(folder: Path, how: str = "alone") -> Iterator[int]:
    """The pid of a process that took the lock; with `fork`, of its child, which has outlived it."""
    command = [sys.executable, "-c", HOLD, str(folder), how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def held_elsewhere(folder: Path, beat: int = 1, host: str = "another-machine", kernel: str = "another") -> None:
    holder = json.dumps([7, host, kernel, "2026-01-01 00:00:00", beat])
    (folder / NAME).write_bytes(holder.encode().ljust(FILE_BYTES))


def test_a_second_process_is_refused_and_told_whom_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_S", 0.3)
    with hold(tmp_path) as pid, pytest.raises(UserError) as error:
        FolderLock(tmp_path)
    assert f"{tmp_path} is in use by process {pid} on {socket.gethostname()} since 2" in str(error.value)
    FolderLock(tmp_path).close()  # the kernel released the lock


def test_a_lock_is_waited_for_a_little(tmp_path):
    with hold(tmp_path) as pid:
        Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        FolderLock(tmp_path).close()


def test_a_child_does_not_keep_the_lock_of_a_dead_process(tmp_path):
    with hold(tmp_path, "fork"):
        FolderLock(tmp_path).close()


def test_a_closed_lock_can_be_taken_at_once(tmp_path):
    FolderLock(tmp_path).close()
    assert (tmp_path / NAME).read_bytes() == b""
    FolderLock(tmp_path).close()


def test_a_silent_holder_on_another_machine_is_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SILENT_S", 0.5)
    held_elsewhere(tmp_path)
    FolderLock(tmp_path).close()


def test_a_holder_on_another_machine_that_goes_on_is_alive(tmp_path, monkeypatch):
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        held_elsewhere(tmp_path, beat=2)

    monkeypatch.setattr(time, "sleep", sleep)
    held_elsewhere(tmp_path)
    with pytest.raises(UserError, match="process 7 on another-machine"):
        FolderLock(tmp_path)
    assert waits


def test_the_kernel_tells_machines_apart_not_their_names(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(lock, "SILENT_S", 0.1)
    held_elsewhere(tmp_path, kernel=lock._kernel())  # another container of this machine
    FolderLock(tmp_path).close()
    assert not waits
    held_elsewhere(tmp_path, host=socket.gethostname())  # another machine with the same name
    FolderLock(tmp_path).close()
    assert waits


def test_a_lock_that_is_released_elsewhere_can_be_taken_at_once(tmp_path, monkeypatch):
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / NAME).write_bytes(b"")

    monkeypatch.setattr(time, "sleep", sleep)
    held_elsewhere(tmp_path)
    FolderLock(tmp_path).close()
    assert len(waits) == 1


def test_a_holder_that_was_taken_for_dead_ends_at_once(tmp_path, monkeypatch, capfd):
    ended = Event()

    def end(code: int) -> None:
        assert code == 2
        ended.set()
        raise OSError("the thread goes on, since the process does not end")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    held = FolderLock(tmp_path)
    held_elsewhere(tmp_path)
    assert ended.wait(60)
    held.close()
    assert f"error: {tmp_path} is in use by process 7 on another-machine since 2026" in capfd.readouterr().err


def test_the_holder_changes_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    held = FolderLock(tmp_path)
    first = (tmp_path / NAME).read_bytes()
    deadline = time.monotonic() + 60
    while (tmp_path / NAME).read_bytes() == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.close()
