"""Who works and who waits in front of a simulated device: a plain DataLoader over an HDF5 file, and this project.

The DataLoader is the contender "h5py, plain file, workers" of bench/run.py loader: its Dataset reads a row from a file
that h5py has written with its defaults, and two worker processes make the batches. A step of the device takes STEP_S,
and needs no CPU. Writes docs/pictures/timeline.json, which tools/draw_pictures.py draws (make pictures).
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import data
import numpy as np
import ours
import publish
import torch
from peers import Items, Task, h5py_rows, plain_h5
from torch.utils.data import DataLoader, default_collate, get_worker_info

from fastgpu.feed import PrefetchLoader
from fastgpu.feed.readers import Readers
from fastgpu.process.config import LoaderConfig
from fastgpu.rows.order import BlockSampler

SPEC = data.DataSpec("celeba", 12_000, (3, 218, 178), 256)
STEP_S = 0.01
WARM_UP_S = 3.0
SPAN_S = 0.4
AFTER_S = 1.0
"""Goes on so long, for workers tell of a batch when it arrives."""
PICTURES = publish.ROOT / "docs" / "pictures"
N_WORKERS = 2
Interval = tuple[str, float, float]
"""(who works, begin, end), in seconds of time.monotonic, which all processes of a machine share."""


def usual_rows(task: Task) -> Items:
    """The rows of the plain DataLoader."""
    return h5py_rows(task, is_plain=True)


class WatchedRows:
    """Rows of a Dataset. A batch comes with the interval in which a worker made it."""

    def __init__(self, rows: Items):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, rows: list[int]) -> tuple[Any, Interval]:
        begin = time.monotonic()
        batch = default_collate([self.rows[row] for row in rows])
        worker = get_worker_info()
        return batch, (f"worker {worker.id + 1}", begin, time.monotonic())


class WatchedReaders(Readers):
    """Notes when they work. There is one of it."""

    intervals: ClassVar[list[Interval]] = []

    def do(self, job: Callable[[], None], done: object, inbox: SimpleQueue[Any]) -> None:
        begin = time.monotonic()
        super().do(job, done, inbox)
        name = threading.current_thread().name
        self.intervals.append((f"reader {int(name.removeprefix('reader_')) + 1}", begin, time.monotonic()))


def train(batches: Iterator[Any]) -> list[Interval]:
    """Steps of the simulated device on the batches, for the seconds of the warm-up and the span."""
    until = time.monotonic() + WARM_UP_S + SPAN_S + AFTER_S
    intervals: list[Interval] = []
    for batch in batches:
        begin = time.monotonic()
        if isinstance(batch, tuple):
            intervals.append(batch[1])
        time.sleep(STEP_S)
        intervals.append(("device", begin, time.monotonic()))
        if begin > until:
            break
    return intervals


def span(intervals: list[Interval]) -> list[Interval]:
    """The part of SPAN_S that ends AFTER_S before the end, from its beginning, in milliseconds."""
    end = max(each[2] for each in intervals if each[0] == "device") - AFTER_S
    begin = end - SPAN_S
    cut = [(who, max(start, begin) - begin, min(stop, end) - begin) for who, start, stop in intervals if stop > begin]
    return [(who, round(1e3 * start, 2), round(1e3 * stop, 2)) for who, start, stop in cut if stop > start]


def measure_usual(task: Task) -> list[Interval]:
    rows = WatchedRows(usual_rows(task))
    options = {"shuffle": True, "drop_last": True, "num_workers": N_WORKERS, "collate_fn": lambda batch: batch}
    loader = DataLoader(rows, task.batch_size, persistent_workers=True, **options)
    return span(train(batch for _ in range(1000) for batch in loader))


def measure_ours(task: Task) -> list[Interval]:
    rows = ours.open_rows(task.h5)
    sampler = BlockSampler(rows, batch_size=task.batch_size, pool_batches=9, seed=0)
    loader = LoaderConfig(num_readers=N_WORKERS)
    feed = PrefetchLoader(rows, sampler, torch.device("cpu"), loader)
    feed.readers = WatchedReaders(rows, sampler, loader)
    steps = train(batch for epoch in range(1000) for batch in feed.batches(epoch))
    feed.close()
    return span(steps + WatchedReaders.intervals)


def main() -> None:
    """Measure both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data; the numbers mean nothing")
    parser.add_argument("--out", type=Path, help="folder of the result (docs/pictures; with --quick a temporary one)")
    args = parser.parse_args()
    spec = SPEC.small() if args.quick else SPEC
    data.make(spec)
    task = Task(spec.h5, spec.folder, spec.batch_size, N_WORKERS)
    for path in (spec.h5, plain_h5(task)):
        np.fromfile(path, np.uint8)  # into the page cache
    usual = measure_usual(task)
    shape = " x ".join(map(str, spec.shape))
    result = {"machine": publish.machine(), "step_ms": 1e3 * STEP_S, "span_ms": 1e3 * SPAN_S}
    result |= {"rows": f"{spec.batch_size} of {shape} bytes", "usual": usual, "ours": measure_ours(task)}
    folder = args.out or (Path(tempfile.mkdtemp(prefix="timeline-")) if args.quick else PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "timeline.json"
    path.write_text(json.dumps(result) + "\n")
    print(path)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
