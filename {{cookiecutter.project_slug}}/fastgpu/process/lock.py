"""One writer for each folder: a lock on a file in it, which the kernel releases, whatever ends the process."""

import fcntl
import os
import socket
import time
from pathlib import Path

from fastgpu.process.launch import UserError

NAME = "lock"
PATIENCE_S = 8.0
"""How long to wait for a lock: ranks outlive a launcher that was killed by a few seconds (see signals.py)."""
POLL_S = 0.2
MAX_BYTES = 512


class FolderLock:
    """The lock of a folder. Raises UserError if another process holds it, and OSError if the disk refuses.

    It is a POSIX record lock. Worker processes, which are forks, would inherit one of `flock` and keep it alive.
    """

    def __init__(self, folder: Path):
        until = time.monotonic() + PATIENCE_S
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            while not self._try():
                if time.monotonic() > until:
                    holder = os.pread(self._descriptor, MAX_BYTES, 0).decode(errors="replace") or "another process"
                    raise UserError(f"{folder} is in use by {holder}; stop it, or use another run.name")
                time.sleep(POLL_S)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
