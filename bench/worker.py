"""One contender in a process of its own: commands come as JSON lines on stdin, answers go as JSON lines to stdout.

bench/processes.py starts it, by this environment's Python or by the peers'. It sleeps while others are measured.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import peers
import psutil

Stream = Iterator[Any]  # batches, and None where an epoch ends


def endless(contender: Any) -> Stream:
    """All epochs in one stream, so that a pause between two measures costs no restart in the midst of an epoch."""
    for number in count():
        yield from contender.epoch(number)
        yield None


def paced(stream: Stream, step_s: float) -> Stream:
    """The same stream in front of a device that is busy for `step_s` with each batch, and has no other work.

    A step begins when the one before has ended and its batch is there. While it runs, the host asks for the next batch,
    and then sleeps until it can begin, as a host does that has queued one step behind the running one: the CPU is left
    to the loader, and to wake up a little late costs the device nothing.
    """
    end = 0.0
    for batch in stream:
        if batch is not None:
            begin = max(time.perf_counter(), end)
            while (left := begin - time.perf_counter()) > 0:
                time.sleep(left)
            end = begin + step_s
        yield batch


def advance(stream: Stream, least_s: float, cap_s: float) -> int:
    """Rows that come until the first end of an epoch after `least_s`, or until `cap_s` are over."""
    t0, rows = time.perf_counter(), 0
    for batch in stream:
        now_s = time.perf_counter() - t0
        if batch is not None:
            rows += len(batch[1])
        if now_s >= cap_s or (batch is None and now_s >= least_s):
            break
    return rows


def run(stream: Stream, lead_s: list[float] | None, span_s: list[float], step_s: float) -> dict[str, float]:
    """Rows in a span of time, after a lead-in (if any) which uses up what was prefetched while others were measured.

    lead_s, span_s: (at least, at most) seconds; between the two they end with an epoch.
    """
    stream = paced(stream, step_s) if step_s else stream
    if lead_s:
        advance(stream, *lead_s)
    cpu_s, t0 = _cpu_s(), time.perf_counter()
    rows = advance(stream, *span_s)
    seconds = time.perf_counter() - t0
    return {"rows": rows, "seconds": seconds, "cpu_s": _cpu_s() - cpu_s, "memory_bytes": _memory_bytes()}


def check(stream: Stream, shape: tuple[int, ...], cap_s: float) -> dict[str, int]:
    """One epoch: are these rows of the file, whole in name and label, and none of them twice? Raises ValueError."""
    t0, seen = time.perf_counter(), np.zeros(shape[0], bool)
    for batch in stream:
        if batch is None or time.perf_counter() - t0 > cap_s:
            break
        images, labels = np.asarray(batch[0]), np.asarray(batch[1])
        if images.dtype != np.uint8 or images.shape != (len(labels), *shape[1:]):
            raise ValueError(f"a batch is {images.dtype} {images.shape}")
        numbers = np.ascontiguousarray(images.reshape(len(images), -1)[:, :4]).view("<u4")[:, 0]
        if not np.array_equal(numbers, labels):
            raise ValueError("an image came with another one's label")
        if seen[numbers].any() or len(np.unique(numbers)) < len(numbers):
            raise ValueError("a row came twice in an epoch")
        seen[numbers] = True
    if not seen.any():
        raise ValueError("the epoch had no rows")
    return {"checked_rows": int(seen.sum())}


def _tree() -> Iterator[psutil.Process]:
    me = psutil.Process()
    yield me
    yield from me.children(recursive=True)


def _cpu_s() -> float:
    """CPU seconds of this process and all its descendants, those that have ended among them."""
    total = 0.0
    for process in _tree():
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
        except psutil.NoSuchProcess:
            continue
    return total


def _memory_bytes() -> int:
    """Anonymous and shared memory of this process and its descendants, shared pages split among them.

    Pages of mapped files are left out: they are the page cache, and go when somebody needs the room.
    """
    total = 0
    for process in _tree():
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (OSError, psutil.NoSuchProcess):
            continue
        found = {name: value for name, _, value in (line.partition(":") for line in lines)}
        total += sum(int(found[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))
    return total


class Worker:
    """The commands."""

    def __init__(self, name: str, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        if name in peers.PEERS:
            make = peers.PEERS[name]
        else:
            from contenders import CONTENDERS

            make = CONTENDERS[name]
        self.shape = peers.shape_of(h5)
        self.imports_bytes = _memory_bytes()
        self.contender = make(h5, folder, batch_size, workers, seed)
        self.stream = endless(self.contender)

    def files(self) -> dict[str, Any]:
        return {"files": [str(path) for path in self.contender.files()]}

    def check(self, cap_s: float) -> dict[str, int]:
        return check(self.stream, self.shape, cap_s)

    def run(self, lead_s: list[float] | None, span_s: list[float], step_s: float) -> dict[str, float]:
        return run(self.stream, lead_s, span_s, step_s)

    def memory(self) -> dict[str, int]:
        """Bytes now, before the contender was made, and of the buffers that it was told to have."""
        buffers = getattr(self.contender, "buffer_bytes", 0)
        return {"now": _memory_bytes(), "imports": self.imports_bytes, "buffers": buffers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("h5", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("batch_rows", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            worker = worker or Worker(**vars(arguments))
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "absent": isinstance(error, ImportError)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
