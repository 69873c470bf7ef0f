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
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

PROJECT = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT))  # the generated project runs in place
Batch = tuple[Any, Any]
"""Images, uint8 (B, C, H, W), and labels (B,): arrays or tensors."""
RowIds = npt.NDArray[np.int64]
LARGE_ROW_BYTES = 1 << 14
"""From this size on, DALI is faster with a setting that costs more for each row."""
PEERS = {
    "ffcv": "FFCV",
    "dali": "DALI",
    "spdl": "SPDL",
    "grain": "Grain",
    "litdata": "LitData",
    "streaming": "Streaming",
    "timm": "timm",
}
"""{first word of the names of its contenders: name of a peer}"""
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
    """A map-style Dataset whose items a function makes. With a BatchSampler, an item is a batch, and `row` a list."""

    n_rows: int
    item: Callable[[Any], Any]

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: Any) -> Any:
        return self.item(row)


def plain_h5(task: Task) -> Path:
    """The same rows in a file as h5py writes it by default, in one piece: the fastest layout for single rows."""

    def write(target: Path) -> None:
        with h5py.File(task.h5) as source, h5py.File(target, "w") as file:
            for name in ("images", "labels"):
                file[name] = source[name][:]

    return convert_once(task.folder / "plain.h5", write)


def h5py_images(path: Path, cache_bytes: int | None = None) -> Callable[[], h5py.Dataset]:
    """What opens the images of a file once in each process, and keeps the handle.

    cache_bytes: size of the chunk cache of h5py. None: its default, 8 MiB since HDF5 2.0.
    """
    options = {} if cache_bytes is None else {"rdcc_nbytes": cache_bytes}
    return cache(lambda: h5py.File(path, **options)["images"])


def labels_of(path: Path) -> npt.NDArray[np.int64]:
    with h5py.File(path) as file:
        labels: npt.NDArray[np.int64] = file["labels"][:]
    return labels


def h5py_rows(task: Task, *, is_plain: bool = False, cache_bytes: int | None = None) -> Items:
    """(image, label) of an HDF5 file: what most people write first. The labels are in memory.

    is_plain: of `plain_h5`, not of the file that convert.py has written.
    """
    images = h5py_images(plain_h5(task) if is_plain else task.h5, cache_bytes)
    labels = labels_of(task.h5)
    return Items(len(labels), lambda row: (images()[row], int(labels[row])))


def h5py_batches(task: Task) -> Items:
    """Batches of `plain_h5`, each read by one call of h5py, which takes row numbers in ascending order only."""
    images = h5py_images(plain_h5(task))
    labels = labels_of(task.h5)

    def batch(rows: list[int]) -> Batch:
        ascending = sorted(rows)
        return images()[ascending], labels[ascending]

    return Items(len(labels), batch)


def loader(
    task: Task,
    *,
    rows: Callable[[Task], Any],
    workers: int | None = None,
    in_batches: bool = False,
    **options: Any,
) -> Contender:
    """torch's DataLoader, fully shuffled.

    workers: processes; None for one on each CPU. in_batches: a BatchSampler asks the Dataset for whole batches
    (batch_size=None), which saves the work for each item; its documentation recommends it for such files.
    """
    n_workers = task.n_workers if workers is None else workers
    options |= {"num_workers": n_workers, "persistent_workers": n_workers > 0}
    dataset = rows(task)
    if in_batches:
        sampler = BatchSampler(RandomSampler(dataset), task.batch_size, drop_last=True)
        batches = DataLoader(dataset, batch_size=None, sampler=sampler, **options)
    else:
        batches = DataLoader(dataset, task.batch_size, shuffle=True, drop_last=True, **options)
    return Contender([task.h5], lambda number: batches)


def ffcv_loader(task: Task, path: Path, pipelines: dict[str, Any], *, order: str, is_mapped: bool = True) -> Any:
    """order: RANDOM, a full shuffle, or QUASI_RANDOM, which mixes some pages at a time. is_mapped: the file is mapped
    (os_cache=True), as FFCV's tuning guide advises if it fits in memory; else FFCV caches the pages itself."""
    from ffcv.loader import Loader, OrderOption

    options = {"batch_size": task.batch_size, "num_workers": task.n_workers, "drop_last": True, "seed": 0}
    return Loader(str(path), os_cache=is_mapped, order=OrderOption[order], pipelines=pipelines, **options)


def ffcv(task: Task, *, of_images: bool, order: str, is_mapped: bool = True) -> Contender:
    """FFCV: rows without compression, compiled, one batch of which is read before the first epoch.

    of_images: RGBImageField(write_mode="raw"), which keeps the channels last, instead of NDArrayField.
    """
    from ffcv.fields import IntField, NDArrayField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder, SimpleRGBImageDecoder
    from ffcv.transforms import ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        of_array = NDArrayField(dtype=np.dtype("uint8"), shape=shape_of(task.h5)[1:])
        fields = {"image": RGBImageField("raw") if of_images else of_array, "label": IntField()}
        source = h5py_rows(task)

        def row(number: int) -> tuple[npt.NDArray[np.uint8], int]:
            image, label = source[number]
            return np.ascontiguousarray(image.transpose(1, 2, 0)) if of_images else image, label

        writer = DatasetWriter(str(target), fields, num_workers=task.n_workers)
        writer.from_indexed_dataset(Items(len(source), row))

    path = convert_once(task.folder / ("images.beton" if of_images else "rows.beton"), write)
    image = [SimpleRGBImageDecoder(), ToTensor(), ToTorchImage()] if of_images else [NDArrayDecoder(), ToTensor()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}
    loader = ffcv_loader(task, path, pipelines, order=order, is_mapped=is_mapped)
    batches = iter(loader)
    next(batches, None)
    batches.close()
    batches.join()
    if is_mapped:
        # FFCV keeps the file mapped, and mapped pages cannot be evicted. The first epoch maps the file again.
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
    of its speed, and the native reader of .npy files needs two to four times its CPU time. Large rows are views, which
    DALI's threads gather; smaller ones are gathered by NumPy beside a thread.
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


def litdata_folder(target: Path, write_row: Callable[[int], dict[str, Any]], n_rows: int, n_workers: int) -> None:
    """Write rows in chunks of 64 MB, which is LitData's default."""
    from litdata import optimize

    options = {"chunk_bytes": "64MB", "num_workers": n_workers, "start_method": "fork", "verbose": False}
    optimize(fn=write_row, inputs=list(range(n_rows)), output_dir=str(target), **options)


def litdata(task: Task) -> Contender:
    """LitData: StreamingDataset over a local folder of chunks, whose worker processes map them.

    Its shuffle is that of its documentation: chunks in random order, and within a chunk blocks of 256 rows, and the
    rows of a block.
    """
    from litdata import StreamingDataLoader, StreamingDataset

    def write(target: Path) -> None:
        rows = h5py_rows(task)
        litdata_folder(target, lambda row: dict(zip("xy", rows[row], strict=True)), len(rows), task.n_workers)

    folder = convert_once(task.folder / "litdata", write)
    rows = StreamingDataset(str(folder), shuffle=True, drop_last=True, batch_decode=0)  # no neighbours of a row
    options = {"num_workers": task.n_workers, "persistent_workers": True, "drop_last": True}
    loader = StreamingDataLoader(rows, batch_size=task.batch_size, **options)
    return Contender(sorted(folder.iterdir()), lambda number: ((batch["x"], batch["y"]) for batch in loader))


def streaming(task: Task) -> Contender:
    """Streaming: StreamingDataset over a local folder of MDS shards, in worker processes; its shuffle is py1e, by
    default. It shuffles blocks of 262,144 rows or more, which is a full shuffle of these files."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    def write(target: Path) -> None:
        rows = h5py_rows(task)
        columns = {"x": f"ndarray:uint8:{','.join(map(str, shape_of(task.h5)[1:]))}", "y": "int64"}
        with MDSWriter(out=str(target), columns=columns) as writer:
            for row in range(len(rows)):
                image, label = rows[row]
                writer.write({"x": image, "y": np.int64(label)})

    folder = convert_once(task.folder / "streaming", write)
    clean_stale_shared_memory()  # of a contender that was killed
    rows = StreamingDataset(local=str(folder), shuffle=True, batch_size=task.batch_size)
    options = {"num_workers": task.n_workers, "persistent_workers": True, "drop_last": True}
    loader = DataLoader(rows, task.batch_size, **options)
    return Contender(sorted(folder.iterdir()), lambda number: ((batch["x"], batch["y"]) for batch in loader))


LOADERS: dict[str, Callable[[Task], Contender]] = {
    **{
        f"ffcv, {name}, {order}": partial(ffcv, of_images=of_images, order=order)
        for name, of_images in (("images", True), ("arrays", False))
        for order in ("RANDOM", "QUASI_RANDOM")
    },
    "ffcv, images, QUASI_RANDOM, own cache": partial(ffcv, of_images=True, order="QUASI_RANDOM", is_mapped=False),
    "dali": dali,
    "spdl": spdl,
    "grain": grain,
    "litdata": litdata,
    "streaming": streaming,
}
CONTENDERS = {**LOADERS, FIXED: fixed_batch}


def is_peer(name: str) -> bool:
    """Whether a contender, of rows or of JPEG files, runs in the peers' environment."""
    return name.partition(",")[0] in PEERS
