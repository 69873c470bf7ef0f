import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import ROOT

from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from fastgpu.process.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
parent = os.getpid()
if sys.argv[2] == "fork":
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
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


def test_a_second_process_is_refused_and_told_whom_to_stop(tmp_path):
    with hold(tmp_path) as pid, pytest.raises(UserError) as error:
        FolderLock(tmp_path)
    assert f"{tmp_path} is in use by process {pid} on {socket.gethostname()} since 2" in str(error.value)
    FolderLock(tmp_path).close()  # the kernel released the lock


def test_a_child_does_not_keep_the_lock_of_a_dead_process(tmp_path):
    with hold(tmp_path, "fork"):
        FolderLock(tmp_path).close()
