"""Contenders in processes of their own, as the runner sees them, and control of the page cache of the kernel."""

import contextlib
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
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from data import DataSpec

HERE = Path(__file__).parent
PEERS_PYTHON = HERE / ".venv-peers" / "bin" / "python"
GRACE_S = 5
"""Seconds that a worker has to end by itself."""
READ_BYTES = 8 << 20
"""Size of a read of the sequential limit: large enough that the disk limits the speed, not the system calls."""


class ContenderError(Exception):
    """A contender crashed, hung, delivered wrong rows, or is not installed. The message goes into the table."""


class Process:
    """A contender in a process group of its own, which always ends with the `with` block of this object.

    The group is stopped (SIGSTOP) while it has no command, because some peers keep prefetching or spinning while others
    are measured.
    """

    def __init__(self, name: str, data: DataSpec, *, n_workers: int, is_peer: bool, seed: int = 0) -> None:
        """Start the process. The first command makes the contender itself."""
        self.name = name
        self.log = data.folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        python = str(PEERS_PYTHON) if is_peer else sys.executable
        args = [name, data.h5, data.folder, data.batch_size, n_workers, seed]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [python, HERE / "worker.py", *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, do: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Send one command and return its answer. Raises ContenderError."""
        commands, answers = _pipes(self.popen)
        self._signal(signal.SIGCONT)
        try:
            commands.write(json.dumps({"do": do, **values}).encode() + b"\n")
            commands.flush()
        except BrokenPipeError:
            raise ContenderError(self._last_words()) from None
        with selectors.DefaultSelector() as selector:
            selector.register(answers, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise ContenderError(f"no answer to {do!r} in {timeout_s:.0f} s")
        line = answers.readline()
        self._signal(signal.SIGSTOP)
        if not line:
            raise ContenderError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            reason = "not installable" if answer["absent"] else "failed"
            raise ContenderError(f"{reason}: {_one_line(answer['error'])}")
        return answer

    def _last_words(self) -> str:
        """How the process ended, and the last line of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        lines = self.log.read_text(errors="replace").split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "nothing in its log")
        return _one_line(f"failed: it ended with status {self.popen.poll()}: {last_line}")

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(0 if kind else GRACE_S)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process and everything that it started. It is safe to call this twice."""
        commands, answers = _pipes(self.popen)
        if answers.closed:
            return
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            commands.close()  # the worker ends when there are no more commands
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(grace_s)
        self._signal(signal.SIGKILL)  # for children that it left behind, or for the worker itself
        self.popen.wait()
        answers.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def _pipes(popen: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert popen.stdin
    assert popen.stdout
    return popen.stdin, popen.stdout


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


@contextlib.contextmanager
def kept_warm(paths: Iterable[str | Path]) -> Iterator[None]:
    """Read the files into the page cache and lock them there: the host of a virtual machine may reclaim it any time.

    If so much memory must not be locked (RLIMIT_MEMLOCK), the files have at least just been read.
    """
    libc = ctypes.CDLL(None)
    mappings = []
    for path in map(Path, paths):
        for _ in _pieces(path):
            pass
        if path.stat().st_size:
            with path.open("rb") as file:
                mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
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
    return sum(map(_resident_bytes, files)) / max(1, sum(path.stat().st_size for path in files))


def sequential_bytes_per_s(path: Path) -> float:
    """The limit for cold files: read the file from beginning to end and throw the bytes away."""
    t0 = time.perf_counter()
    n_bytes = sum(map(len, _pieces(path)))
    return n_bytes / (time.perf_counter() - t0)


def _pieces(path: Path) -> Iterator[memoryview]:
    """The bytes of the file in order, through one buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        offset = 0
        while n_bytes := os.preadv(file.fileno(), [buffer], offset):
            yield buffer[:n_bytes]
            offset += n_bytes


def _resident_bytes(path: Path) -> int:
    """Bytes of the file that are in memory, by mincore(2). It writes a byte for each page; the lowest bit says so."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(view.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        del view  # it keeps the file mapped
        return int((pages & 1).sum()) * mmap.PAGESIZE
