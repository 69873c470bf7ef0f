"""A map-style `torch.utils.data.Dataset` as a source of pools: decoded by the worker processes of a DataLoader.

The rows go the same way as those of a file: a batch from a worker is copied to the staging memory of a pool, and the
pool moves to the device as a whole. One DataLoader runs on from epoch to epoch, so no epoch begins with idle workers.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fastgpu.process.config import Loader
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import BlockRead, PoolPlan, PoolReader, Source
from fastgpu.rows.field import Field
from fastgpu.rows.order import BlockSampler

POLL_S = 1
"""Interval at which dead workers are looked for."""
ALL = slice(None)
"""All rows of a Dataset."""


class DatasetSource(Source):
    """The rows of a map-style Dataset, as blocks of one row.

    Its items are mappings, or sequences in the order of `fields`, of arrays, tensors or numbers with a fixed shape. The
    attribute `class_names` (or torchvision's `classes`) is used if the Dataset has it, and so are arrays with the name
    of a field (or `targets`).
    """

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str], loader: Loader):
        self.name = name
        self.loader = loader
        self.items = _SeededDataset(dataset, fields)
        try:
            n_rows = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"data.dataset: {name} has no length; a map-style Dataset with __len__ is needed") from None
        if not n_rows:
            raise UserError(f"data.dataset: {name} has no rows")
        self.block_rows = np.ones(n_rows, np.int32)
        sample = _collate([self.items[0, 0]])
        self.fields = {key: Field(value.numpy().dtype, tuple(value.shape[1:])) for key, value in sample.items()}
        class_names = getattr(dataset, "class_names", getattr(dataset, "classes", None))
        self.attributes: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}

    def __len__(self) -> int:
        return len(self.block_rows)

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, if the Dataset has it as an attribute. Raises KeyError if it has not."""
        values = getattr(self.items.dataset, name, getattr(self.items.dataset, "targets", None))
        if values is None or len(values) != len(self.items.dataset):  # type: ignore[arg-type]
            raise KeyError(name)
        return np.asarray(values)[self.items.row_ids]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Rows as they are in epoch 0, read in this process. Training reads through `open_reader`."""
        for row, _, places in reads:
            batch = _collate([self.items[0, row]])
            self.check_types(batch)
            for name, value in batch.items():
                out[name][places] = value.numpy()

    def check_types(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise RankError if rows are not of the type and shape of the first row: they would be cut or wrapped."""
        for name, field in self.fields.items():
            value = batch[name]
            dtype = value.numpy().dtype
            if tuple(value.shape[1:]) != field.shape or not np.can_cast(dtype, field.dtype, "safe"):
                raise RankError(
                    f"{self.name}: {name} is {field} in its first row, but {Field(dtype, tuple(value.shape[1:]))} in "
                    "others; give all rows the same type and shape"
                )

    def take(self, name: str, row_ids: np.ndarray) -> "DatasetSource":
        """Some rows of this source: (n,) row ids. Each gives the same items as before."""
        part = copy(self)
        part.name = name
        part.items = self.items.take(row_ids)
        part.block_rows = self.block_rows[row_ids]
        return part

    def open_reader(self, order: BlockSampler, n_readers: int) -> PoolReader:
        """A pool of `n_readers` worker processes; 0: read in this process."""
        return WorkerPool(self, order, n_readers)


def open_dataset(
    key: str, path: str | Sequence[str], fields: Mapping[str, str], *, factory: str, loader: Loader
) -> DatasetSource:
    """Call `factory` ("package.module:Class") with `path`. Raises UserError if there is no such class.

    key: the config key that holds `path`, for messages.
    """
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # torchrun puts only the folder of the script on sys.path
    try:
        make = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"data.dataset is {factory}: {error}; name a class as package.module:Class") from None
    finally:
        sys.path.pop(0)
    dataset = make(path)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        raise UserError(
            f"data.dataset is {factory}, which is not a map-style Dataset; rows need numbers to be shuffled"
        )
    return DatasetSource(f"{name}({path!r}) of {key}", dataset, fields, loader)


class _SeededDataset(Dataset):
    """Items by (epoch, row). All randomness in an item follows from these two numbers, whichever worker draws it."""

    def __init__(self, dataset: Dataset, fields: Mapping[str, str], row_ids: np.ndarray | slice = ALL):
        """row_ids: the rows of the dataset that are used."""
        self.dataset = dataset
        self.row_ids = row_ids
        self._fields = fields

    def take(self, row_ids: np.ndarray) -> "_SeededDataset":
        return _SeededDataset(self.dataset, self._fields, row_ids)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, row = key
        if isinstance(self.row_ids, np.ndarray):
            row = int(self.row_ids[row])
        seed = (epoch * 1_000_003 + row) % (1 << 32)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        item = self.dataset[row]
        if isinstance(item, Mapping):
            return {name: item[source] for name, source in self._fields.items()}
        return dict(zip(self._fields, item, strict=True))


def _collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack the fields; in a worker, directly into shared memory."""
    return {name: default_collate([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


class WorkerPool:
    """Reads the rows of one rank, epoch after epoch, from worker processes. One thread may call `read`."""

    n_threads = 1

    def __init__(self, source: DatasetSource, order: BlockSampler, n_workers: int):
        self._source = source
        self._order = order
        self._n_workers = n_workers
        self._next_key: tuple[int, int] | None = None  # (epoch, row of this rank) that the running loader gives next
        self._batches: Iterator[dict[str, torch.Tensor]] = iter(())

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch. Each read is a batch: the epoch, the first row of this rank, and the places."""
        row = consumed // self._order.num_replicas
        for plan in self._order.pools(epoch, consumed):
            reads = []
            for start in range(plan.n_skipped_rows, plan.n_rows, self._order.batch_size):
                stop = min(start + self._order.batch_size, plan.n_rows)
                reads.append(BlockRead(epoch, row, np.arange(start, stop)))
                row += stop - start
            yield plan._replace(reads=reads)

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Copy the next batches to their places. Raises RankError if a worker died or hangs."""
        for epoch, row, places in reads:
            self._read_batch(epoch, row, places, out)

    def _read_batch(self, epoch: int, row: int, places: np.ndarray, out: Mapping[str, Any]) -> None:
        if self._next_key != (epoch, row):
            self._batches = iter(self._start_loader(epoch, row))
        try:
            batch = self._next_batch()
        except BaseException:
            self.close()
            raise
        self._source.check_types(batch)
        for name, field in self._source.fields.items():
            out[name][places[0] : places[-1] + 1] = batch[name].numpy().astype(field.dtype, copy=False)
        row += len(places)
        if row < len(self._order):
            self._next_key = (epoch, row)
        elif self._source.loader.persistent_workers:
            self._next_key = (epoch + 1, 0)
        else:
            self._next_key = None

    def close(self) -> None:
        """End the workers now: the garbage collector would keep them while anyone holds the traceback of an error."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)  # private, and the only way torch offers
        if shut_down:
            shut_down()
        self._next_key = None
        self._batches = iter(())

    def _start_loader(self, epoch: int, row: int) -> DataLoader:
        return DataLoader(
            self._source.items,
            batch_sampler=self._batches_from(epoch, row),
            collate_fn=_collate,
            num_workers=self._n_workers,
            prefetch_factor=self._source.loader.prefetch_factor if self._n_workers else None,
            timeout=POLL_S if self._n_workers else 0,
        )

    def _batches_from(self, epoch: int, row: int) -> Iterator[list[tuple[int, int]]]:
        """The keys of each batch, from a row of an epoch on, without end if the workers are persistent."""
        consumed = row * self._order.num_replicas
        for later in count(epoch) if self._source.loader.persistent_workers else (epoch,):
            for plan in self._order.pools(later, consumed if later == epoch else 0):
                row_ids = self._order.row_ids(plan)[plan.n_skipped_rows :].tolist()
                for start in range(0, len(row_ids), self._order.batch_size):
                    yield [(later, row_id) for row_id in row_ids[start : start + self._order.batch_size]]

    def _next_batch(self) -> dict[str, torch.Tensor]:
        name = self._source.name
        timeout_s = self._source.loader.timeout_s
        waited_s = 0
        while True:
            try:
                return next(self._batches)
            except (RuntimeError, OSError, EOFError) as error:
                text = str(error)
                if "in DataLoader worker process" in text:  # an error of the Dataset, with the traceback of the worker
                    raise
                died_handing_over = not isinstance(error, RuntimeError) and self._n_workers
                if died_handing_over or "exited unexpectedly" in text:
                    raise RankError(
                        f"one of the loader.num_workers ({self._n_workers}) was killed or crashed while it read "
                        f"{name}; if memory ran out use fewer of them; loader.num_workers=0 shows its error"
                    ) from None
                if "timed out" not in text:
                    raise
                waited_s += POLL_S
            if waited_s >= timeout_s:
                raise RankError(
                    f"no worker has sent a batch of {name} for {waited_s} s: it hangs, or is slower than "
                    f"loader.timeout_s ({timeout_s}) allows; try loader.num_workers=0"
                )
