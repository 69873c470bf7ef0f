"""One contender in a process of its own. Commands come as JSON lines on stdin, answers go as JSON lines to stdout.

processes.py starts it with the Python of this environment, or with that of the peers' environment. It is stopped while
others are measured.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import peers
import psutil

Stream = Iterator[Any]
"""Batches, and None where an epoch ends."""
MAX_S = 900
"""Longest time of a command. The first one makes the contender: a peer converts the file first."""


def endless(contender: peers.Contender) -> Stream:
    """All epochs in one stream, so that a pause between two measurements does not restart an epoch."""
    for number in count():
        yield from contender.epoch(number)
        yield None


def paced(stream: Stream, step_s: float) -> Stream:
    """The same stream in front of a device that is busy with each batch for `step_s` seconds and does nothing else.

    A step begins when the previous step has ended and its batch has arrived. During a step the host asks for the next
    batch and then sleeps until the next step can begin, like a host that has queued one step ahead. So the CPU is left
    to the loader, and waking up a little late costs the device nothing.
    """
    step_end = 0.0
    for batch in stream:
        if batch is not None:
            step_begin = max(time.perf_counter(), step_end)
            while (left_s := step_begin - time.perf_counter()) > 0:
                time.sleep(left_s)
            step_end = step_begin + step_s
        yield batch


def advance(stream: Stream, min_s: float, max_s: float) -> int:
    """Number of rows until the first end of an epoch after `min_s` seconds, but at the longest until `max_s`."""
    t0 = time.perf_counter()
    n_rows = 0
    for batch in stream:
        elapsed_s = time.perf_counter() - t0
        if batch is not None:
            n_rows += len(batch[0])
        if elapsed_s >= max_s or (batch is None and elapsed_s >= min_s):
            break
    return n_rows


def run(stream: Stream, lead_s: list[float] | None, span_s: list[float], step_s: float) -> dict[str, float]:
    """Count the rows in a span of time, after a lead-in that uses up what was prefetched while others were measured.

    lead_s, span_s: (minimum, maximum) seconds; between the two they end with an epoch. lead_s=None: no lead-in.
    step_s: seconds of a step of the simulated device. 0: no device.
    """
    if step_s:
        stream = paced(stream, step_s)
    if lead_s:
        advance(stream, *lead_s)
    cpu_before_s = cpu_s()
    t0 = time.perf_counter()
    n_rows = advance(stream, *span_s)
    seconds = time.perf_counter() - t0
    return {"rows": n_rows, "seconds": seconds, "cpu_s": cpu_s() - cpu_before_s, "memory_bytes": memory_bytes()}


def check(stream: Stream, shape: tuple[int, ...], max_s: float) -> dict[str, int]:
    """Check one epoch: each row is a row of the file, has its own label, and comes at most once.

    shape: (N, C, H, W) of the file. Raises ValueError if a batch is wrong.
    """
    t0 = time.perf_counter()
    seen = np.zeros(shape[0], bool)
    for batch in stream:
        if batch is None:
            break
        images, labels = map(np.asarray, batch)
        if images.dtype != np.uint8 or images.shape != (len(labels), *shape[1:]):
            raise ValueError(f"a batch is {images.dtype} {images.shape}")
        row_ids = np.ascontiguousarray(images.reshape(len(images), -1)[:, :4]).view("<u4")[:, 0]
        if not np.array_equal(row_ids, labels):
            raise ValueError("an image came with the label of another image")
        if seen[row_ids].any() or len(np.unique(row_ids)) < len(row_ids):
            raise ValueError("a row came twice in an epoch")
        seen[row_ids] = True
        if time.perf_counter() - t0 > max_s:
            break
    if not seen.any():
        raise ValueError("the epoch had no rows")
    return {"checked_rows": int(seen.sum())}


def cpu_s() -> float:
    """CPU seconds of this process and of all its descendants, including those that have ended."""
    process = psutil.Process()
    total_s = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total_s += sum(each.cpu_times()[:4])  # user, system, and both of the children that were waited for
    return total_s


def memory_bytes() -> int:
    """Bytes of memory that this process and its descendants have taken, without files in the page cache.

    What several of them share (pages since a fork, batches in shared memory) counts once.
    """
    process = psutil.Process()
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):
            sizes = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"(?m)^Pss_(?:Anon|Shmem): +(\d+) kB", sizes)))
    return total << 10


MODULES = ("peers", "jpegs", "contenders", "idle", "recsys", "windows")
"""Where contenders are. The peers' environment has the packages that the first two need, not those of the others."""


def find(name: str) -> Callable[[peers.Task], peers.Contender]:
    """What makes the contender of this name."""
    return next(make for module in MODULES if (make := import_module(module).CONTENDERS.get(name)))


def main() -> None:
    """Answer commands: "files", "check" with its `max_s`, and "run" with the arguments of `run`."""
    name, h5, folder, *numbers = sys.argv[1:]
    task = peers.Task(Path(h5), Path(folder), *map(int, numbers))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    contender = None
    for line in sys.stdin:
        signal.alarm(MAX_S)  # ends this process
        command = json.loads(line)
        do = command.pop("do")
        try:
            if not contender:
                contender = find(name)(task)
                stream = endless(contender)
            if do == "files":
                answer = {"files": [str(path) for path in contender.files]}
            elif do == "check":
                answer = check(stream, peers.shape_of(task.h5), **command)
            else:
                answer = run(stream, **command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "absent": isinstance(error, ImportError)}
        signal.alarm(0)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
