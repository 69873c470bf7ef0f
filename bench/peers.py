"""The peers that the loader benchmark compares with, each in the setting that its own documentation calls fastest.

Each class converts the h5 file once to the format that its peer reads (`folder`), and then yields shuffled epochs of
uint8 batches in host memory. A batch of a class with a ring of buffers (FFCV, DALI, SPDL, Grain) holds until the
next batch is asked for. A peer that batches inside worker processes drops the last partial batch of every worker, and
not of the epoch alone; count the rows that come, not the rows that the file has.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import shutil
import sys
import tarfile
import threading
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

Batch = tuple[Any, Any]

SHARD_BYTES = 1 << 26  # 64 MB: what litdata and MDS recommend for a chunk; tar shards take the same
BLOCK_BYTES = 1 << 26  # read from h5 at a time while converting
LARGE_ROW_BYTES = 1 << 14  # from here on DALI and litdata are faster with a setting that costs more per row


def _convert(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, written by `write` under a temporary name first: an interrupted conversion is never reused."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        if partial.is_dir():
            shutil.rmtree(partial)
        write(partial)
        partial.rename(target)
    return target


def _blocks(h5: Path) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """The file in order, in blocks of about `BLOCK_BYTES`."""
    with h5py.File(h5) as file:
        images, labels = file["images"], file["labels"]
        rows = max(1, BLOCK_BYTES // math.prod(images.shape[1:]))
        for start in range(0, len(images), rows):
            yield images[start : start + rows], labels[start : start + rows].astype(np.int64)


def shape_of(h5: Path) -> tuple[int, ...]:
    """(rows, C, H, W)"""
    with h5py.File(h5) as file:
        return tuple(map(int, file["images"].shape))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def npy_arrays(h5: Path, folder: Path) -> Path:
    """A folder with images.npy and labels.npy, for the peers that have no file format of their own."""

    def write(target: Path) -> None:
        target.mkdir()
        shape = shape_of(h5)
        images = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
        labels = np.lib.format.open_memmap(target / "labels.npy", "w+", np.int64, shape[:1])
        done = 0
        for block, numbers in _blocks(h5):
            images[done : done + len(block)], labels[done : done + len(block)] = block, numbers
            done += len(block)
        images.flush()
        labels.flush()

    return _convert(folder / "arrays", write)


def permutation(rows: int, batch_size: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    """The row numbers of one epoch, fully shuffled: one row of the result is a batch."""
    order = np.random.default_rng((seed, number)).permutation(rows)
    return order[: rows // batch_size * batch_size].reshape(-1, batch_size)


def _quiet_about_read_only_arrays() -> None:
    """Rows that are views of a file are read-only; torch warns of that in every worker, though they are only copied."""
    warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")


class _H5Rows:
    """(image, label) by row number for FFCV's writer: opened in each of its processes, read in blocks."""

    def __init__(self, h5: Path) -> None:
        self.h5, self.rows, self.start, self.block = h5, shape_of(h5)[0], -1, (np.empty(0), np.empty(0))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], int]:
        start = index // 100 * 100  # the writer hands out 100 rows at a time
        if start != self.start:
            with h5py.File(self.h5) as file:
                self.block = file["images"][start : start + 100], file["labels"][start : start + 100]
            self.start = start
        return self.block[0][index - start], int(self.block[1][index - start])


class Ffcv:
    """FFCV: raw NDArrayField rows (no image codec), OrderOption.RANDOM (a full shuffle), os_cache=True, compiled.

    `os_cache=True` maps the file, which the performance guide advises where the dataset fits in memory. The kernels
    are compiled, and a first batch is read, before the first epoch.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        from ffcv.fields import IntField, NDArrayField
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

        def write(target: Path) -> None:
            image = NDArrayField(dtype=np.dtype("uint8"), shape=shape_of(h5)[1:])
            writer = DatasetWriter(str(target), {"image": image, "label": IntField()}, num_workers=workers)
            writer.from_indexed_dataset(_H5Rows(h5))

        self.path = _convert(folder / "rows.beton", write)
        self.loader = Loader(
            str(self.path),
            batch_size=batch_size,
            num_workers=workers,
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=seed,
            drop_last=True,
            pipelines={"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
        )
        warm = iter(self.loader)
        next(warm, None)
        warm.close()
        warm.join()
        # FFCV maps the file for good; mapped pages cannot be evicted. The first epoch maps it anew.
        self.loader.memory_manager.context.mmap = None
        del warm  # in a cycle that holds the mapping
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
    """One batch per call for DALI's external source: row views for its threads to copy, or a gathered batch.

    DALI reads a batch after the call (`no_copy`), so a gathered one stays in a ring that outlasts the prefetch queue.
    """

    def __init__(self, arrays: Path, batch_size: int, seed: int, ring: int) -> None:
        self.images = np.asarray(np.load(arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(arrays / "labels.npy")
        self.views = self.images[0].nbytes >= LARGE_ROW_BYTES
        self.batch_size, self.seed = batch_size, seed
        self.ring = [np.zeros((0 if self.views else batch_size, *self.images.shape[1:]), np.uint8) for _ in range(ring)]
        self.kept: list[Any] = [None] * ring  # labels and views of the batches in flight
        self.calls = 0
        self.order: Iterator[npt.NDArray[np.int64]] = iter(())

    def start(self, number: int) -> None:
        self.order = iter(permutation(len(self.images), self.batch_size, self.seed, number))

    def __call__(self) -> tuple[Any, Any]:
        rows = next(self.order)  # its StopIteration is how DALI learns of the end of the epoch
        slot = self.calls % len(self.ring)
        self.calls += 1
        labels = self.labels[rows]
        if self.views:
            batch: Any = [self.images[row] for row in rows.tolist()]
        else:
            batch = np.take(self.images, rows, axis=0, out=self.ring[slot], mode="clip")
        self.kept[slot] = (batch, labels)
        return batch, labels


class Dali:
    """DALI, CPU pipeline: an external source in batch mode without copies, over memory-mapped arrays; a full shuffle.

    The fastest of those tried: `parallel=True` (worker processes) and the native webdataset reader (a shuffle buffer)
    gave less than half of it for both row sizes, `exec_dynamic=True` less as well. Rows of 16 KiB and more go in as
    views, and DALI's own threads gather them; smaller ones are gathered with NumPy, which then overlaps with one DALI
    thread. Yields NCHW arrays.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        from nvidia.dali import fn
        from nvidia.dali.pipeline import Pipeline

        self.arrays = npy_arrays(h5, folder)
        depth = 3
        self.source = _DaliSource(self.arrays, batch_size, seed, ring=2 * depth + 2)
        self.pipeline = Pipeline(
            batch_size=batch_size,
            num_threads=workers if self.source.views else 1,
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
        """Takes what the pipeline had prefetched of an epoch that was given up, so that the next starts clean."""
        self.source.order = iter(())
        with contextlib.suppress(StopIteration):
            while True:
                self.pipeline.run()
        self.pipeline.reset()


def _tar_sample(sample: dict[str, Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], int]:
    return np.frombuffer(sample["bin"], np.uint8).reshape(shape), int(sample["cls"])


class WebDataset:
    """webdataset: tar shards of raw bytes in order, shards shuffled, then a buffer of 1000 rows per worker; WebLoader.

    As the documentation has it: batches are made (torch's collate, straight into shared memory) in the workers, which
    persist. The shuffle is a buffer's, so not a full one, and its seeds count the epochs rather than take `number`.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        import webdataset as wds
        from torch.utils.data import default_collate

        rows, *shape = shape_of(h5)

        def write(target: Path) -> None:
            target.mkdir()
            shards = max(4, math.ceil(rows * math.prod(shape) / SHARD_BYTES))
            shards = math.ceil(shards / 4) * 4  # the workers get shards in turn: keep them even
            starts = [rows * shard // shards for shard in range(shards)]
            tar, row = None, 0
            for images, labels in _blocks(h5):
                for image, label in zip(images, labels, strict=True):
                    if tar is None or (starts and row == starts[0]):
                        if tar is not None:
                            tar.close()
                        starts.pop(0)
                        tar = tarfile.open(target / f"{row:08d}.tar", "w")  # noqa: SIM115
                    for ending, data in (("bin", image.tobytes()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{row:08d}.{ending}")
                        member.size = len(data)
                        tar.addfile(member, BytesIO(data))
                    row += 1
            if tar is not None:
                tar.close()

        _quiet_about_read_only_arrays()
        self.tars = _convert(folder / "tars", write)
        shards = _files(self.tars)
        dataset = (
            wds.WebDataset([str(path) for path in shards], shardshuffle=len(shards), detshuffle=True, seed=seed)
            .compose(wds.detshuffle(1000, 1000, seed=seed))
            .map(_Partial(_tar_sample, tuple(shape)))
            .batched(batch_size, collation_fn=default_collate, partial=False)
        )
        self.loader = wds.WebLoader(
            dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0, prefetch_factor=2
        )

    def files(self) -> list[Path]:
        return _files(self.tars)

    def epoch(self, number: int) -> Iterator[Batch]:
        yield from self.loader


class _Partial:
    """`function` with a last argument: picklable."""

    def __init__(self, function: Callable[..., Any], last: Any) -> None:
        self.function, self.last = function, last

    def __call__(self, first: Any) -> Any:
        return self.function(first, self.last)


class LitData:
    """litdata: 64 MB chunks of tensors, mapped in place, with the default shuffle, in a StreamingDataLoader.

    The default shuffle permutes the chunks, and within a chunk blocks of 256 rows and the rows of a block. It goes by
    the epochs that the loader counts itself, so `number` is not used. `batch_decode` is not left at "auto", whose
    windows do not fit the shuffle here and are decoded many times over (a sixth of the speed for small rows).
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        import torch
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import Cache

        def write(target: Path) -> None:
            target.mkdir()
            cache, row = Cache(str(target), chunk_bytes=SHARD_BYTES), 0
            for images, labels in _blocks(h5):
                for image, label in zip(images, labels, strict=True):
                    cache[row] = (torch.from_numpy(image), int(label))
                    row += 1
            cache.done()
            cache.merge()

        _quiet_about_read_only_arrays()
        self.chunks = _convert(folder / "litdata", write)
        decode = 0 if math.prod(shape_of(h5)[1:]) >= LARGE_ROW_BYTES else 256  # row by row, or a block of the shuffle
        dataset = StreamingDataset(str(self.chunks), shuffle=True, drop_last=True, seed=seed, batch_decode=decode)
        self.loader = StreamingDataLoader(
            dataset, batch_size=batch_size, num_workers=workers, drop_last=True, persistent_workers=workers > 0
        )

    def files(self) -> list[Path]:
        return _files(self.chunks)

    def epoch(self, number: int) -> Iterator[Batch]:
        for images, labels in self.loader:
            if len(images) == self.loader.batch_size:
                yield images, labels


class MosaicStreaming:
    """mosaicml-streaming: local MDS shards of 64 MB, ndarray encoding of fixed shape, `py1e` shuffle, DataLoader.

    `py1e` (the default) spreads the rows of a shard over a window of shards. One canonical node, as for one machine.
    The workers persist; the epochs are counted by the dataset, so `number` is not used.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        # Its vision datasets, not used here, import torchvision, which fails unless it was built for this very torch.
        sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
        from streaming import MDSWriter, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        shape = shape_of(h5)[1:]

        def write(target: Path) -> None:
            columns = {"image": f"ndarray:uint8:{','.join(map(str, shape))}", "label": "int64"}
            with MDSWriter(out=str(target), columns=columns, size_limit=SHARD_BYTES) as writer:
                for images, labels in _blocks(h5):
                    for image, label in zip(images, labels, strict=True):
                        writer.write({"image": image, "label": int(label)})

        _quiet_about_read_only_arrays()
        self.shards = _convert(folder / "mds", write)
        clean_stale_shared_memory()  # of a run that was killed: its names would be taken for this one's
        dataset = StreamingDataset(
            local=str(self.shards), batch_size=batch_size, shuffle=True, shuffle_seed=seed, num_canonical_nodes=1
        )
        self.loader = DataLoader(
            dataset, batch_size=batch_size, num_workers=workers, drop_last=True, persistent_workers=workers > 0
        )

    def files(self) -> list[Path]:
        return _files(self.shards)

    def epoch(self, number: int) -> Iterator[Batch]:
        for batch in self.loader:
            yield batch["image"], batch["label"]


class Spdl:
    """SPDL: a PipelineBuilder with one gathering thread per worker over memory-mapped arrays; a full shuffle.

    `numpy.take` into buffers that are used again: it lets go of the GIL, and no page is touched for the first time.
    One pipeline serves all epochs: its source waits for the batches of the next one, so that nothing is read ahead of
    an epoch, and no epoch pays for the pipeline's start and end (0.1 s). Batches come in the order of completion.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        from spdl.pipeline import PipelineBuilder

        self.arrays = npy_arrays(h5, folder)
        self.images = np.asarray(np.load(self.arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(self.arrays / "labels.npy")
        self.batch_size, self.seed = batch_size, seed
        self.orders: queue.SimpleQueue[tuple[object, npt.NDArray[np.int64]]] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(workers + 4):
            self.free.put(np.zeros((batch_size, *self.images.shape[1:]), np.uint8))
        self.pipeline = (
            PipelineBuilder()
            .add_source(self._source())
            .pipe(self._gather, concurrency=workers)
            .add_sink(2)
            .build(num_threads=workers, use_thread_output_queue=True)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it warns of daemon threads; there is nothing to finish
            self.pipeline.start(daemon=True)

    def _source(self) -> Iterator[tuple[object, npt.NDArray[np.int64]]]:
        """Ends with the main thread: SPDL's source thread would keep the interpreter alive."""
        while threading.main_thread().is_alive():
            try:
                yield self.orders.get(timeout=0.2)
            except queue.Empty:
                continue

    def _gather(self, item: tuple[object, npt.NDArray[np.int64]]) -> tuple[object, Any, Any]:
        epoch, rows = item
        images = self.free.get()
        return epoch, np.take(self.images, rows, axis=0, out=images, mode="clip"), self.labels[rows]

    def files(self) -> list[Path]:
        return _files(self.arrays)

    def epoch(self, number: int) -> Iterator[Batch]:
        epoch = object()  # tells the batches of an epoch that was given up from this one's
        order = permutation(len(self.images), self.batch_size, self.seed, number)
        for rows in order:
            self.orders.put((epoch, rows))
        left = len(order)
        while left:
            of, images, labels = self.pipeline.get_item()
            try:
                if of is epoch:
                    left -= 1
                    yield images, labels
            finally:
                self.free.put(images)


class _GrainBatches:
    """A Grain source whose elements are the row numbers of a batch."""

    def __init__(self, order: npt.NDArray[np.int64]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.order[index]


class Grain:
    """Grain: a random-access source of shuffled row numbers, a batch each, gathered by `map` in `workers` threads.

    A full shuffle, drawn by NumPy: Grain's own shuffle() and batch() work row by row in Python, which holds the GIL,
    and came to a third of this for large rows and a twentieth for small ones; worker processes (mp_prefetch) did not
    make up for it. Buffers are used again, as for SPDL: fresh ones made large rows up to four times slower.
    """

    def __init__(self, h5: Path, folder: Path, batch_size: int, workers: int, seed: int) -> None:
        import grain

        self.arrays = npy_arrays(h5, folder)
        self.images = np.asarray(np.load(self.arrays / "images.npy", mmap_mode="r"))
        self.labels = np.load(self.arrays / "labels.npy")
        self.batch_size, self.seed = batch_size, seed
        self.free: queue.SimpleQueue[npt.NDArray[np.uint8]] = queue.SimpleQueue()
        self.options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)

    def _gather(self, rows: npt.NDArray[np.int64]) -> Batch:
        try:
            images = self.free.get_nowait()
        except queue.Empty:
            images = np.empty((self.batch_size, *self.images.shape[1:]), np.uint8)
        return np.take(self.images, rows, axis=0, out=images, mode="clip"), self.labels[rows]

    def files(self) -> list[Path]:
        return _files(self.arrays)

    def epoch(self, number: int) -> Iterator[Batch]:
        import grain

        order = permutation(len(self.images), self.batch_size, self.seed, number)
        dataset = grain.MapDataset.source(_GrainBatches(order)).map(self._gather)
        for images, labels in dataset.to_iter_dataset(self.options):
            yield images, labels
            self.free.put(images)


PEERS: dict[str, type] = {
    "ffcv": Ffcv,
    "dali": Dali,
    "webdataset": WebDataset,
    "litdata": LitData,
    "mosaicml-streaming": MosaicStreaming,
    "spdl": Spdl,
    "grain": Grain,
}
