"""A map-style `torch.utils.data.Dataset` as a source of pools: decoded by the worker processes of a DataLoader.

The rows go the same way as those of a file: a batch from a worker is copied to the staging memory of a pool, and the
pool moves to the device as a whole. One DataLoader runs on from epoch to epoch, so no epoch begins with idle workers.
"""

import multiprocessing.process
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from importlib import import_module
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fastgpu.process.config import Loader
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import BlockRead, PoolPlan, PoolReader, Source
from fastgpu.rows.field import Field
from fastgpu.rows.order import BlockSampler

POLL_S = 1
"""Interval at which dead workers are looked for."""
GRACE_S = 2.0
"""How long workers may take to end before they are killed."""
KILL_S = 3.0
"""How long to wait for the end of workers that died or were killed. The kernel may hold them for ever."""
MAX_NAMED = 8
"""Maximum number of rows that a message names."""
NO_ARRAY = (TypeError, ValueError, RuntimeError)
"""What NumPy and torch raise for values that are no array: lists of unequal length, text, tensors on a GPU."""
NO_PICKLE = (PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot send to a process that is no fork, which is the default from Python 3.14 on."""

Key = tuple[int, int]
"""(epoch, row)"""
Batch = dict[str, torch.Tensor]
"""{field: (n, *shape)}"""


class DatasetSource(Source):
    """The rows of a map-style Dataset, as blocks of one row.

    Its items are mappings, or sequences in the order of `fields`, of arrays, tensors or numbers with a fixed shape. The
    attribute `class_names` (or torchvision's `classes`) is used if the Dataset has it, and so are arrays with the name
    of a field (or `targets`) if they have the values of the items (see `column`).
    """

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str], loader: Loader):
        self.name = name
        self.loader = loader
        self.items = _SeededDataset(name, dataset, fields)
        try:
            n_rows = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"data.dataset: {name} has no length; a map-style Dataset with __len__ is needed") from None
        if not n_rows:
            raise UserError(f"data.dataset: {name} has no rows")
        self.block_rows = np.ones(n_rows, np.int32)
        self.fields = self.items.types = {}
        self._first_row = self.items[0, 0]
        for field, value in self._first_row.items():
            found = _type_of(value)
            if isinstance(found, str):
                raise UserError(
                    f"data.dataset: {name} has {field} as {found}; use numbers, arrays or tensors of the CPU"
                )
            self.fields[field] = found
        class_names = getattr(dataset, "class_names", getattr(dataset, "classes", None))
        self.attributes: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}

    def __len__(self) -> int:
        return len(self.block_rows)

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, if the Dataset has it as an attribute. Raises KeyError if it has not.

        An attribute counts only if it has numbers of the shape of the field, and what the item of the first row has:
        others are file names, names of classes, or classes that the items number in another way.
        """
        for attribute in (name, "targets"):
            with suppress(*NO_ARRAY):
                values = np.asarray(getattr(self.items.dataset, attribute, None))
                if self._agrees(values, name):
                    return values[self.items.row_ids]
        raise KeyError(name)

    def _agrees(self, values: np.ndarray, name: str) -> bool:
        """Whether an array can be a field of all rows, as far as the first row tells."""
        field = self.fields[name]
        is_float = field.dtype.kind == "f"
        n_rows = len(self.items.dataset)  # type: ignore[arg-type]
        if values.shape != (n_rows, *field.shape) or values.dtype.kind not in ("buif" if is_float else "bui"):
            return False
        first = values[0].astype(field.dtype) if is_float else values[0]
        return np.array_equal(first, torch.as_tensor(self._first_row[name]).numpy(), equal_nan=True)

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Rows as they are in epoch 0, read in this process. Training reads through `open_reader`."""
        for row, _, places in reads:
            for name, value in self.items.stack([(0, row)]).items():
                out[name][places] = value.numpy()

    def take(self, name: str, row_ids: np.ndarray) -> "DatasetSource":
        """Some rows of this source: (n,) row ids. Each gives the same items as before."""
        part = copy(self)
        part.name = name
        part.items = copy(self.items)
        part.items.row_ids = row_ids
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

    types: Mapping[str, Field]
    """Type and shape of each field in the first row."""

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str]):
        self.dataset = dataset
        self.row_ids: np.ndarray | slice = slice(None)
        """The rows of the dataset that are used."""
        self._name = name
        self._fields = fields

    def row_id(self, row: int) -> int:
        """The number of a row in the dataset."""
        return int(self.row_ids[row]) if isinstance(self.row_ids, np.ndarray) else row

    def __getitem__(self, key: Key) -> dict[str, Any]:
        epoch, row = key[0], self.row_id(key[1])
        seed = (epoch * 1_000_003 + row) % (1 << 32)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too, and take 60 times as long
        try:
            item = self.dataset[row]
            if isinstance(item, Mapping):
                if missing := [source for source in self._fields.values() if source not in item]:
                    raise UserError(
                        f"data.dataset: the items of {self._name} have {', '.join(map(str, item))}, not "
                        f"{', '.join(missing)}; name what they have in data.fields, or in --fields NAME=NAME of repack"
                    )
                return {name: item[source] for name, source in self._fields.items()}
            values = item if isinstance(item, Sequence) else (item,)  # a tensor is one value
            if len(values) != len(self._fields):
                raise UserError(
                    f"data.dataset: the items of {self._name} have {len(values)} values, but {len(self._fields)} names "
                    f"are given: {', '.join(self._fields)}; name all of them, in their order, in data.fields, or in "
                    "--fields NAME=NAME of repack"
                )
            return dict(zip(self._fields, values, strict=True))
        except Exception as error:
            error.add_note(f"in row {row} of {self._name}")
            raise

    def __getitems__(self, keys: list[Key]) -> "Batch | RankError":
        """A batch, which torch asks for by this method. An error is returned: torch would wrap it in a traceback."""
        try:
            return self.stack(keys)
        except RankError as error:
            return error

    def stack(self, keys: list[Key]) -> "Batch":
        """The rows as (n, *shape) for each field; in a worker, in shared memory.

        Raises RankError if a row is not of the type and shape of the first row: it would be cut or wrapped.
        """
        items = [self[key] for key in keys]
        return {name: self._stack(name, [item[name] for item in items], keys) for name in self._fields}

    def _stack(self, name: str, values: list[Any], keys: list[Key]) -> torch.Tensor:
        field = self.types[name]
        dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
        try:
            rows = [torch.as_tensor(value) for value in values]
            if {row.dtype for row in rows} == {dtype}:  # of others, default_collate would wrap numbers in a worker
                batch = default_collate(rows)
                if tuple(batch.shape[1:]) == field.shape:
                    return batch
        except NO_ARRAY:
            pass  # the next line says what it is, or raises it again
        rows = [self._convert(name, value, row) for value, (_, row) in zip(values, keys, strict=True)]
        return default_collate([row.to(dtype) for row in rows])

    def _convert(self, name: str, value: object, row: int) -> torch.Tensor:
        field = self.types[name]
        found = _type_of(value)
        if isinstance(found, str) or found.shape != field.shape or not np.can_cast(found.dtype, field.dtype, "safe"):
            raise RankError(
                f"{self._name}: row {self.row_id(row)} has {name} as {found}, row 0 as {field}; give all rows the same "
                "type and shape"
            )
        return torch.as_tensor(value)


def _type_of(value: object) -> Field | str:
    """Type and shape of a value of a row; the name of its class if it is no number, array or tensor of the CPU."""
    try:
        array = torch.as_tensor(value).numpy()
    except NO_ARRAY:
        return type(value).__name__
    return Field(array.dtype, array.shape)


class WorkerPool:
    """Reads the rows of one rank, epoch after epoch, from worker processes. One thread may call `read`."""

    n_threads = 1
    rows_per_job: int | None = 1
    """Each batch is a job of its own, so loader.timeout_s is for one batch."""

    def __init__(self, source: DatasetSource, order: BlockSampler, n_workers: int):
        self._source = source
        self._order = order
        self._n_workers = n_workers
        self._next_key: tuple[int, int] | None = None  # (epoch, row of this rank) that the running loader gives next
        self._batches: Iterator[Batch | RankError] = iter(())

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
        """Copy the next batches to their places. Raises RankError if a worker died, or rows differ in type or shape."""
        for epoch, row, places in reads:
            self._read_batch(epoch, row, places, out)

    def _read_batch(self, epoch: int, row: int, places: np.ndarray, out: Mapping[str, Any]) -> None:
        if self._next_key != (epoch, row):
            self.close()
            # torchrun sends SIGTERM to the workers, too; it waits until they ignore it (see `_ignore_sigterm`).
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                self._batches = iter(self._start_loader(epoch, row))
            except NO_PICKLE as error:
                if multiprocessing.get_start_method() == "fork":  # nothing is pickled: this is a fault of another kind
                    raise
                reason = " ".join(str(error).split())
                raise UserError(
                    f"data.dataset: {self._source.name} cannot be sent to worker processes ({reason}); define its "
                    "functions at the top of a module and open files in __getitem__, or use loader.num_workers=0"
                ) from None
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            batch = self._next_batch(epoch, row)
        except BaseException:
            self.close()
            raise
        for name, value in batch.items():
            out[name][places[0] : places[-1] + 1] = value.numpy()
        row += len(places)
        if row < len(self._order):
            self._next_key = (epoch, row)
        elif self._source.loader.persistent_workers:
            self._next_key = (epoch + 1, 0)
        else:
            self._next_key = None

    def close(self) -> None:
        """End the workers now: the garbage collector would keep them while anyone holds the traceback of an error.

        Those that hang, or were stopped, are killed. What torch does may hang with them, so a thread does it.
        """
        batches, self._batches = self._batches, iter(())
        self._next_key = None
        workers = getattr(batches, "_workers", ())  # private, like `_shutdown_workers`, and the only way torch offers
        if not workers:
            return
        ending = threading.Thread(target=batches._shutdown_workers, daemon=True)  # type: ignore[attr-defined]
        ending.start()
        ending.join(GRACE_S)
        for worker in workers:
            worker.kill()
        ending.join(KILL_S)
        multiprocessing.process._children.difference_update(workers)  # type: ignore[attr-defined]  # or exit joins them
        for worker in workers:
            for left in Path("/dev/shm").glob(f"torch_{worker.pid}_*"):
                left.unlink(missing_ok=True)

    def describe_read(self, variables: Mapping[str, Any]) -> str:
        """What a thread reads. variables: the local ones of a method of this object on the stack of the thread."""
        text = self._source.name
        if "row" in variables:
            keys = next(self._batches_from(variables["epoch"], variables["row"]))
            rows = [str(self._source.items.row_id(row)) for _, row in keys]
            if len(rows) > MAX_NAMED:
                rows[MAX_NAMED:] = [f"{len(rows) - MAX_NAMED} more"]
            text += f", rows {', '.join(rows)}"
        pids = [worker.pid for worker in getattr(self._batches, "_workers", ())]
        with suppress(psutil.Error):
            states = [f"{pid} {psutil.Process(pid).status()}" for pid in pids]
            text += f" (worker processes: {', '.join(states) or 'none'})"
        return text

    def _explain_death(self) -> str:
        """What a worker died of; empty if nobody knows."""
        workers = getattr(self._batches, "_workers", None)
        if workers:
            ended = wait([worker.sentinel for worker in workers], KILL_S)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join(KILL_S)  # it has closed its files, and may have no exit code yet
            for code in filter(None, [worker.exitcode for worker in workers]):
                return f" ({signal.strsignal(-code) if code < 0 else f'exit code {code}'})"
        return ""

    def _start_loader(self, epoch: int, row: int) -> DataLoader:
        return DataLoader(
            self._source.items,
            batch_sampler=self._batches_from(epoch, row),
            collate_fn=_as_it_is,
            num_workers=self._n_workers,
            prefetch_factor=self._source.loader.prefetch_factor if self._n_workers else None,
            timeout=POLL_S if self._n_workers else 0,
            worker_init_fn=_ignore_sigterm,
        )

    def _batches_from(self, epoch: int, row: int) -> Iterator[list[tuple[int, int]]]:
        """The keys of each batch, from a row of an epoch on, without end if the workers are persistent."""
        consumed = row * self._order.num_replicas
        for later in count(epoch) if self._source.loader.persistent_workers else (epoch,):
            for plan in self._order.pools(later, consumed if later == epoch else 0):
                row_ids = self._order.row_ids(plan)[plan.n_skipped_rows :].tolist()
                for start in range(0, len(row_ids), self._order.batch_size):
                    yield [(later, row_id) for row_id in row_ids[start : start + self._order.batch_size]]

    def _next_batch(self, epoch: int, row: int) -> Batch:
        while True:
            try:
                batch = next(self._batches)
            except (RuntimeError, OSError, EOFError) as error:
                text = str(error)
                if "in DataLoader worker process" in text:  # an error of the Dataset, with the traceback of the worker
                    raise
                died_handing_over = not isinstance(error, RuntimeError) and self._n_workers
                if died_handing_over or "exited unexpectedly" in text:
                    raise RankError(
                        f"one of the loader.num_workers ({self._n_workers}) was killed or crashed while it read "
                        f"{self._source.name}{self._explain_death()}; if memory ran out use fewer of them; "
                        "loader.num_workers=0 shows its error"
                    ) from None
                if "timed out" not in text:  # the poll is over; the feed knows how long is too long
                    raise
                continue
            if isinstance(batch, RankError):
                raise batch
            return batch


def _as_it_is(batch: Any) -> Any:
    """What __getitems__ gives is a batch already."""
    return batch


def _ignore_sigterm(worker_id: int) -> None:
    """Let a worker go on when torchrun asks all processes of a rank to stop: the rank has a step to finish."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
