"""The peers that the loader benchmark compares with, each with the settings that its own documentation calls fastest.

Each function converts the HDF5 file once to the format that its peer reads, and returns shuffled epochs of uint8
batches in host memory. A batch is valid until the next one is asked for.
"""

import contextlib
import gc
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

PROJECT = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT))  # the generated project runs in place
Batch = tuple[Any, Any]
"""Images, uint8 (B, C, H, W), and labels (B,): arrays or tensors."""
RowIds = npt.NDArray[np.int64]
LARGE_ROW_BYTES = 1 << 14
"""From this size on, DALI is faster with a setting that costs more for each row."""
PEERS = ("ffcv", "dali", "spdl", "grain")
FIXED = "fixed batch"
DALI_DEPTH = 3
"""Batches that DALI prepares ahead."""


class Task(NamedTuple):
    """What a contender has to read."""

    h5: Path
    """The HDF5 file, with the datasets `images` and `labels`."""
    folder: Path
    """Where a contender keeps its own format of the rows."""
    batch_size: int
    n_workers: int
    """Worker processes, or threads of a peer that has no worker processes."""


class Contender(NamedTuple):
    """One way to read the rows of a file in shuffled batches."""

    files: list[Path]
    """The files that are read in an epoch, to be kept in or out of the page cache."""
    epoch: Callable[[int], Iterable[Any]]
    """The batches of an epoch of this number."""


def convert_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Create `target` by calling `write` with a temporary name, so that an interrupted conversion is never reused."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.partial")
        write(unfinished)
        unfinished.rename(target)
    return target


def shape_of(h5: Path) -> tuple[int, ...]:
    """(N, C, H, W) of the images of a file."""
    with h5py.File(h5) as file:
        return tuple(map(int, file["images"].shape))


class Arrays:
    """The memory-mapped rows of a task, for peers without a file format of their own."""

    def __init__(self, task: Task) -> None:
        def write(target: Path) -> None:
            target.mkdir()
            with h5py.File(task.h5) as file:
                for name in ("images", "labels"):
                    np.save(target / f"{name}.npy", file[name][:])

        folder = convert_once(task.folder / "arrays", write)
        self.files = sorted(folder.iterdir())
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.labels = np.load(folder / "labels.npy")
        self.batch_size = task.batch_size

    def new_batch(self) -> npt.NDArray[np.uint8]:
        return np.zeros((self.batch_size, *self.images.shape[1:]), np.uint8)

    def gather(self, row_ids: RowIds, out: npt.NDArray[np.uint8]) -> Batch:
        """Copy rows to `out`. `numpy.take` releases the GIL."""
        return np.take(self.images, row_ids, axis=0, out=out, mode="clip"), self.labels[row_ids]


def fixed_batch(task: Task) -> Contender:
    """A limit: one batch that exists already is delivered again and again."""
    batch = np.zeros((task.batch_size, 1), np.uint8)
    return Contender([], lambda number: [(batch, batch)] * 10)


def permutation(n_rows: int, batch_size: int, number: int) -> RowIds:
    """(batches, batch_size): row numbers of epoch `number`, fully shuffled. Rows that fill no batch are left out."""
    order = np.random.default_rng(number).permutation(n_rows)
    return order[: n_rows // batch_size * batch_size].reshape(-1, batch_size)


@dataclass
class Items:
    """A map-style Dataset whose items a function makes."""

    n_rows: int
    item: Callable[[int], Any]

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> Any:
        return self.item(row)


def h5py_rows(task: Task, cache_bytes: int | None = None) -> Items:
    """(image, label) of the HDF5 file: what most people write first. The labels are in memory.

    cache_bytes: size of the chunk cache of h5py. None: its default, 8 MiB since HDF5 2.0.
    """
    options = {} if cache_bytes is None else {"rdcc_nbytes": cache_bytes}
    images = cache(lambda: h5py.File(task.h5, **options)["images"])  # each process opens the file
    with h5py.File(task.h5) as file:
        labels = file["labels"][:]
    return Items(len(labels), lambda row: (images()[row], int(labels[row])))


def loader(task: Task, *, rows: Callable[[Task], Any], workers: int | None = None, **options: Any) -> Contender:
    """torch's DataLoader, fully shuffled. workers: processes; None for one on each CPU."""
    n_workers = task.n_workers if workers is None else workers
    options |= {"num_workers": n_workers, "persistent_workers": n_workers > 0}
    batches = DataLoader(rows(task), task.batch_size, shuffle=True, drop_last=True, **options)
    return Contender([task.h5], lambda number: batches)


def ffcv_loader(task: Task, path: Path, pipelines: dict[str, Any]) -> Any:
    """OrderOption.RANDOM (a full shuffle); os_cache=True maps the file, as the performance guide advises if it fits in
    memory."""
    from ffcv.loader import Loader, OrderOption

    sizes = {"batch_size": task.batch_size, "num_workers": task.n_workers, "drop_last": True}
    return Loader(str(path), os_cache=True, order=OrderOption.RANDOM, seed=0, pipelines=pipelines, **sizes)


def ffcv(task: Task) -> Contender:
    """FFCV: raw NDArrayField rows (no image codec), compiled, one batch of which is read before the first epoch."""
    from ffcv.fields import IntField, NDArrayField
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        image = NDArrayField(dtype=np.dtype("uint8"), shape=shape_of(task.h5)[1:])
        writer = DatasetWriter(str(target), {"image": image, "label": IntField()}, num_workers=task.n_workers)
        writer.from_indexed_dataset(h5py_rows(task))

    path = convert_once(task.folder / "rows.beton", write)
    pipelines = {"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    loader = ffcv_loader(task, path, pipelines)
    batches = iter(loader)
    next(batches, None)
    batches.close()
    batches.join()
    # FFCV keeps the file mapped, and mapped pages cannot be evicted. The first epoch maps the file anew.
    loader.memory_manager.context.mmap = None
    del batches  # it is part of a reference cycle that holds the mapping
    gc.collect()

    def epoch(number: int) -> Iterator[Batch]:
        loader.next_epoch = number  # the order is a function of seed and epoch number
        for images, labels in loader:
            yield images, labels[:, 0]

    return Contender([path], epoch)


def dali(task: Task) -> Contender:
    """DALI, CPU pipeline: an external source in batch mode without copies, over memory-mapped arrays; a full shuffle.

    This is the fastest variant that was tried: worker processes and the native webdataset reader reached less than half
    of its speed. Large rows are views, which DALI's threads gather; smaller ones are gathered by NumPy beside a thread.
    """
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    rows = Arrays(task)
    gives_views = rows.images[0].nbytes >= LARGE_ROW_BYTES
    n_slots = 2 * DALI_DEPTH + 2  # longer than DALI's queue, since it reads a batch after the call (no_copy)
    ring = [] if gives_views else [rows.new_batch() for _ in range(n_slots)]
    in_flight: list[Any] = [None] * n_slots  # keeps views and labels that DALI has not read yet
    order: Iterator[RowIds] = iter(())
    slots = cycle(range(n_slots))

    def source() -> tuple[Any, Any]:
        row_ids = next(order)  # its StopIteration tells DALI that the epoch has ended
        slot = next(slots)
        if gives_views:
            batch = [rows.images[row] for row in row_ids.tolist()], rows.labels[row_ids]
        else:
            batch = rows.gather(row_ids, ring[slot])
        in_flight[slot] = batch
        return batch

    n_threads = task.n_workers if gives_views else 1
    pipeline = Pipeline(task.batch_size, n_threads, device_id=None, prefetch_queue_depth=DALI_DEPTH, exec_dynamic=False)
    with pipeline:
        pipeline.set_outputs(*fn.external_source(source=source, num_outputs=2, batch=True, no_copy=True))
    pipeline.build()

    def epoch(number: int) -> Iterator[Batch]:
        nonlocal order
        order = iter(permutation(len(rows.images), task.batch_size, number))
        with contextlib.suppress(StopIteration):
            while True:
                images, labels = pipeline.run()
                yield np.asarray(images.as_tensor()), np.asarray(labels.as_tensor())
        pipeline.reset()

    return Contender(rows.files, epoch)


def spdl_pipeline(builder: Any, n_threads: int) -> Any:
    """Build and start a pipeline of SPDL that ends with this process."""
    pipeline = builder.build(num_threads=n_threads, use_thread_output_queue=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about daemon threads, which have nothing to finish here
        pipeline.start(daemon=True)
    return pipeline


def spdl(task: Task) -> Contender:
    """SPDL: a PipelineBuilder with one gathering thread per worker over memory-mapped arrays; a full shuffle.

    Batches come in recycled buffers, in the order in which they are completed. One pipeline serves all epochs, so that
    none pays for its start and its end (0.1 s); its source waits for the next epoch.
    """
    from spdl.pipeline import PipelineBuilder

    rows = Arrays(task)
    orders: queue.SimpleQueue[RowIds] = queue.SimpleQueue()
    free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
    for _ in range(task.n_workers + 4):
        free.put(rows.new_batch())

    def source() -> Iterator[RowIds]:
        while threading.main_thread().is_alive():  # or SPDL's thread would keep the interpreter alive
            with contextlib.suppress(queue.Empty):
                yield orders.get(timeout=0.2)

    def gather(row_ids: RowIds) -> Batch:
        return rows.gather(row_ids, free.get())

    builder = PipelineBuilder().add_source(source()).pipe(gather, concurrency=task.n_workers).add_sink(2)
    pipeline = spdl_pipeline(builder, task.n_workers)

    def epoch(number: int) -> Iterator[Batch]:
        order = permutation(len(rows.images), task.batch_size, number)
        for row_ids in order:
            orders.put(row_ids)
        for _ in order:
            batch = pipeline.get_item()
            yield batch
            free.put(batch[0])

    return Contender(rows.files, epoch)


def grain(task: Task) -> Contender:
    """Grain: a random-access source of shuffled row numbers, one batch each, which `map` gathers in threads.

    NumPy draws the full shuffle, and buffers are recycled: Grain's own shuffle() and batch() work row by row in Python
    and reached a third of this speed for large rows, a twentieth for small ones; new buffers cost up to four times.
    """
    from grain import MapDataset, ReadOptions

    rows = Arrays(task)
    free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
    options = ReadOptions(num_threads=task.n_workers, prefetch_buffer_size=2 * task.n_workers)

    def gather(row_ids: RowIds) -> Batch:
        try:
            return rows.gather(row_ids, free.get_nowait())
        except queue.Empty:
            return rows.gather(row_ids, rows.new_batch())

    def epoch(number: int) -> Iterator[Batch]:
        order = permutation(len(rows.images), task.batch_size, number)
        dataset = MapDataset.source(list(order)).map(gather)
        for batch in dataset.to_iter_dataset(options):
            yield batch
            free.put(batch[0])

    return Contender(rows.files, epoch)


CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    "ffcv": ffcv,
    "dali": dali,
    "spdl": spdl,
    "grain": grain,
    FIXED: fixed_batch,
}


def is_peer(name: str) -> bool:
    """Whether a contender, of rows or of JPEG files, runs in the peers' environment."""
    return name.partition(",")[0] in PEERS
