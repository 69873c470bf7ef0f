"""The contenders of bench/run.py loader beside the peers: this project, plain DataLoaders, and limits."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import ours
import torch
from peers import Batch, Contender, H5Rows, Task, npy_arrays, permutation
from torch.utils.data import DataLoader, TensorDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.tiers import Feed
from fastgpu.process.config import Tier

COPY_BYTES = 2 << 20
"""Bytes that the memcpy limit copies at a time."""


def fastgpu(task: Task, *, tier: Tier) -> Contender:
    """This project. `auto` chooses the sizes."""
    return from_feed(ours.open_feed(ours.open_rows(task.h5), task.batch_size, tier=tier), [task.h5])


def fastgpu_items(task: Task) -> Contender:
    """This project over a torch Dataset in memory, whose items worker processes read."""
    items = TensorDataset(*map(torch.from_numpy, in_memory(task.h5)))
    rows = ItemDataset("rows", items, {name: name for name in ours.IMAGES})
    return from_feed(ours.open_feed(rows, task.batch_size, n_readers=task.n_workers), [])


def from_feed(feed: Feed, files: list[Path]) -> Contender:
    """The images and labels of a feed."""

    def epoch(number: int) -> Iterator[Batch]:
        for batch in ours.batches(feed, number):
            yield batch["images"], batch["labels"]

    return Contender(files, epoch)


def in_memory(h5: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels."""
    with h5py.File(h5) as file:
        return file["images"][:], file["labels"][:]


def mapped_rows(task: Task) -> TensorDataset:
    """Rows of a memory-mapped array. It is mapped copy-on-write, because torch warns about read-only arrays."""
    arrays = npy_arrays(task.h5, task.folder)
    images = np.load(arrays / "images.npy", mmap_mode="c")
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(np.load(arrays / "labels.npy")))


def h5py_rows(task: Task, *, workers: bool = True, cache_bytes: int | None = None) -> Contender:
    """A DataLoader over rows of the HDF5 file: what most people write first."""
    return plain(task, H5Rows(task.h5, cache_bytes), [task.h5], workers=workers)


def memmap_rows(task: Task, *, workers: bool = True) -> Contender:
    """A DataLoader over rows of a memory-mapped array."""
    return plain(task, mapped_rows(task), [task.folder / "arrays" / "images.npy"], workers=workers)


def ram_rows(task: Task, *, workers: bool = True) -> Contender:
    """A DataLoader over tensors in memory."""
    return plain(task, TensorDataset(*map(torch.from_numpy, in_memory(task.h5))), [], workers=workers)


def plain(task: Task, dataset: Any, files: list[Path], *, workers: bool) -> Contender:
    """torch's DataLoader, fully shuffled. workers: whether it has worker processes."""
    n_workers = task.n_workers if workers else 0
    generator = torch.Generator().manual_seed(task.seed)
    options = {"num_workers": n_workers, "persistent_workers": workers, "generator": generator}
    loader = DataLoader(dataset, task.batch_size, shuffle=True, drop_last=True, **options)
    return Contender(files, lambda number: loader)


def copies(task: Task, *, gather: bool) -> Contender:
    """A limit: as many threads as this project has readers copy rows in memory to recycled batches.

    gather: copy rows in shuffled order by numpy.take, which no shuffling loader can do without. Otherwise copy
    neighbouring rows in pieces of 2 MiB, as fast as the machine can.
    """
    images, labels = in_memory(task.h5)
    threads = ThreadPoolExecutor(ours.READERS)
    n_ahead = 2 * ours.READERS  # for each thread one batch that it fills and a full one; the loop holds one of them
    buffers = cycle([np.zeros((task.batch_size, *images.shape[1:]), np.uint8) for _ in range(n_ahead)])
    step = max(1, COPY_BYTES // images[0].nbytes)

    def copy(rows: np.ndarray, out: np.ndarray) -> Batch:
        if gather:
            np.take(images, rows, axis=0, out=out, mode="clip")
            return out, labels[rows]
        for start in range(0, len(rows), step):
            part = out[start : start + step]
            np.copyto(part, images[rows[start] :][: len(part)])
        return out, labels[rows]

    def epoch(number: int) -> Iterator[Batch]:
        order = permutation(len(labels), task.batch_size, task.seed, number)
        if not gather:
            order = np.arange(order.size).reshape(order.shape)
        coming = deque()
        for rows in order:
            coming.append(threads.submit(copy, rows, next(buffers)))
            if len(coming) == n_ahead:
                yield coming[0].result()
                coming.popleft()
        while coming:
            yield coming.popleft().result()

    return Contender([], epoch)


OURS = "fastgpu, disk"
H5PY = "h5py, workers"
MEMMAP = "memmap, workers"
RAM = "RAM, workers"
MEMCPY = "memcpy limit"
CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: partial(fastgpu, tier="disk"),
    "fastgpu, host": partial(fastgpu, tier="host"),
    "fastgpu, device": partial(fastgpu, tier="device"),
    "fastgpu, torch Dataset": fastgpu_items,
    "h5py, in process": partial(h5py_rows, workers=False),
    "h5py, in process, no cache": partial(h5py_rows, workers=False, cache_bytes=0),
    H5PY: h5py_rows,
    "h5py, workers, no cache": partial(h5py_rows, cache_bytes=0),
    "h5py, workers, 1 GiB cache": partial(h5py_rows, cache_bytes=1 << 30),
    "memmap, in process": partial(memmap_rows, workers=False),
    MEMMAP: memmap_rows,
    "RAM, in process": partial(ram_rows, workers=False),
    RAM: ram_rows,
    "gather limit": partial(copies, gather=True),
    MEMCPY: partial(copies, gather=False),
}
