import os
import signal
import socket

import pytest
from harness import start_python

from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from fastgpu.process.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if child := os.fork():
    print(child, flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_and_a_child_does_not_keep_the_lock_of_a_dead_one(tmp_path):
    with start_python(HOLD, tmp_path) as holder:
        child = int(holder.stdout.readline())
        who = f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since 2"
        try:
            with pytest.raises(UserError, match=who):
                FolderLock(tmp_path)
            holder.kill()
            holder.wait()
            FolderLock(tmp_path).close()  # the kernel released the lock, at once
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)  # which has lived until here
