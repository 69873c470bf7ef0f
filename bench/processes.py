"""Contenders in processes of their own, as the benchmarks see them, and control of the page cache of the kernel."""

import ctypes
import json
import mmap
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from data import DataSpec
from publish import FailedError

HERE = Path(__file__).parent
PEERS_PYTHON = HERE / ".venv-peers" / "bin" / "python"
GRACE_S = 5
"""Seconds that a worker has to end by itself."""
READ_BYTES = 8 << 20
"""Size of a read of the sequential limit: large enough that the disk limits the speed, not the system calls."""


class Process:
    """A contender in a process group of its own, which always ends with the `with` block of this object.

    The group is stopped (SIGSTOP) while it has no command, because some peers keep prefetching or spinning while others
    are measured.
    """

    def __init__(self, name: str, spec: DataSpec, *, n_workers: int, is_peer: bool) -> None:
        """Start the process. The first command makes the contender itself. Raises FailedError without the peers."""
        if is_peer and not PEERS_PYTHON.exists():
            raise FailedError("not installable: bench/.venv-peers is not there; make bench-peers makes it")
        self.log = spec.folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        python = str(PEERS_PYTHON) if is_peer else sys.executable
        seed = 0
        args = [name, spec.h5, spec.folder, spec.batch_size, n_workers, seed]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [python, HERE / "worker.py", *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, do: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Send one command and return its answer. Raises FailedError."""
        self._signal(signal.SIGCONT)
        try:
            self.popen.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise FailedError(self._last_words()) from None
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.close(0)
                raise FailedError(f"no answer to {do!r} in {timeout_s:.0f} s")
        line = self.popen.stdout.readline()
        self._signal(signal.SIGSTOP)
        if not line:
            raise FailedError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            reason = "not installable" if answer["absent"] else "failed"
            raise FailedError(" ".join(f"{reason}: {answer['error']}".split())[:200])
        return answer

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE_S)
        return f"failed: it ended with status {self.popen.poll()}, see {self.log.name}"

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(0 if kind else GRACE_S)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process and everything that it started. It is safe to call this twice."""
        if self.popen.stdout.closed:
            return
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.popen.stdin.close()  # the worker ends when there are no more commands
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(grace_s)
        self._signal(signal.SIGKILL)  # for children that it left behind, or for the worker itself
        self.popen.wait()
        self.popen.stdout.close()

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
    for path in map(Path, paths):
        read_through(path)
        if path.stat().st_size:
            mapped = np.memmap(path, np.uint8, "r")
            libc.mlock(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped)))
            mappings.append(mapped)
            del mapped  # `mappings` alone keeps it
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
    return sum(map(cached_bytes, files)) / max(1, sum(path.stat().st_size for path in files))


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in memory, by mincore(2). It writes a byte for each page; the lowest bit says so."""
    if not path.stat().st_size:
        return 0
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    address = ctypes.c_void_p(mapped.ctypes.data)
    if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(f"mincore fails for {path}")
    return int((pages & 1).sum()) * mmap.PAGESIZE


def read_through(path: Path) -> float:
    """Seconds that it takes to read the file from beginning to end: the limit for cold files."""
    buffer = bytearray(READ_BYTES)
    t0 = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - t0
