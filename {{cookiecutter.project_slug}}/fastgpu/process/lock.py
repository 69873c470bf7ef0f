"""One writer for each folder: a lock on a file in it, held as long as the process lives.

The kernel releases the lock, whatever ends the process. Some network file systems do not pass locks on to other
machines. So the holder also changes the file every few seconds, and a process on another machine waits to see that.
"""

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fastgpu.process.launch import UserError

NAME = "lock"
BEAT_S = 5.0
SILENT_S = 15.0
"""A holder on another machine that has not changed the file for this long is taken for dead."""
PATIENCE_S = 8.0
"""How long to wait for a lock: ranks outlive a launcher that was killed by a few seconds (see signals.py)."""
POLL_S = 0.2
FILE_BYTES = 512
"""The file always has this length: it is overwritten in place, so a reader never finds it empty."""


class Holder(NamedTuple):
    """Who holds a lock, as the file says it."""

    pid: int
    host: str
    since: str
    beat: int
    """How often the holder has changed the file."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class InUseError(UserError):
    """Another process holds the lock of a folder."""

    def __init__(self, folder: Path, holder: Holder | None):
        self.holder = str(holder or "another process")
        super().__init__(f"{folder} is in use by {self.holder}; stop it, or use another run.name")


class FolderLock:
    """The lock of a folder. Raises InUseError if another process holds it, and OSError if the disk refuses.

    It is a POSIX record lock. Worker processes, which are forks, would inherit one of `flock` and keep it alive.
    """

    def __init__(self, folder: Path, patience_s: float | None = None):
        """patience_s: how long to wait for another process; None: PATIENCE_S."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire(folder)
            self._holder = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"), 0)
            self._beat()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the lock. The file is left empty, so a process on another machine need not wait."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._thread.join()
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)

    def _acquire(self, folder: Path) -> None:
        until = time.monotonic() + self._patience_s
        while not self._try():
            if time.monotonic() > until:
                raise InUseError(folder, self._read())
            time.sleep(POLL_S)
        last = self._read()
        if last is None or last.host == socket.gethostname():
            return  # on this machine, the kernel is the one to ask
        until = time.monotonic() + SILENT_S
        while time.monotonic() < until:
            time.sleep(POLL_S)
            if self._read() != last:
                raise InUseError(folder, last)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._descriptor).st_nlink > 0  # its holder may have removed it meanwhile, with the folder

    def _read(self) -> Holder | None:
        try:
            return Holder(*json.loads(os.pread(self._descriptor, FILE_BYTES, 0)))
        except (ValueError, TypeError):  # empty: released in order
            return None

    def _beat(self) -> None:
        self._holder = self._holder._replace(beat=self._holder.beat + 1)
        os.pwrite(self._descriptor, json.dumps(self._holder).encode().ljust(FILE_BYTES), 0)

    def _keep_beating(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            with suppress(OSError):  # a disk that is full or away for a moment
                self._beat()
