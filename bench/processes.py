"""Contenders in processes of their own, as the benchmarks see them, and control of the page cache of the kernel."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from data import DataSpec
from peers import is_peer
from publish import FailedError

HERE = Path(__file__).parent
PEERS_PYTHON = HERE / ".venv-peers" / "bin" / "python"
READ_BYTES = 8 << 20
"""Size of a read of the sequential limit: large enough that the disk limits the speed, not the system calls."""


class Process(AbstractContextManager["Process"]):
    """A contender in a process group of its own, which always ends with the `with` block of this object.

    The group is stopped (SIGSTOP) while it has no command, because some peers keep prefetching or spinning while others
    are measured.
    """

    def __init__(self, name: str, spec: DataSpec, n_workers: int) -> None:
        """Start the process. The first command makes the contender itself. Raises FailedError without the peers."""
        if is_peer(name) and not PEERS_PYTHON.exists():
            raise FailedError("not installable: bench/.venv-peers is not there; make bench-peers makes it")
        self.log = spec.folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        python = str(PEERS_PYTHON) if is_peer(name) else sys.executable
        args = [name, spec.h5, spec.folder, spec.batch_size, n_workers]
        with self.log.open("w") as log:
            command = [python, HERE / "worker.py", *map(str, args)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.popen = subprocess.Popen(command, **pipes, start_new_session=True, text=True)

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send one command and return its answer. Raises FailedError."""
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps({"do": do, **values}), file=self.popen.stdin, flush=True)
        line = self.popen.stdout.readline()
        if not line:
            status = self.popen.wait()
            *_, last = ["no output", *self.log.read_text(errors="replace").splitlines()]
            raise FailedError(f"failed: it ended with status {status}: {last[:150]}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            reason = "not installable" if answer["absent"] else "failed"
            raise FailedError(" ".join(f"{reason}: {answer['error']}".split())[:200])
        return answer

    def __exit__(self, *error: object) -> None:
        """End the process and everything that it started."""
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


@contextmanager
def kept_warm(paths: Iterable[str | Path]) -> Iterator[None]:
    """Read the files into the page cache and lock them there: the host of a virtual machine may reclaim it any time.

    If so much memory must not be locked (RLIMIT_MEMLOCK), the files have at least just been read.
    """
    libc = ctypes.CDLL(None)
    mappings = []
    for path in paths:
        read_through(path)
        mappings.append(np.memmap(path, np.uint8, "r"))
        libc.mlock(ctypes.c_void_p(mappings[-1].ctypes.data), ctypes.c_size_t(len(mappings[-1])))
    yield
    mappings.clear()  # the end of a mapping unlocks it


def make_cold(paths: Iterable[str | Path]) -> float:
    """Drop the files from the page cache. Returns the share of their bytes that stayed in it.

    Pages that a process has mapped and touched stay. Caches of the host below a virtual machine are out of reach.
    """
    os.sync()
    files = [Path(path) for path in paths]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_bytes(files) / max(1, sum(path.stat().st_size for path in files))


def cached_bytes(paths: list[Path]) -> int:
    """Bytes of the files that are in memory, in whole pages."""
    command = ["fincore", "--bytes", "--noheadings", "--output=RES", *paths]
    return sum(map(int, subprocess.check_output(command).split())) if paths else 0


def read_through(path: str | Path) -> float:
    """Seconds that it takes to read the file from beginning to end: the limit for cold files."""
    buffer = bytearray(READ_BYTES)
    t0 = time.perf_counter()
    with Path(path).open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - t0
