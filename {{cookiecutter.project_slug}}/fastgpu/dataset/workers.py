"""The worker processes of a DataLoader, which read the items of a Dataset, batch by batch."""

import multiprocessing.process
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from fastgpu.dataset.items import Items
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import BlockRead, PoolPlan
from fastgpu.rows.order import BlockSampler

POLL_S = 1
"""Interval at which dead workers are looked for."""
GRACE_S = 2.0
"""How long workers may take to end before they are killed."""
KILL_S = 3.0
"""How long to wait for the end of workers that died or were killed. The kernel may hold them for ever."""
MAX_NAMED = 8
"""Maximum number of rows that a message names."""
PREFETCH_FACTOR = 2
"""Batches that each worker prepares ahead."""
NO_PICKLE = (PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot send to a process that is no fork, which is the default from Python 3.14 on."""


class Batch(NamedTuple):
    """What a worker process is asked for."""

    epoch: int
    rows: list[int]


Answer = dict[str, torch.Tensor] | RankError
"""What a worker process answers: the rows, {field: (rows, *shape)}, or what is wrong with one of them."""


class _Reader(Dataset):
    """What a worker process runs."""

    def __init__(self, items: Items, seed: int):
        self._items = items
        self._seed = seed

    def __getitems__(self, batch: Batch) -> "Answer":
        """torch asks for a whole batch by this method, and would wrap an error in a traceback."""
        out = {
            name: np.empty((len(batch.rows), *field.shape), field.dtype) for name, field in self._items.types.items()
        }
        try:
            self._items.fill(out, batch.rows, seed=self._seed, epoch=batch.epoch)
        except RankError as error:
            return error
        return {name: torch.from_numpy(column) for name, column in out.items()}


class WorkerPool:
    """Reads the rows of one rank, epoch after epoch, from worker processes. One thread may call `read`."""

    n_threads = 1
    rows_per_job: int | None = 1
    """Each batch is a job of its own, so loader.timeout_s is for one batch."""

    def __init__(self, items: Items, order: BlockSampler, n_workers: int):
        """n_workers: 0 reads in this process."""
        self._items = items
        self._order = order
        self._n_workers = n_workers
        self._next_key: tuple[int, int] | None = None  # (epoch, row of this rank) that `read` takes next
        self._rows: Iterator[tuple[int, list[int]]] = iter(())  # those of the next batches
        self._answers: Iterator[Answer] = iter(())  # of the workers

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
            part = {name: column[places[0] : places[-1] + 1] for name, column in out.items()}
            self._read_batch(epoch, row, part)
            next_row = row + len(places)
            if next_row < len(self._order):
                self._next_key = (epoch, next_row)
            else:
                self._next_key = (epoch + 1, 0)

    def _read_batch(self, epoch: int, row: int, out: Mapping[str, np.ndarray]) -> None:
        if self._next_key != (epoch, row):
            self.close()
        try:
            if self._next_key is None:
                self._next_key = (epoch, row)
                self._rows = self._rows_from(epoch, row)
                if self._n_workers:
                    self._start_workers()
            if self._n_workers:
                self._take_batch(out)
            else:
                epoch, rows = next(self._rows)
                self._items.fill(out, rows, seed=self._order.seed, epoch=epoch)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers now: the garbage collector would keep them while anyone holds the traceback of an error.

        Those that hang, or were stopped, are killed. What torch does may hang with them, so a thread does it.
        """
        answers, self._answers = self._answers, iter(())
        self._next_key = None
        workers = getattr(answers, "_workers", ())  # private, like `_shutdown_workers`, and the only way torch offers
        if not workers:
            return
        ending = threading.Thread(target=answers._shutdown_workers, daemon=True)  # type: ignore[attr-defined]
        ending.start()
        ending.join(GRACE_S)
        for worker in workers:
            worker.kill()
        ending.join(KILL_S)
        multiprocessing.process._children.difference_update(workers)  # type: ignore[attr-defined]  # or exit joins them

    def describe_read(self, _variables: Mapping[str, Any]) -> str:
        """What a thread reads that waits in a method of this object."""
        text = self._items.name
        key = self._next_key  # another thread may change it
        if key:
            _, rows = next(self._rows_from(*key))
            names = [str(self._items.row_id(row)) for row in rows]
            if len(names) > MAX_NAMED:
                names[MAX_NAMED:] = [f"{len(names) - MAX_NAMED} more"]
            text += f", rows {', '.join(names)}"
        pids = [worker.pid for worker in getattr(self._answers, "_workers", ())]
        with suppress(psutil.Error):
            states = [f"{pid} {psutil.Process(pid).status()}" for pid in pids]
            text += f" (worker processes: {', '.join(states) or 'none'})"
        return text

    def _death(self) -> RankError:
        return RankError(
            f"one of the loader.num_workers ({self._n_workers}) was killed or crashed while it read "
            f"{self._items.name}{self._explain_death()}; if memory ran out use fewer of them; "
            "loader.num_workers=0 shows its error"
        )

    def _explain_death(self) -> str:
        """What a worker died of; empty if nobody knows."""
        workers = getattr(self._answers, "_workers", None)
        if workers:
            ended = wait([worker.sentinel for worker in workers], KILL_S)
            for worker in workers:
                if worker.sentinel in ended:
                    worker.join(KILL_S)  # it has closed its files, and may have no exit code yet
            for code in filter(None, [worker.exitcode for worker in workers]):
                return f" ({signal.strsignal(-code) if code < 0 else f'exit code {code}'})"
        return ""

    def _start_workers(self) -> None:
        if multiprocessing.get_start_method() == "forkserver":
            forkserver.ensure_running()  # before the signal is blocked: what else it starts would never be terminated
        before = {*multiprocessing.active_children()}
        # torchrun sends SIGTERM to the workers, too; it waits until they ignore it (see `_begin_worker`).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            loader = DataLoader(
                _Reader(self._items, self._order.seed),
                batch_sampler=map(Batch._make, self._rows),  # type: ignore[arg-type]  # whatever it gives is passed on to __getitems__
                collate_fn=_as_it_is,
                num_workers=self._n_workers,
                prefetch_factor=PREFETCH_FACTOR,
                timeout=POLL_S,
                worker_init_fn=_begin_worker,
            )
            self._answers = iter(loader)
        except NO_PICKLE as error:
            if multiprocessing.get_start_method() == "fork":  # nothing is pickled: this is a fault of another kind
                raise
            reason = " ".join(str(error).split())
            raise UserError(
                f"data.dataset: {self._items.name} cannot be sent to worker processes ({reason}); define its "
                "functions at the top of a module and open files in __getitem__, or use loader.num_workers=0"
            ) from None
        except OSError as error:
            for worker in {*multiprocessing.active_children()} - before:
                worker.kill()  # those that were started ignore SIGTERM, and the exit of this process would wait
            raise RankError(
                f"the loader.num_workers ({self._n_workers}) cannot be started: {error.strerror}; use fewer of them, "
                "or make room: they need memory, open files, processes, and a few kB of /dev/shm for their locks"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _rows_from(self, epoch: int, row: int) -> Iterator[tuple[int, list[int]]]:
        """(epoch, rows) of each batch, from a row of an epoch on, without end."""
        consumed = row * self._order.num_replicas
        for later in count(epoch):
            for plan in self._order.pools(later, consumed if later == epoch else 0):
                row_ids = self._order.row_ids(plan)[plan.n_skipped_rows :].tolist()
                for start in range(0, len(row_ids), self._order.batch_size):
                    yield later, row_ids[start : start + self._order.batch_size]

    def _take_batch(self, out: Mapping[str, np.ndarray]) -> None:
        """Copy the next batch of the workers. Raises RankError if a worker died, or rows differ in type or shape."""
        while True:
            try:
                answer = next(self._answers)
                break
            except (RuntimeError, OSError, EOFError) as error:
                text = str(error)
                if "in DataLoader worker process" in text:  # an error of the Dataset, with the traceback of the worker
                    raise
                if "exited unexpectedly" in text or not isinstance(error, RuntimeError):
                    raise self._death() from None  # the dead do not hand over the memory of their batches
                if "timed out" not in text:  # the poll is over; the feed knows how long is too long
                    raise
        if isinstance(answer, RankError):
            raise answer
        for name, column in out.items():
            np.copyto(column, answer[name].numpy())


def _as_it_is(answer: Any) -> Any:
    """For torch's `collate_fn`: there is nothing to put together."""
    return answer


def _begin_worker(worker_id: int) -> None:
    """Let a worker go on when torchrun asks all processes of a rank to stop: the rank has a step to finish.

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
