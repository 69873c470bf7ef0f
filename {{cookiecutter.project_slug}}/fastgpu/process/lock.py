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


class InUseError(UserError):
    """Another process holds the lock of a folder."""

    def __init__(self, folder: Path, holder: str):
        self.holder = holder or "another process"
        super().__init__(f"{folder} is in use by {self.holder}; stop it, or use another run.name")


class FolderLock:
    """The lock of a folder. Raises InUseError if another process holds it, and OSError if the disk refuses.

    It is a POSIX record lock. Worker processes, which are forks, would inherit one of `flock` and keep it alive.
    """

    def __init__(self, folder: Path, patience_s: float | None = None):
        """patience_s: how long to wait for another process; None: PATIENCE_S."""
        until = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            while not self._try():
                if time.monotonic() > until:
                    raise InUseError(folder, os.pread(self._descriptor, MAX_BYTES, 0).decode(errors="replace"))
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
        return os.fstat(self._descriptor).st_nlink > 0  # its holder may have removed it meanwhile, with the folder
