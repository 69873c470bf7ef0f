"""The contenders of the loader benchmark beside the peers: this project, plain DataLoaders, and two limits.

A contender is made from a `Task` (see peers.py). It has `files()`, the files to keep in or out of the page cache, and
`epoch(number)`, which yields (images, labels). A batch is valid until the next one is asked for.
"""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import h5py
import numpy as np
import numpy.typing as npt
import project  # noqa: F401
import torch
from files import open_rows
from peers import Batch, Task, npy_arrays, permutation, shape_of
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fastgpu.feed.sizes import choose_canonical_ranks, choose_pool_batches, choose_readers
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader, Tier
from fastgpu.rows.order import BlockSampler, Shard

COPY_BYTES = 2 << 20
"""Bytes that the memcpy limit copies at a time."""


class Contender(Protocol):
    """One way to read the rows of a file in shuffled batches."""

    def files(self) -> list[Path]:
        """The files that are read in an epoch."""

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of an epoch: images, uint8 (B, C, H, W), and labels (B,)."""


class FastGpu:
    """This project as train.py wires it, on a CPU and without a training step. `auto` chooses the sizes."""

    def __init__(self, task: Task, *, tier: Tier = "disk") -> None:
        self.h5 = task.h5
        source = open_rows(task.h5)
        pool_batches = choose_pool_batches("auto", task.batch_size, source)
        shard = Shard(canonical_ranks=choose_canonical_ranks(task.batch_size, 1, source))
        order = BlockSampler(source.block_rows, task.batch_size, shard=shard, pool_batches=pool_batches, seed=task.seed)
        loader = Loader()
        self.feed = make_feed(source, order, Placement(tier, torch.device("cpu"), choose_readers("auto", 1)), loader)
        self.batch_size = task.batch_size
        self.buffer_bytes = (loader.prefetch_pools + 1) * order.max_pool_rows * source.row_bytes

    def files(self) -> list[Path]:
        return [self.h5]

    def epoch(self, number: int) -> Iterator[Batch]:
        for pool in self.feed.pools(number):
            for batch in pool.rows.batches(self.batch_size):
                yield batch["images"], batch["labels"]


class _H5Rows(Dataset[tuple[npt.NDArray[np.uint8], int]]):
    """The Dataset that most people write first: each worker opens the file, and reads one row at a time.

    The labels are in memory. Reading them row by row would take about as long as reading the images.
    """

    def __init__(self, h5: Path, cache_bytes: int | None) -> None:
        """cache_bytes: size of the chunk cache of h5py. None: its default."""
        self.h5 = h5
        self.options = {} if cache_bytes is None else {"rdcc_nbytes": cache_bytes}
        self.images: h5py.Dataset | None = None
        with h5py.File(h5) as file:
            self.labels = file["labels"][:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        if self.images is None:
            self.images = h5py.File(self.h5, **self.options)["images"]
        return self.images[index], int(self.labels[index])


class _ArrayRows(Dataset[tuple[npt.NDArray[np.uint8], int]]):
    """Rows of a memory-mapped array. It is mapped copy-on-write, because torch warns about read-only arrays."""

    def __init__(self, arrays: Path) -> None:
        self.images = np.load(arrays / "images.npy", mmap_mode="c")
        self.labels = np.load(arrays / "labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return np.asarray(self.images[index]), int(self.labels[index])


class PlainDataLoader:
    """torch's DataLoader over rows of the HDF5 file, of a memory-mapped array, or of tensors in RAM, fully shuffled.

    in_process: use no worker processes. cache_bytes: chunk cache of h5py. None: its default (8 MiB since HDF5 2.0).
    """

    def __init__(
        self,
        task: Task,
        *,
        storage: Literal["h5py", "memmap", "RAM"],
        in_process: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        self.paths: list[Path] = []
        dataset: Dataset[Any]
        if storage == "h5py":
            dataset = _H5Rows(task.h5, cache_bytes)
            self.paths = [task.h5]
        elif storage == "memmap":
            arrays = npy_arrays(task.h5, task.folder)
            dataset = _ArrayRows(arrays)
            self.paths = [arrays / "images.npy"]
        else:
            dataset = TensorDataset(*map(torch.from_numpy, _in_memory(task.h5)))
        n_workers = 0 if in_process else task.n_workers
        self.loader = DataLoader(
            dataset,
            task.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=n_workers,
            persistent_workers=n_workers > 0,
            generator=torch.Generator().manual_seed(task.seed),
        )

    def files(self) -> list[Path]:
        return self.paths

    def epoch(self, number: int) -> Iterator[Batch]:
        yield from self.loader


class Copies:
    """A limit: threads copy the same bytes from memory into recycled batches, and do nothing else.

    There are as many threads as this project has readers. gather: copy rows in shuffled order by numpy.take, which no
    shuffling loader can do without. Otherwise copy neighbouring rows in pieces of 2 MiB, as fast as the machine can.
    """

    def __init__(self, task: Task, *, gather: bool = False) -> None:
        self.images, self.labels = _in_memory(task.h5)
        self.batch_size = task.batch_size
        self.seed = task.seed
        self.gather = gather
        self.copy = self._gather if gather else self._copy_through
        n_threads = choose_readers("auto", 1)
        self.threads = ThreadPoolExecutor(n_threads)
        self.n_ahead = 2 * n_threads  # for each thread one batch that it fills and a full one; the loop holds one
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(self.n_ahead):
            self.free.put(np.zeros((self.batch_size, *self.images.shape[1:]), np.uint8))

    def files(self) -> list[Path]:
        return []

    def epoch(self, number: int) -> Iterator[Batch]:
        order = permutation(len(self.labels), self.batch_size, self.seed, number)
        if not self.gather:
            order = np.arange(order.size).reshape(order.shape)
        coming: deque[Future[Batch]] = deque()
        try:
            for row_ids in order:
                coming.append(self.threads.submit(self.copy, row_ids))
                if len(coming) == self.n_ahead:
                    yield coming[0].result()
                    self._free_first(coming)
            while coming:
                yield coming[0].result()
                self._free_first(coming)
        finally:  # if the caller gives up the epoch
            while coming:
                self._free_first(coming)

    def _free_first(self, coming: deque[Future[Batch]]) -> None:
        images, _ = coming.popleft().result()
        self.free.put(images)

    def _gather(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        images = self.free.get()
        return np.take(self.images, row_ids, axis=0, out=images, mode="clip"), self.labels[row_ids]

    def _copy_through(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        images = self.free.get()
        step = max(1, COPY_BYTES // images[0].nbytes)
        source = self.images[row_ids[0] : row_ids[0] + len(row_ids)]
        for start in range(0, len(row_ids), step):
            np.copyto(images[start : start + step], source[start : start + step])
        return images, self.labels[row_ids]


class FixedBatch:
    """The other limit: one batch that exists already is delivered again and again."""

    def __init__(self, task: Task) -> None:
        n_rows, *shape = shape_of(task.h5)
        images = np.zeros((task.batch_size, *shape), np.uint8)
        self.batch = images, np.zeros(task.batch_size, np.int64)
        self.n_batches = n_rows // task.batch_size

    def files(self) -> list[Path]:
        return []

    def epoch(self, number: int) -> Iterator[Batch]:
        for _ in range(self.n_batches):
            yield self.batch


def _in_memory(h5: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    with h5py.File(h5) as file:
        return file["images"][:], file["labels"][:]


OURS = "fastgpu, disk"
H5PY = "h5py, workers"
MEMMAP = "memmap, workers"
RAM = "RAM, workers"
GATHER = "gather limit"
MEMCPY = "memcpy limit"
FIXED = "fixed batch"
SEQUENTIAL = "sequential read"
"""Not a contender: run.py reads the file itself."""

CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: FastGpu,
    "fastgpu, host": partial(FastGpu, tier="host"),
    "fastgpu, device": partial(FastGpu, tier="device"),
    "h5py, in process": partial(PlainDataLoader, storage="h5py", in_process=True),
    "h5py, in process, no cache": partial(PlainDataLoader, storage="h5py", in_process=True, cache_bytes=0),
    H5PY: partial(PlainDataLoader, storage="h5py"),
    "h5py, workers, no cache": partial(PlainDataLoader, storage="h5py", cache_bytes=0),
    "h5py, workers, 1 GiB cache": partial(PlainDataLoader, storage="h5py", cache_bytes=1 << 30),
    "memmap, in process": partial(PlainDataLoader, storage="memmap", in_process=True),
    MEMMAP: partial(PlainDataLoader, storage="memmap"),
    "RAM, in process": partial(PlainDataLoader, storage="RAM", in_process=True),
    RAM: partial(PlainDataLoader, storage="RAM"),
    GATHER: partial(Copies, gather=True),
    MEMCPY: Copies,
    FIXED: FixedBatch,
}
