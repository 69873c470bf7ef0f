"""The contenders of bench/run.py loader beside the peers: this project, plain DataLoaders, and limits.

Those of bench/run.py layouts are this project with the same rows in other blocks, compressed, or checked. `convert.py`
writes the fastest of these layouts. The rows are smooth pictures with a little noise, which filters can compress.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import ours
import torch
from peers import Batch, Contender, Items, Task, convert_once, h5py_batches, h5py_rows, loader
from torch.utils.data import TensorDataset

from fastgpu.feed import PoolLoader
from fastgpu.process.config import Tier

BLOCK_BYTES = 2 << 20
"""Bytes of a block as convert.py writes it, which the memcpy limit copies at a time, too."""
DEFAULT_LAYOUT = "blocks of 2 MiB"


def fastgpu(task: Task, *, tier: Tier = "disk") -> Contender:
    """This project. `auto` chooses the sizes."""
    return from_feed(ours.open_feed(ours.open_rows(task.h5), task.batch_size, tier=tier), [task.h5])


def from_feed(feed: PoolLoader, files: list[Path]) -> Contender:
    """The images and labels of a feed."""
    return Contender(files, lambda number: ((each["images"], each["labels"]) for each in ours.batches(feed, number)))


def in_memory(h5: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels."""
    with h5py.File(h5) as file:
        return file["images"][:], file["labels"][:]


def ram_rows(task: Task) -> TensorDataset:
    """Tensors in memory."""
    return TensorDataset(*map(torch.from_numpy, in_memory(task.h5)))


def ram_batches(task: Task) -> Items:
    """Batches of tensors in memory."""
    images, labels = map(torch.from_numpy, in_memory(task.h5))

    def batch(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        row_ids = torch.tensor(rows)
        return images.index_select(0, row_ids), labels.index_select(0, row_ids)

    return Items(len(labels), batch)


def memcpy(task: Task) -> Contender:
    """A limit: as many threads as this project has readers copy neighbouring rows in pieces of 2 MiB to used memory."""
    images, labels = in_memory(task.h5)
    threads = ThreadPoolExecutor(ours.READERS)
    n_ahead = 2 * ours.READERS  # for each thread one batch that it fills and a full one; the loop holds one of them
    buffers = cycle([np.zeros((task.batch_size, *images.shape[1:]), np.uint8) for _ in range(n_ahead)])
    n_rows = len(labels) // task.batch_size * task.batch_size
    step = max(1, BLOCK_BYTES // images[0].nbytes)

    def copy(rows: np.ndarray, out: np.ndarray) -> Batch:
        for start in range(0, len(rows), step):
            part = out[start : start + step]
            np.copyto(part, images[rows[start] :][: len(part)])
        return out, labels[rows]

    def epoch(number: int) -> Iterator[Batch]:
        coming = deque()
        for rows in np.arange(n_rows).reshape(-1, task.batch_size):
            coming.append(threads.submit(copy, rows, next(buffers)))
            if len(coming) == n_ahead:
                yield coming[0].result()
                coming.popleft()
        while coming:
            yield coming.popleft().result()

    return Contender([], epoch)


def layout(task: Task, *, name: str, block_bytes: int | None = BLOCK_BYTES, **options: Any) -> Contender:
    """The rows of the task in a file of another layout. block_bytes: of a chunk. options: of h5py's create_dataset."""

    def write(target: Path) -> None:
        with h5py.File(task.h5) as source, h5py.File(target, "w") as file:
            images = source["images"]
            if block_bytes:
                block_rows = max(1, block_bytes // (images.nbytes // len(images)))
                options["chunks"] = (min(block_rows, len(images)), *images.shape[1:])
            file.create_dataset("images", data=images[:], **options)
            file["labels"] = source["labels"][:]

    path = task.h5 if name == DEFAULT_LAYOUT else convert_once(task.folder / f"{name.replace(' ', '-')}.h5", write)
    return from_feed(ours.open_feed(ours.open_rows(path), task.batch_size), [path])


OURS = "fastgpu, disk"
H5PY = "h5py, workers"
PLAIN_H5PY = "h5py, plain file, workers"
RAM = "RAM, workers"
H5PY_BATCHES = "h5py, plain file, batches, workers"
RAM_BATCHES = "RAM, batches, in process"
MEMCPY = "memcpy limit"
LOADERS: dict[str, Callable[[Task], Contender]] = {
    **{f"fastgpu, {tier}": partial(fastgpu, tier=tier) for tier in ("disk", "host", "device")},
    "h5py, in process": partial(loader, rows=h5py_rows, workers=0),
    "h5py, in process, no cache": partial(loader, rows=partial(h5py_rows, cache_bytes=0), workers=0),
    H5PY: partial(loader, rows=h5py_rows),
    "h5py, workers, 1 GiB cache": partial(loader, rows=partial(h5py_rows, cache_bytes=1 << 30)),
    PLAIN_H5PY: partial(loader, rows=partial(h5py_rows, is_plain=True)),
    RAM: partial(loader, rows=ram_rows),
    "RAM, in process": partial(loader, rows=ram_rows, workers=0),
    H5PY_BATCHES: partial(loader, rows=h5py_batches, in_batches=True),
    "h5py, plain file, batches, in process": partial(loader, rows=h5py_batches, in_batches=True, workers=0),
    "RAM, batches, workers": partial(loader, rows=ram_batches, in_batches=True),
    RAM_BATCHES: partial(loader, rows=ram_batches, in_batches=True, workers=0),
    MEMCPY: memcpy,
}
LAYOUT_OPTIONS: dict[str, dict[str, Any]] = {
    DEFAULT_LAYOUT: {},
    "in one piece": {"block_bytes": None, "chunks": None},
    "chunks of 1 row": {"block_bytes": 1},
    "chunks of 64 MiB": {"block_bytes": 64 << 20},
    "chunks that split rows": {"block_bytes": None, "chunks": True},
    "gzip": {"compression": "gzip", "compression_opts": 1},
    "lz4": hdf5plugin.LZ4(),
    "zstd": hdf5plugin.Zstd(clevel=1),
    "fletcher32": {"fletcher32": True},
}
LAYOUTS = {name: partial(layout, name=name, **options) for name, options in LAYOUT_OPTIONS.items()}
CONTENDERS = {**LOADERS, **LAYOUTS}
