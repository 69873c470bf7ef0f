"""The peers that the loader benchmark compares with, each with the settings that its own documentation calls fastest.

Each class converts the HDF5 file once to the format that its peer reads, and then yields shuffled epochs of uint8
batches in host memory. A batch of a class with a ring of buffers (FFCV, DALI, SPDL, Grain) is valid until the next
batch is asked for. A peer that makes batches in worker processes drops the last partial batch of every worker, not only
that of the epoch: count the rows that come, not the rows of the file.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

Batch = tuple[Any, Any]
"""Images, uint8 (B, C, H, W), and labels (B,): arrays or tensors."""

BLOCK_BYTES = 1 << 26
"""Bytes that a conversion reads from the HDF5 file at a time."""
LARGE_ROW_BYTES = 1 << 14
"""From this size on, DALI is faster with a setting that costs more for each row."""


class Task(NamedTuple):
    """What a contender has to read."""

    h5: Path
    """The HDF5 file, with the datasets `images` and `labels`."""
    folder: Path
    """Where a contender keeps its own format of the rows."""
    batch_size: int
    n_workers: int
    """Worker processes, or threads of a peer that has no worker processes."""
    seed: int


def convert_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Create `target` by calling `write` with a temporary name, so that an interrupted conversion is never reused."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.partial")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        write(unfinished)
        unfinished.rename(target)
    return target


def _blocks(h5: Path) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Images and labels in the order of the file, in blocks of about `BLOCK_BYTES`."""
    with h5py.File(h5) as file:
        images = file["images"]
        labels = file["labels"]
        n_rows = max(1, BLOCK_BYTES // math.prod(images.shape[1:]))
        for start in range(0, len(images), n_rows):
            yield images[start : start + n_rows], labels[start : start + n_rows].astype(np.int64)


def shape_of(h5: Path) -> tuple[int, ...]:
    """(N, C, H, W) of the images of a file."""
    with h5py.File(h5) as file:
        return tuple(map(int, file["images"].shape))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def npy_arrays(h5: Path, folder: Path) -> Path:
    """A folder with images.npy and labels.npy, for peers without a file format of their own."""

    def write(target: Path) -> None:
        target.mkdir()
        shape = shape_of(h5)
        images = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
        labels = np.lib.format.open_memmap(target / "labels.npy", "w+", np.int64, shape[:1])
        start = 0
        for image_block, label_block in _blocks(h5):
            stop = start + len(image_block)
            images[start:stop] = image_block
            labels[start:stop] = label_block
            start = stop
        images.flush()
        labels.flush()

    return convert_once(folder / "arrays", write)


def permutation(n_rows: int, batch_size: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    """(batches, batch_size): row numbers of epoch `number`, fully shuffled. Rows that fill no batch are left out."""
    order = np.random.default_rng((seed, number)).permutation(n_rows)
    return order[: n_rows // batch_size * batch_size].reshape(-1, batch_size)


def _quiet_about_read_only_arrays() -> None:
    """Silence torch, which warns in every worker that rows of a file are read-only, although it only copies them."""
    warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")


class _H5Rows:
    """(image, label) by row number for the writer of FFCV. Each of its processes opens the file and reads blocks."""

    BLOCK_ROWS = 100
    """The writer asks for 100 neighbouring rows at a time."""

    def __init__(self, h5: Path) -> None:
        self.h5 = h5
        self.n_rows = shape_of(h5)[0]
        self.start = -1
        self.images = np.empty(0)
        self.labels = np.empty(0)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], int]:
        start = index // self.BLOCK_ROWS * self.BLOCK_ROWS
        if start != self.start:
            stop = start + self.BLOCK_ROWS
            with h5py.File(self.h5) as file:
                self.images = file["images"][start:stop]
                self.labels = file["labels"][start:stop]
            self.start = start
        return self.images[index - start], int(self.labels[index - start])


class Ffcv:
    """FFCV: raw NDArrayField rows (no image codec), OrderOption.RANDOM (a full shuffle), os_cache=True, compiled.

    `os_cache=True` maps the file, as the performance guide advises if the dataset fits in memory. Before the first
    epoch, the kernels are compiled and one batch is read.
    """

    def __init__(self, task: Task) -> None:
        from ffcv.fields import IntField, NDArrayField
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

        def write(target: Path) -> None:
            image = NDArrayField(dtype=np.dtype("uint8"), shape=shape_of(task.h5)[1:])
            writer = DatasetWriter(str(target), {"image": image, "label": IntField()}, num_workers=task.n_workers)
            writer.from_indexed_dataset(_H5Rows(task.h5))

        self.path = convert_once(task.folder / "rows.beton", write)
        self.loader = Loader(
            str(self.path),
            batch_size=task.batch_size,
            num_workers=task.n_workers,
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=task.seed,
            drop_last=True,
            pipelines={"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
        )
        batches = iter(self.loader)
        next(batches, None)
        batches.close()
        batches.join()
        # FFCV keeps the file mapped, and mapped pages cannot be evicted. The first epoch maps the file anew.
        self.loader.memory_manager.context.mmap = None
        del batches  # it is part of a reference cycle that holds the mapping
        gc.collect()

    def files(self) -> list[Path]:
        return [self.path]

    def epoch(self, number: int) -> Iterator[Batch]:
        self.loader.next_epoch = number  # the order is a function of seed and epoch number
        batches = iter(self.loader)
        try:
            for images, labels in batches:
                yield images, labels[:, 0]
        finally:
            batches.close()


class _DaliSource:
    """Gives DALI's external source one batch per call: views of rows that its threads copy, or a gathered batch.

    DALI reads a batch after the call (`no_copy`). So a gathered batch lies in a ring that is longer than its queue.
    """

    def __init__(self, arrays: Path, batch_size: int, seed: int, ring: int) -> None:
        self.images = np.asarray(np.load(arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(arrays / "labels.npy")
        self.gives_views = self.images[0].nbytes >= LARGE_ROW_BYTES
        self.batch_size = batch_size
        self.seed = seed
        n_rows = 0 if self.gives_views else batch_size
        self.ring = [np.zeros((n_rows, *self.images.shape[1:]), np.uint8) for _ in range(ring)]
        self.in_flight: list[Any] = [None] * ring  # keeps the views and labels that DALI has not read yet
        self.n_calls = 0
        self.order: Iterator[npt.NDArray[np.int64]] = iter(())

    def start(self, number: int) -> None:
        self.order = iter(permutation(len(self.images), self.batch_size, self.seed, number))

    def __call__(self) -> tuple[Any, Any]:
        row_ids = next(self.order)  # its StopIteration tells DALI that the epoch has ended
        slot = self.n_calls % len(self.ring)
        self.n_calls += 1
        labels = self.labels[row_ids]
        batch: Any
        if self.gives_views:
            batch = [self.images[row] for row in row_ids.tolist()]
        else:
            batch = np.take(self.images, row_ids, axis=0, out=self.ring[slot], mode="clip")
        self.in_flight[slot] = (batch, labels)
        return batch, labels


class Dali:
    """DALI, CPU pipeline: an external source in batch mode without copies, over memory-mapped arrays; a full shuffle.

    This is the fastest variant that was tried. `parallel=True` (worker processes) and the native webdataset reader (a
    shuffle buffer) reached less than half of its speed for both row sizes, and `exec_dynamic=True` was slower, too.
    Rows of 16 KiB and more are passed as views and DALI's own threads gather them. Smaller rows are gathered by NumPy,
    which overlaps with one DALI thread. Yields NCHW arrays.
    """

    def __init__(self, task: Task) -> None:
        from nvidia.dali import fn
        from nvidia.dali.pipeline import Pipeline

        self.arrays = npy_arrays(task.h5, task.folder)
        depth = 3
        self.source = _DaliSource(self.arrays, task.batch_size, task.seed, ring=2 * depth + 2)
        self.pipeline = Pipeline(
            batch_size=task.batch_size,
            num_threads=task.n_workers if self.source.gives_views else 1,
            device_id=None,
            prefetch_queue_depth=depth,
            exec_dynamic=False,
        )
        with self.pipeline:
            self.pipeline.set_outputs(*fn.external_source(source=self.source, num_outputs=2, batch=True, no_copy=True))
        self.pipeline.build()

    def files(self) -> list[Path]:
        return _files(self.arrays)

    def epoch(self, number: int) -> Iterator[Batch]:
        self.source.start(number)
        try:
            while True:
                try:
                    images, labels = self.pipeline.run()
                except StopIteration:
                    return
                yield np.asarray(images.as_tensor()), np.asarray(labels.as_tensor())
        finally:
            self._drain()

    def _drain(self) -> None:
        """Take the batches that were prefetched for an epoch that was given up, so that the next one starts clean."""
        self.source.order = iter(())
        with contextlib.suppress(StopIteration):
            while True:
                self.pipeline.run()
        self.pipeline.reset()


class Spdl:
    """SPDL: a PipelineBuilder with one gathering thread per worker over memory-mapped arrays; a full shuffle.

    `numpy.take` copies into recycled buffers: it releases the GIL, and no page is touched for the first time. One
    pipeline serves all epochs. Its source waits for the next epoch, so nothing is read ahead of an epoch, and no epoch
    pays for the start and the end of the pipeline (0.1 s). Batches come in the order in which they are completed.
    """

    def __init__(self, task: Task) -> None:
        from spdl.pipeline import PipelineBuilder

        self.arrays = npy_arrays(task.h5, task.folder)
        self.images = np.asarray(np.load(self.arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(self.arrays / "labels.npy")
        self.batch_size = task.batch_size
        self.seed = task.seed
        self.orders: queue.SimpleQueue[tuple[object, npt.NDArray[np.int64]]] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(task.n_workers + 4):
            self.free.put(np.zeros((task.batch_size, *self.images.shape[1:]), np.uint8))
        self.pipeline = (
            PipelineBuilder()
            .add_source(self._source())
            .pipe(self._gather, concurrency=task.n_workers)
            .add_sink(2)
            .build(num_threads=task.n_workers, use_thread_output_queue=True)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about daemon threads, which have nothing to finish here
            self.pipeline.start(daemon=True)

    def _source(self) -> Iterator[tuple[object, npt.NDArray[np.int64]]]:
        """Row numbers of batches. It ends with the main thread, or SPDL's thread would keep the interpreter alive."""
        while threading.main_thread().is_alive():
            try:
                yield self.orders.get(timeout=0.2)
            except queue.Empty:
                continue

    def _gather(self, item: tuple[object, npt.NDArray[np.int64]]) -> tuple[object, Any, Any]:
        epoch, row_ids = item
        images = self.free.get()
        return epoch, np.take(self.images, row_ids, axis=0, out=images, mode="clip"), self.labels[row_ids]

    def files(self) -> list[Path]:
        return _files(self.arrays)

    def epoch(self, number: int) -> Iterator[Batch]:
        epoch = object()  # marks the batches of this epoch: an epoch that was given up may have left some behind
        order = permutation(len(self.images), self.batch_size, self.seed, number)
        for row_ids in order:
            self.orders.put((epoch, row_ids))
        n_left = len(order)
        while n_left:
            batch_epoch, images, labels = self.pipeline.get_item()
            try:
                if batch_epoch is epoch:
                    n_left -= 1
                    yield images, labels
            finally:
                self.free.put(images)


class _GrainBatches:
    """A source for Grain whose elements are the row numbers of one batch each."""

    def __init__(self, order: npt.NDArray[np.int64]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.order[index]


class Grain:
    """Grain: a random-access source of shuffled row numbers, one batch each, which `map` gathers in threads.

    NumPy draws the full shuffle. Grain's own shuffle() and batch() work row by row in Python, which holds the GIL: they
    reached a third of this speed for large rows and a twentieth for small ones, and worker processes (mp_prefetch) did
    not make up for it. Buffers are recycled as for SPDL: new ones made large rows up to four times slower.
    """

    def __init__(self, task: Task) -> None:
        import grain

        self.arrays = npy_arrays(task.h5, task.folder)
        self.images = np.asarray(np.load(self.arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(self.arrays / "labels.npy")
        self.batch_size = task.batch_size
        self.seed = task.seed
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        self.options = grain.ReadOptions(num_threads=task.n_workers, prefetch_buffer_size=2 * task.n_workers)

    def _gather(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        try:
            images = self.free.get_nowait()
        except queue.Empty:
            images = np.empty((self.batch_size, *self.images.shape[1:]), np.uint8)
        return np.take(self.images, row_ids, axis=0, out=images, mode="clip"), self.labels[row_ids]

    def files(self) -> list[Path]:
        return _files(self.arrays)

    def epoch(self, number: int) -> Iterator[Batch]:
        import grain

        order = permutation(len(self.images), self.batch_size, self.seed, number)
        dataset = grain.MapDataset.source(_GrainBatches(order)).map(self._gather)
        for images, labels in dataset.to_iter_dataset(self.options):
            yield images, labels
            self.free.put(images)


PEERS: dict[str, Callable[[Task], Any]] = {
    "ffcv": Ffcv,
    "dali": Dali,
    "spdl": Spdl,
    "grain": Grain,
}
