"""A map-style `torch.utils.data.Dataset` as a source of rows, through a plain DataLoader.

A worker process is asked for about 4 MiB of rows at a time. The rows of an answer are copied to their places in a pool,
and the pool moves to the device as a whole. The workers run on from pool to pool and from epoch to epoch.
"""

import faulthandler
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from fastgpu.dataset.items import NO_ARRAY, Columns, Items, to_array
from fastgpu.process.launch import HangError, RankError, UserError
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray

ASK_BYTES = 4 << 20
"""Rows that a worker is asked for at a time, ..."""
ASKS_PER_POOL = 64
"""... but at most this part of a pool, if that is not less than a batch: all workers have to do."""
ASKS_AHEAD = 2
"""Answers that each worker prepares ahead."""
POLL_S = 1
"""Interval at which dead workers are looked for, and whether the feed is closed."""
GRACE_S = 2.0
"""How long workers may take to end before they are killed. What the kernel holds for ever is left behind."""
NO_PICKLE = (PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot send to a process that is no fork, which is the default from Python 3.14 on."""


class Ask(NamedTuple):
    """What a worker process is asked for."""

    rows: np.ndarray
    """(n,) int64"""
    seed: int
    epoch: int


class _Answers(TorchDataset):
    """What a worker process runs: a Dataset of answers to asks."""

    def __init__(self, items: Items, timeout_s: float):
        self._items = items
        self._timeout_s = timeout_s

    def __getitem__(self, ask: Ask) -> "tuple[Ask, dict[str, Any] | str]":
        """The rows, {field: tensor, or (values, offsets)}; or a line about what is wrong with one of them."""
        faulthandler.dump_traceback_later(self._timeout_s, file=sys.__stderr__ or 2)  # shows where an item hangs
        try:
            columns = self._items.read_rows(*ask)
        except RankError as error:
            return ask, str(error)
        except Exception as error:
            return ask, f"{self._items.name}: {_describe(error)}; loader.num_workers=0 shows the whole traceback"
        finally:
            faulthandler.cancel_dump_traceback_later()
        return ask, {name: _to_tensors(column) for name, column in columns.items()}


def _to_tensors(column: np.ndarray | RaggedArray) -> Any:
    """For the way from a worker: torch moves tensors through shared memory."""
    if isinstance(column, RaggedArray):
        return torch.from_numpy(column.values), torch.from_numpy(column.offsets)
    return torch.from_numpy(column)


def _to_columns(tensors: Mapping[str, Any]) -> Columns:
    return {
        name: RaggedArray(value[0].numpy(), value[1].numpy()) if isinstance(value, tuple | list) else value.numpy()
        for name, value in tensors.items()
    }


def _describe(error: Exception) -> str:
    """An exception of a Dataset, with the line of its code that raised it, in one line."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    notes = " ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error}{place} {notes}".split())


class ItemDataset(Dataset):
    """The rows of a map-style Dataset, as blocks of one row.

    Its items are mappings, or sequences in the order of `names`, of arrays, tensors or numbers. A field whose items
    differ in their first dimension is ragged. The attribute `class_names` (or torchvision's `classes`) is used if the
    Dataset has it, and so are arrays with the name of a field (or `targets`) if they have the values of the items.
    """

    def __init__(self, name: str, dataset: TorchDataset, names: Mapping[str, str], *, timeout_s: float = 300):
        """names: {field: its key in the items}. timeout_s: for an answer of the workers."""
        self.name = name
        try:
            n_rows = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"data.dataset: {name} has no length; a map-style Dataset with __len__ is needed") from None
        if not n_rows:
            raise UserError(f"data.dataset: {name} has no rows")
        self.items = Items(name, dataset, names)
        self.fields = self.items.fields
        self.block_rows = np.ones(n_rows, np.int32)
        class_names = getattr(dataset, "class_names", getattr(dataset, "classes", None))
        self.attributes: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}
        self.n_workers = 0
        self._rows_per_ask = 1
        self._timeout_s = timeout_s
        self._answers: Iterator[tuple[Ask, Any]] | None = None

    def with_workers(self, n_workers: int, order: BlockSampler) -> "ItemDataset":
        """The same rows for a feed of its own. n_workers: 0 reads in this process."""
        other = copy(self)
        other.n_workers = n_workers
        other._rows_per_ask = rows_per_ask(self, order)
        other._answers = None
        return other

    def jobs(self, plan: PoolPlan, out: Mapping[str, Out], n_rows: int) -> Iterator[Callable[[], None]]:
        """See `Dataset.jobs`. A job is what a worker is asked for."""
        return super().jobs(plan, out, self._rows_per_ask)

    def column(self, name: str) -> np.ndarray | None:
        """One field of all rows, if the Dataset has it as an attribute.

        An attribute counts only if it has numbers of the shape of the field, and what the item of the first row has:
        others are file names, names of classes, or classes that the items number in another way.
        """
        for attribute in (name, "targets") if name in self.fields else ():
            with suppress(*NO_ARRAY):
                values = np.asarray(getattr(self.items.dataset, attribute, None))
                if self._agrees(values, name):
                    return values
        return None

    def _agrees(self, values: np.ndarray, name: str) -> bool:
        """Whether an array can be a field of all rows, as far as the first row tells."""
        field = self.fields[name]
        is_float = field.dtype.kind == "f"
        if values.shape != (len(self.block_rows), *field.shape) or field.is_ragged:
            return False
        if values.dtype.kind not in ("buif" if is_float else "bui"):
            return False
        first = values[0].astype(field.dtype) if is_float else values[0]
        return np.array_equal(first, to_array(self.items.first[name]), equal_nan=True)

    def draws_at_random(self) -> bool:
        """Whether an item is another one in another epoch, as far as the first rows tell."""
        rows = np.arange(min(4, len(self.block_rows)))
        first, second = (self.items.read_rows(rows, seed=0, epoch=epoch) for epoch in (0, 1))
        return any(not np.array_equal(_values(first[name]), _values(second[name])) for name in self.fields)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Copy rows to their places; to the list `out[name]` if the field is ragged. One thread may call this.

        The plans and reads come in the order of the sampler, and others begin anew. Raises RankError if a worker died,
        or rows differ in type or shape.
        """
        if not self.n_workers:
            columns = self.items.read_rows(*_ask(plan, reads))
        else:
            answer = self._answer_to(_ask(plan, reads), plan)
            if isinstance(answer, str):
                self.close()
                raise RankError(answer)
            columns = _to_columns(answer)
        for name, column in columns.items():
            target = out[name]
            if isinstance(column, RaggedArray):
                assert isinstance(target, list)
                target.append((reads.places, column))
            else:
                assert isinstance(target, np.ndarray)
                target[reads.places] = column

    def _start_workers(self, plan: PoolPlan) -> None:
        """Begin with the first rows of a pool."""
        if multiprocessing.get_start_method() == "forkserver":
            forkserver.ensure_running()  # before the signal is blocked: what else it starts would never be terminated
        before = {*multiprocessing.active_children()}
        # torchrun sends SIGTERM to the workers, too; it waits until they ignore it (see `_begin_worker`).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            loader = DataLoader(
                _Answers(self.items, self._timeout_s),
                batch_size=None,
                sampler=asks_from(plan, self._rows_per_ask),
                collate_fn=_as_it_is,
                num_workers=self.n_workers,
                prefetch_factor=ASKS_AHEAD,
                timeout=POLL_S,
                worker_init_fn=_begin_worker,
            )
            self._answers = iter(loader)
        except NO_PICKLE as error:
            if multiprocessing.get_start_method() == "fork":  # nothing is pickled: this is a fault of another kind
                raise
            reason = " ".join(str(error).split())
            raise UserError(
                f"data.dataset: {self.name} cannot be sent to worker processes ({reason}); define its functions at the "
                "top of a module and open files in __getitem__, or use loader.num_workers=0"
            ) from None
        except OSError as error:
            for worker in {*multiprocessing.active_children()} - before:
                worker.kill()  # those that were started ignore SIGTERM, and the exit of this process would wait
            raise RankError(
                f"the loader.num_workers ({self.n_workers}) cannot be started: {error.strerror}; use fewer of them"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _answer_to(self, asked: Ask, plan: PoolPlan) -> Any:
        """What the workers say of these rows. Those that run on to other rows are ended."""
        if self._answers is not None:  # the iterator of torch is false: it has no length
            ask, answer = self._next_answer()
            if ask.epoch == asked.epoch and np.array_equal(ask.rows, asked.rows):
                return answer
            self.close()
        self._start_workers(plan)
        ask, answer = self._next_answer()
        assert np.array_equal(ask.rows, asked.rows), "a reader begins with the first rows of a pool"
        return answer

    def _next_answer(self) -> tuple[Ask, Any]:
        deadline = time.monotonic() + self._timeout_s
        while (answers := self._answers) is not None:
            try:
                return next(answers)
            except (RuntimeError, OSError, EOFError) as error:
                if "timed out" in str(error) and time.monotonic() < deadline:
                    continue
                self.close()
                if "timed out" in str(error):
                    raise HangError(
                        f"no rows have come from {self.name}: it hangs, or is slower than loader.timeout_s "
                        f"({self._timeout_s}) allows"
                    ) from None
                raise RankError(
                    f"one of the loader.num_workers ({self.n_workers}) was killed or crashed while it read {self.name} "
                    f"({str(error).strip()}); if memory ran out use fewer of them; loader.num_workers=0 shows its error"
                ) from None
        raise RankError(f"{self.name} was closed while it was read")

    def close(self) -> None:
        """End the workers. Those that hang, or were stopped, are killed; what torch does may hang with them."""
        answers, self._answers = self._answers, None
        workers = getattr(answers, "_workers", ())  # private, like `_shutdown_workers`, and the only way torch offers
        if not workers:
            return
        ending = threading.Thread(target=answers._shutdown_workers, daemon=True)  # type: ignore[union-attr]
        ending.start()
        ending.join(GRACE_S)
        for worker in workers:
            worker.kill()
        ending.join(GRACE_S)
        multiprocessing.process._children.difference_update(workers)  # type: ignore[attr-defined]  # or exit joins them


def rows_per_ask(source: Dataset, order: BlockSampler) -> int:
    """Rows that a worker is asked for at a time. What is drawn depends on it: the number of workers must not count."""
    of_pool = max(order.batch_size, order.max_pool_rows // ASKS_PER_POOL)
    return max(1, min(of_pool, ASK_BYTES // source.row_bytes))


def asks_from(plan: PoolPlan, n_rows: int) -> Iterator[Ask]:
    """The asks of a pool, and of those that follow in the order."""
    for later in plan.order.plans(plan.epoch, plan.number):
        for reads in later.reads.portions(n_rows):
            yield _ask(later, reads)


def _ask(plan: PoolPlan, reads: Reads) -> Ask:
    return Ask(reads.starts, plan.order.seed, plan.epoch)  # a block is a row


def _values(column: np.ndarray | RaggedArray) -> np.ndarray:
    return column.values if isinstance(column, RaggedArray) else column


def _as_it_is(answer: Any) -> Any:
    """For torch's `collate_fn`: there is nothing to put together."""
    return answer


def _begin_worker(worker_id: int) -> None:
    """Let a worker go on when all processes of a rank are asked to stop: the rank has a step to finish.

    It ends with the rank. torch sees that the parent of a fork has changed, but that of others is a server, which
    lives on.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank:
        rank.join()
        os._exit(1)


def open_dataset(
    key: str, path: str | Sequence[str], fields: Mapping[str, str], *, factory: str, timeout_s: float = 300
) -> ItemDataset:
    """Call `factory` ("package.module:Class") with `path`. Raises UserError if there is no such class.

    key: the config key that holds `path`, for messages.
    """
    module, _, name = factory.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 (torchrun puts only the folder of the script there)
    try:
        make = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"data.dataset is {factory}: {error}; name a class as package.module:Class") from None
    finally:
        sys.path.pop(0)
    dataset = make(path)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, TorchDataset):
        raise UserError(
            f"data.dataset is {factory}, which is not a map-style Dataset; rows need numbers to be shuffled"
        )
    return ItemDataset(f"{name}({path!r}) of {key}", dataset, fields, timeout_s=timeout_s)
