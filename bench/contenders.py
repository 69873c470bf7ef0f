"""Who takes part in the loader benchmark, beside the peers: this project, plain DataLoaders, and two limits.

All have the peers' signature: `Contender(h5, folder, batch_rows, workers, seed)`, `files()` to keep in or out of the
page cache, and `epoch(number)`, which yields (images, labels) that hold until the next batch is asked for.
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
from fastgpu.feed import sizes as auto
from fastgpu.feed.echo import echo
from fastgpu.feed.tiers import make_feed
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store
from peers import npy_arrays, permutation, shape_of
from torch.utils.data import DataLoader, Dataset, TensorDataset

Batch = tuple[Any, Any]
COPY_BYTES = 2 << 20  # that the memcpy limit copies at a time


class Contender(Protocol):
    def files(self) -> list[Path]: ...

    def epoch(self, number: int) -> Iterator[Batch]: ...


class FastGpu:
    """This project, wired as train.py does it, with what `auto` makes of the sizes: no step, no device but the CPU."""

    PREFETCH_POOLS = 2

    def __init__(
        self,
        h5: Path,
        folder: Path,
        batch_size: int,
        workers: int,
        seed: int,
        *,
        tier: auto.Tier = "disk",
    ) -> None:
        self.h5 = h5
        store = open_store("data.train", str(h5), {"images": "images", "labels": "labels"})
        pool_batches = auto.choose_pool_batches("auto", batch_size, store.row_bytes, len(store))
        canonical_ranks = auto.choose_lanes("auto", batch_size, 1, len(store.block_rows), store.name)
        order = BlockSampler(
            store.block_rows, batch_size, canonical_ranks=canonical_ranks, pool_batches=pool_batches, seed=seed
        )
        readers = auto.choose_readers("auto", 1)
        self.feed = make_feed(store, order, tier, torch.device("cpu"), readers, self.PREFETCH_POOLS)
        self.batch_size, self.rng = batch_size, torch.Generator()
        self.buffer_bytes = (self.PREFETCH_POOLS + 1) * min(pool_batches * batch_size, len(order)) * store.row_bytes

    def files(self) -> list[Path]:
        return [self.h5]

    def epoch(self, number: int) -> Iterator[Batch]:
        for pool in self.feed.pools(number):
            for batch in echo(pool.rows, self.batch_size, 1, self.rng):
                yield batch["images"], batch["labels"]


class _H5Rows(Dataset[tuple[npt.NDArray[np.uint8], int]]):
    """What a person writes first: the file is opened in each worker, a row is read when it is asked for.

    The labels are in memory: reading them one by one as well would take about as long again.
    """

    def __init__(self, h5: Path, cache_bytes: int | None) -> None:
        self.h5, self.options = h5, {} if cache_bytes is None else {"rdcc_nbytes": cache_bytes}
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
    """Rows of a memory-mapped array. Mapped copy-on-write, as torch warns of arrays that cannot be written."""

    def __init__(self, arrays: Path) -> None:
        self.images = np.load(arrays / "images.npy", mmap_mode="c")
        self.labels = np.load(arrays / "labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        return np.asarray(self.images[index]), int(self.labels[index])


class PlainDataLoader:
    """torch's DataLoader over rows of the h5 file, of a memory-mapped array or of tensors in RAM; a full shuffle.

    in_process: no worker processes. cache_bytes: h5py's chunk cache; None: its default (8 MiB since HDF5 2.0).
    """

    def __init__(
        self,
        h5: Path,
        folder: Path,
        batch_size: int,
        workers: int,
        seed: int,
        *,
        rows: Literal["h5py", "memmap", "RAM"],
        in_process: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        self.paths: list[Path] = []
        if rows == "h5py":
            dataset: Dataset[Any] = _H5Rows(h5, cache_bytes)
            self.paths = [h5]
        elif rows == "memmap":
            arrays = npy_arrays(h5, folder)
            dataset = _ArrayRows(arrays)
            self.paths = [arrays / "images.npy"]
        else:
            dataset = TensorDataset(*map(torch.from_numpy, _in_memory(h5)))
        workers = 0 if in_process else workers
        self.loader = DataLoader(
            dataset,
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(seed),
        )

    def files(self) -> list[Path]:
        return self.paths

    def epoch(self, number: int) -> Iterator[Batch]:
        yield from self.loader


class Copies:
    """A limit: the same bytes copied from memory into recycled batches by as many threads, and nothing else.

    gather: rows of a full shuffle by numpy.take, which is what a shuffling loader cannot do without. Otherwise
    neighbouring rows, in pieces of 2 MiB: what the machine can copy at all.
    """

    def __init__(
        self,
        h5: Path,
        folder: Path,
        batch_size: int,
        workers: int,
        seed: int,
        *,
        gather: bool = False,
    ) -> None:
        self.images, self.labels = _in_memory(h5)
        self.batch_size, self.seed, self.workers = batch_size, seed, auto.choose_readers("auto", 1)
        self.copy = self._gather if gather else self._copy_through
        self.threads = ThreadPoolExecutor(self.workers)
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(
            2 * self.workers
        ):  # for each thread one that it fills and one that is full; the loop has one of them
            self.free.put(np.zeros((batch_size, *self.images.shape[1:]), np.uint8))
        self.gather = gather

    def files(self) -> list[Path]:
        return []

    def epoch(self, number: int) -> Iterator[Batch]:
        order = permutation(len(self.labels), self.batch_size, self.seed, number)
        if not self.gather:
            order = np.arange(order.size).reshape(order.shape)
        coming: deque[Future[Batch]] = deque()
        try:
            for rows in order:
                coming.append(self.threads.submit(self.copy, rows))
                if len(coming) == 2 * self.workers:
                    yield coming[0].result()
                    self._free_first(coming)
            while coming:
                yield coming[0].result()
                self._free_first(coming)
        finally:  # of an epoch that was given up
            while coming:
                self._free_first(coming)

    def _free_first(self, coming: deque[Future[Batch]]) -> None:
        images, _ = coming.popleft().result()
        self.free.put(images)

    def _gather(self, rows: npt.NDArray[np.int64]) -> Batch:
        images = self.free.get()
        return np.take(self.images, rows, axis=0, out=images, mode="clip"), self.labels[rows]

    def _copy_through(self, rows: npt.NDArray[np.int64]) -> Batch:
        images = self.free.get()
        step = max(1, COPY_BYTES // images[0].nbytes)
        source = self.images[rows[0] : rows[0] + len(rows)]
        for start in range(0, len(rows), step):
            np.copyto(images[start : start + step], source[start : start + step])
        return images, self.labels[rows]


class FixedBatch:
    """The other limit: one batch that is there already, again and again."""

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        rows, *shape = shape_of(h5)
        self.batch = np.zeros((batch_size, *shape), np.uint8), np.zeros(batch_size, np.int64)
        self.batches = rows // batch_size

    def files(self) -> list[Path]:
        return []

    def epoch(self, number: int) -> Iterator[Batch]:
        for _ in range(self.batches):
            yield self.batch


def _in_memory(h5: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    with h5py.File(h5) as file:
        return file["images"][:], file["labels"][:]


OURS = "fastgpu, disk"
H5PY, MEMMAP, RAM = "h5py, workers", "memmap, workers", "RAM, workers"
GATHER, MEMCPY, FIXED = "gather limit", "memcpy limit", "fixed batch"
SEQUENTIAL = "sequential read"  # run.py does it itself

CONTENDERS: dict[str, Callable[[Path, Path, int, int, int], Contender]] = {
    OURS: FastGpu,
    "fastgpu, host": partial(FastGpu, tier="host"),
    "fastgpu, device": partial(FastGpu, tier="device"),
    "h5py, in process": partial(PlainDataLoader, rows="h5py", in_process=True),
    "h5py, in process, no cache": partial(PlainDataLoader, rows="h5py", in_process=True, cache_bytes=0),
    H5PY: partial(PlainDataLoader, rows="h5py"),
    "h5py, workers, no cache": partial(PlainDataLoader, rows="h5py", cache_bytes=0),
    "h5py, workers, 1 GiB cache": partial(PlainDataLoader, rows="h5py", cache_bytes=1 << 30),
    "memmap, in process": partial(PlainDataLoader, rows="memmap", in_process=True),
    MEMMAP: partial(PlainDataLoader, rows="memmap"),
    "RAM, in process": partial(PlainDataLoader, rows="RAM", in_process=True),
    RAM: partial(PlainDataLoader, rows="RAM"),
    GATHER: partial(Copies, gather=True),
    MEMCPY: Copies,
    FIXED: FixedBatch,
}
