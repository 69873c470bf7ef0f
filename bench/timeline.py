"""Who works and who waits, while a device trains on batches from an HDF5 file: a plain DataLoader, and this project.

The usual Dataset opens the file, which h5py has written with its defaults, and reads a row in `__getitem__`; two worker
processes. The device is simulated: a step takes STEP_S, and needs no CPU. Writes docs/pictures/timeline.json, which
tools/draw_pictures.py draws.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import data
import h5py
import numpy as np
import ours
import publish
import torch
from torch.utils.data import DataLoader, Dataset

from fastgpu.feed import PrefetchLoader
from fastgpu.feed.readers import Readers
from fastgpu.process.config import Loader
from fastgpu.rows.order import BlockSampler

SPEC = data.DataSpec("celeba", 12_000, (3, 218, 178), 256)
STEP_S = 0.01
WARM_UP_S = 3.0
SPAN_S = 0.4
AFTER_S = 1.0
"""Goes on so long, for workers tell of a batch when it arrives."""
OUT = publish.ROOT / "docs" / "pictures" / "timeline.json"
Interval = tuple[str, float, float]
"""(who works, begin, end), in seconds of time.monotonic, which all processes of a machine share."""


class UsualDataset(Dataset):
    """Rows that h5py reads one by one. A batch comes with the interval in which a worker made it."""

    def __init__(self, path: Path):
        self.path = path
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return SPEC.n_rows

    def __getitem__(self, row: int) -> torch.Tensor:
        self.file = self.file or h5py.File(self.path)
        return torch.from_numpy(self.file["images"][row])

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, Interval]:
        begin = time.monotonic()
        images = torch.stack([self[row] for row in rows])
        worker = torch.utils.data.get_worker_info()
        return images, (f"worker {worker.id + 1}", begin, time.monotonic())


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


def main() -> None:
    """Measure both, one after the other."""
    data.make(SPEC)
    plain = SPEC.folder / "plain.h5"
    with h5py.File(SPEC.h5) as source, h5py.File(plain, "w") as file:
        file["images"] = source["images"][:]
    for path in (SPEC.h5, plain):
        np.fromfile(path, np.uint8)  # into the page cache
    dataset = UsualDataset(plain)
    loader = DataLoader(
        dataset, SPEC.batch_size, shuffle=True, num_workers=2, collate_fn=lambda batch: batch, drop_last=True
    )
    usual = span(train(iter(loader)))
    rows = ours.open_rows(SPEC.h5)
    sampler = BlockSampler(rows, batch_size=SPEC.batch_size, pool_batches=9, seed=0)
    loader = Loader(num_readers=2)
    feed = PrefetchLoader(rows, sampler, torch.device("cpu"), loader)
    feed.readers = WatchedReaders(rows, sampler, loader)
    steps = train(batch for epoch in range(1000) for batch in feed.batches(epoch))
    feed.close()
    result = {"machine": publish.machine(), "step_ms": 1e3 * STEP_S, "span_ms": 1e3 * SPAN_S}
    result |= {"rows": "256 of 3 x 218 x 178 bytes", "usual": usual, "ours": span(steps + WatchedReaders.intervals)}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
