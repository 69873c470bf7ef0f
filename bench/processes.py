"""Contenders in processes of their own, seen from the runner; and the page cache, which the kernel keeps for all."""

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
from data import Rows

HERE = Path(__file__).parent
PEERS_PYTHON = HERE / ".venv-peers" / "bin" / "python"
GRACE_S = 5  # for a worker to end by itself
READ_BYTES = 8 << 20  # a read of the sequential limit: large enough that the disk, not the calls, decides


class ContenderError(Exception):
    """A contender is out: it crashed, hung, delivered wrong rows or is not there. The message is for the table."""


class Process:
    """A contender in a process group of its own, which ends with this object's `with` block, whatever happens.

    It is stopped (SIGSTOP) while it has no command: some peers go on prefetching, or spin, while others are measured.
    """

    def __init__(self, name: str, data: Rows, workers: int, is_peer: bool, seed: int = 0) -> None:
        """Starts it; the contender itself is made by the first command."""
        self.name = name
        self.log = data.folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        python = str(PEERS_PYTHON) if is_peer else sys.executable
        values = [name, data.h5, data.folder, data.batch_size, workers, seed]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, HERE / "worker.py", *map(str, values)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, do: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """One command and its answer. Raises ContenderError."""
        commands, answers = _pipes(self.process)
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
            raise ContenderError(("not installable: " if answer["absent"] else "failed: ") + _one_line(answer["error"]))
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing in its log")
        return _one_line(f"failed: it ended with status {self.process.poll()}: {last}")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(0 if kind else GRACE_S)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End it and all that it started; safe to call twice."""
        commands, answers = _pipes(self.process)
        if answers.closed:
            return
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            commands.close()  # the worker's loop over its commands ends, and so does it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self._signal(signal.SIGKILL)  # what it left behind, or itself
        self.process.wait()
        answers.close()

    def _signal(self, number: signal.Signals) -> None:
        """To it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin
    assert process.stdout
    return process.stdin, process.stdout


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


@contextlib.contextmanager
def kept_warm(paths: Iterable[str | Path]) -> Iterator[None]:
    """The files lie in the page cache, and are held there: a virtual machine's host may take it away at any time.

    Where that much memory must not be locked (RLIMIT_MEMLOCK), they have at least just been read.
    """
    libc, held = ctypes.CDLL(None), []
    for path in map(Path, paths):
        sum(map(len, _pieces(path)))
        if path.stat().st_size:
            with path.open("rb") as file:
                held.append(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8))
            libc.mlock(ctypes.c_void_p(held[-1].ctypes.data), ctypes.c_size_t(len(held[-1])))
    yield
    held.clear()  # the end of a mapping unlocks it


def make_cold(paths: Iterable[str | Path]) -> float:
    """Drop the files from the page cache; the fraction of their bytes that is in it all the same.

    Pages that some process has mapped and touched stay. What a host keeps below a virtual machine is out of reach.
    """
    os.sync()
    files = [Path(path) for path in paths]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(map(_resident_bytes, files)) / max(1, sum(path.stat().st_size for path in files))


def sequential_bytes_per_s(path: Path) -> float:
    """The cold limit: the file read from its beginning to its end, the bytes thrown away."""
    t0 = time.perf_counter()
    n_bytes = sum(map(len, _pieces(path)))
    return n_bytes / (time.perf_counter() - t0)


def _pieces(path: Path) -> Iterator[memoryview]:
    """The file in order, through one buffer."""
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        offset = 0
        while n := os.preadv(file.fileno(), [buffer], offset):
            yield buffer[:n]
            offset += n


def _resident_bytes(path: Path) -> int:
    """mincore(2) over a mapping of the file: a byte a page, whose lowest bit says that it is in memory."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        place = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data))
        if libc.mincore(*place):
            raise OSError(ctypes.get_errno(), "mincore")
        del view  # it holds the mapping
        return int((pages & 1).sum()) * mmap.PAGESIZE
