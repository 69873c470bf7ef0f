"""A `torch.utils.data.Dataset` of the user's own as a source of pools: decoded by DataLoader's worker processes.

The rows go the same way as those of a file: a batch from a worker is copied into the pool's staging memory, and the
pool moves to the device as one. One loader runs on from epoch to epoch, so no epoch begins with idle workers.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import PoolPlan, Read, Source
from fastgpu.rows.field import Field
from fastgpu.rows.order import BlockSampler

POLL_S = 1  # how soon a dead worker is noticed


class LoaderOptions(NamedTuple):
    """See torch.utils.data.DataLoader. persistent_workers: False starts new ones each epoch."""

    prefetch_factor: int = 2
    persistent_workers: bool = True
    timeout_s: int = 300


class DatasetRows(Source):
    """The rows of a map-style Dataset, seen as a store whose blocks are single rows.

    Its items are mappings, or sequences in the order of `fields`, of arrays, tensors or numbers of one shape each.
    `class_names` (or torchvision's `classes`) and arrays named like a field (or `targets`) are used where it has them.
    """

    in_workers = True

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str], options: LoaderOptions):
        self.name, self.options = name, options
        self.items = _Items(dataset, fields)
        try:
            rows = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"data.dataset: {name} has no length; a map-style Dataset with __len__ is needed") from None
        if not rows:
            raise UserError(f"data.dataset: {name} has no rows")
        self.block_rows = np.ones(rows, np.int32)
        sample = _collate([self.items[0, 0]])
        self.fields = {key: Field(value.numpy().dtype, tuple(value.shape[1:])) for key, value in sample.items()}
        names = getattr(dataset, "class_names", getattr(dataset, "classes", None))
        self.attributes: dict[str, Any] = {"class_names": list(names)} if names else {}

    def __len__(self) -> int:
        return len(self.block_rows)

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, where the Dataset has it as an attribute; else KeyError."""
        found = getattr(self.items.dataset, name, getattr(self.items.dataset, "targets", None))
        if found is None or len(found) != len(self):
            raise KeyError(name)
        return np.asarray(found)


def open_dataset(
    key: str, path: str | Sequence[str], fields: Mapping[str, str], *, factory: str, options: LoaderOptions
) -> DatasetRows:
    """What `factory` ("package.module:Class") makes of `path`. Raises UserError if there is no such class.

    key: the config key that holds `path`, for messages.
    """
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # torchrun starts the script with its own folder only
    try:
        make = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"data.dataset is {factory}: {error}; name a class as package.module:Class") from None
    finally:
        sys.path.pop(0)
    dataset = make(path)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        raise UserError(f"data.dataset is {factory}, no map-style Dataset: its rows have no numbers to be shuffled by")
    return DatasetRows(f"{name}({path!r}) of {key}", dataset, fields, options)


class _Items(Dataset):
    """Items by (epoch, row); everything random in them follows from these two, whichever worker draws it."""

    def __init__(self, dataset: Dataset, fields: Mapping[str, str]):
        self.dataset, self._fields = dataset, fields

    def __getitem__(self, at: tuple[int, int]) -> dict[str, Any]:
        epoch, row = at
        seed = (epoch * 1_000_003 + row) % (1 << 32)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        item = self.dataset[row]
        if isinstance(item, Mapping):
            return {name: item[source] for name, source in self._fields.items()}
        return dict(zip(self._fields, item, strict=True))


def _collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Fields stacked; in a worker, straight into shared memory."""
    return {name: default_collate([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


class Loading:
    """One epoch after the other of a rank's rows, out of worker processes; stands in for both store and order."""

    def __init__(self, rows: DatasetRows, order: BlockSampler, workers: int):
        self._rows, self._order, self._workers = rows, order, workers
        self.total_size, self.fields, self.row_bytes = order.total_size, rows.fields, rows.row_bytes
        self.block_rows, self.lengths = rows.block_rows, rows.lengths
        self._at: tuple[int, int] | None = None  # (epoch, row of this rank) that the running loader gives next
        self._batches: Iterator[dict[str, torch.Tensor]] = iter(())

    def pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch; a read is a batch: (epoch, row of this rank in it, places)."""
        at = consumed // self._order.num_replicas
        for plan in self._order.pools(epoch, consumed):
            reads = []
            for start in range(plan.skip_rows, plan.rows, self._order.batch_rows):
                stop = min(start + self._order.batch_rows, plan.rows)
                reads.append(Read(epoch, at, np.arange(start, stop)))
                at += stop - start
            yield plan._replace(reads=reads)

    def read(self, reads: Iterable[Read], out: Mapping[str, np.ndarray]) -> None:
        """The next batches -> out[field][places]. One thread only. Raises RankError for a dead or hung worker."""
        for epoch, row, places in reads:
            self._read_batch(epoch, row, places, out)

    def _read_batch(self, epoch: int, row: int, places: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        if self._at != (epoch, row):
            self._batches = iter(self._loader(epoch, row))
        try:
            batch = self._next()
        except BaseException:
            self.close()
            raise
        for name, field in self._rows.fields.items():
            out[name][places[0] : places[-1] + 1] = batch[name].numpy().astype(field.dtype, copy=False)
        row += len(places)
        if row < len(self._order):
            self._at = (epoch, row)
        else:
            self._at = (epoch + 1, 0) if self._rows.options.persistent_workers else None

    def close(self) -> None:
        """End the workers now: left to the garbage collector, they live on while anyone keeps an error's traceback."""
        getattr(self._batches, "_shutdown_workers", lambda: None)()
        self._at, self._batches = None, iter(())

    def _loader(self, epoch: int, row: int) -> DataLoader:
        options = self._rows.options
        return DataLoader(
            self._rows.items,
            batch_sampler=self._batches_from(epoch, row),
            collate_fn=_collate,
            num_workers=self._workers,
            prefetch_factor=options.prefetch_factor if self._workers else None,
            timeout=POLL_S if self._workers else 0,
        )

    def _batches_from(self, epoch: int, row: int) -> Iterator[list[tuple[int, int]]]:
        consumed = row * self._order.num_replicas
        for later in count(epoch) if self._rows.options.persistent_workers else (epoch,):
            for plan in self._order.pools(later, consumed if later == epoch else 0):
                numbers = self._order.row_numbers(plan)[plan.skip_rows :].tolist()
                for start in range(0, len(numbers), self._order.batch_rows):
                    yield [(later, number) for number in numbers[start : start + self._order.batch_rows]]

    def _next(self) -> dict[str, torch.Tensor]:
        waited_s = 0
        while True:
            try:
                return next(self._batches)
            except (RuntimeError, OSError, EOFError) as error:
                cut_off = not isinstance(error, RuntimeError) and self._workers  # it died while it handed over a batch
                if "in DataLoader worker process" in str(error):  # the Dataset's own error, with the worker's traceback
                    raise
                if cut_off or "exited unexpectedly" in str(error):
                    raise RankError(
                        f"one of the loader.workers ({self._workers}) was killed or crashed while it read "
                        f"{self._rows.name}; if memory ran out use fewer of them; loader.workers=0 shows its error"
                    ) from None
                if "timed out" not in str(error):
                    raise
                waited_s += POLL_S
            if waited_s >= self._rows.options.timeout_s:
                raise RankError(
                    f"no worker has sent a batch of {self._rows.name} for {waited_s} s: it hangs, or is slower than "
                    f"loader.timeout_s ({self._rows.options.timeout_s}) allows; try loader.workers=0"
                )
