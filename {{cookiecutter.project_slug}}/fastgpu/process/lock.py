"""One writer for each folder: a lock on a file in it, held as long as the process lives.

The kernel releases the lock, whatever ends the process. Some network file systems do not pass locks on to other
machines. So the holder also changes the file every few seconds, and a process on another machine waits to see that.
"""

import fcntl
import json
import os
import socket
import sys
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
    kernel: str
    """Which running system. Hosts may have the same name, and containers of one host different names."""
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
        self._folder = folder
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        silent = _wait_for_silence(folder)
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self._acquire(silent)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._holder = Holder(os.getpid(), socket.gethostname(), _kernel(), since, 0)
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

    def _acquire(self, silent: Holder | None) -> None:
        until = time.monotonic() + self._patience_s
        while not self._try():
            if time.monotonic() > until:
                raise InUseError(self._folder, self._read())
            time.sleep(POLL_S)
        holder = self._read()
        if holder and holder != silent and holder.kernel != _kernel():  # it came while this process waited
            raise InUseError(self._folder, holder)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._descriptor).st_nlink > 0  # its holder may have removed it meanwhile, with the folder

    def _read(self) -> Holder | None:
        return _parse(os.pread(self._descriptor, FILE_BYTES, 0))

    def _beat(self) -> None:
        self._holder = self._holder._replace(beat=self._holder.beat + 1)
        os.pwrite(self._descriptor, json.dumps(self._holder).encode().ljust(FILE_BYTES), 0)
        os.fsync(self._descriptor)  # NFS may keep what is written to itself for half a minute

    def _keep_beating(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            with suppress(OSError):  # a disk that is full or away for a moment
                holder = self._read()
                if holder and holder[:3] == self._holder[:3] and holder != self._holder:
                    return  # a later lock of this process
                if holder and holder != self._holder:  # this process stood still, and was taken for dead
                    print(f"error: {InUseError(self._folder, holder)}", file=sys.stderr, flush=True)
                    os._exit(2)  # not one byte more into the run of another process
                self._beat()


def _wait_for_silence(folder: Path) -> Holder | None:
    """The process on another machine that held the lock last and is dead. Raises UserError if it is alive.

    On this machine, the kernel is the one to ask. The file is opened for each look, because NFS shows changes of other
    machines at opening only; so this comes before the lock, which closing the file would release.
    """
    last = _look(folder)
    until = time.monotonic() + SILENT_S
    while last and last.kernel != _kernel() and time.monotonic() < until:
        time.sleep(POLL_S)
        holder = _look(folder)
        if holder and holder != last:
            raise InUseError(folder, holder)
        last = holder
    return last


def _look(folder: Path) -> Holder | None:
    with suppress(FileNotFoundError):
        return _parse((folder / NAME).read_bytes())
    return None


def _parse(data: bytes) -> Holder | None:
    try:
        return Holder(*json.loads(data))
    except (ValueError, TypeError):  # empty: released in order
        return None


def _kernel() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
