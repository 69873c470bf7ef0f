"""Reads pools ahead of the training loop, and copies them to the device while the loop trains.

A pool is many batches of rows, which are shuffled and copied together. It passes through a slot: staging memory on the
host and, on a GPU, memory of the same size on the device. A slot has one owner at a time:

    feeder     takes a free slot, plans which rows of the next pool go where, and cuts the reading into jobs
    readers    do the jobs; each job fills some rows of slot.host
    feeder     queues slot.host -> slot.device on the copy stream when the last job has ended, and hands the slot over
    loop       trains on slot.device; when it asks for the next pool, the slot is free again

The device works behind the host. Two events mark its progress with a slot:

    copied     recorded after the copy. The loop's stream waits for it before it reads slot.device, and the feeder
               before the readers overwrite slot.host.
    used       recorded after all work that the loop has queued on the pool. The copy stream waits for it before the
               next copy to slot.device.

The memory of the pools is allocated once. Nothing in the steady loop allocates on the device, makes the host wait for
the device, or calls `record_stream`. On a CPU, host and device memory are the same and there are no events.
"""

import atexit
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemSource
from fastgpu.feed.loader import Loader, PoolLoader
from fastgpu.feed.readers import Readers
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import HangError
from fastgpu.process.world import with_index
from fastgpu.rows.contract import Dataset, Out, Pool, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray, Rows
from fastgpu.storage.store import HDF5Dataset

WAITS = 100
"""The timeout is split into this many waits, so that a suspended process (Ctrl-Z, `scontrol suspend`) loses at most one
wait."""
POLL_S = 0.01
CLOSE_S = 3.0
"""Maximum time that closing waits for the end of the threads. Threads that hang are left behind."""


@dataclass(eq=False)
class _Slot:
    host: Rows
    device: Rows
    copied: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None
    plan: PoolPlan = field(init=False)
    """The plan of the pool that the slot holds, or that is being read into it."""
    n_jobs: int = 0
    """Number of jobs that have not ended."""
    items: list[tuple[np.ndarray, dict[str, RaggedArray]]] = field(default_factory=list)
    """Places and ragged fields of the items that were read. They are written after the lengths of all are known."""


class _Free(NamedTuple):
    """Message to the feeder: a slot is free, because the loop has taken its last batch, or at the start."""

    slot: _Slot


class _Done(NamedTuple):
    """Message to the feeder: a reader has done a job of a slot."""

    slot: _Slot


class PrefetchLoader(PoolLoader):
    """Reads the pools of all epochs in order, up to `loader.prefetch_pools` ahead of the pool in use.

    If nothing is read for `loader.timeout_s`, the stacks of all threads are printed, and the loop gets a HangError.
    """

    def __init__(
        self,
        source: Dataset,
        sampler: BlockSampler,
        device: torch.device,
        loader: LoaderConfig = LoaderConfig(),  # noqa: B008 (immutable)
        *,
        echo: float = 1.0,
        n_epochs: int = sys.maxsize,
    ):
        """loader: its num_readers threads read; for a torch Dataset, its num_workers processes (0: the loop reads).

        echo: see `PoolLoader`. n_epochs: number of epochs of the run. Pools of the next epoch are read ahead, but not
        past the last epoch; after it the threads end, until another epoch is asked for. 0: every epoch counts as the
        last. Raises UserError if the processes cannot be started.
        """
        super().__init__(source, sampler, echo)
        self._n_epochs = n_epochs
        self._timeout_s = loader.timeout_s
        self._hang_error = HangError(f"no rows have come from {source.name} in loader.timeout_s ({loader.timeout_s} s)")
        self._device = with_index(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._slots = [self._make_slot() for _ in range(loader.prefetch_pools + 1)]
        if self._stream:
            # Kernels of a previous owner of the slots' memory may still run on the loop's stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.readers = Readers(source, sampler, loader)
        self._threads: list[threading.Thread] = []
        self._next: tuple[int, int] | None = None  # (epoch, number) of the pools that are being read now
        # The threads are daemons, so that a thread that hangs does not keep Python from ending. But a thread that runs
        # C++ while Python ends would abort the process, so the threads are asked to end before.
        atexit.register(self.close)

    def _make_slot(self) -> _Slot:
        host = Rows.empty(
            self.source.fields, self.sampler.max_pool_rows, torch.device("cpu"), pinned=bool(self._stream)
        )
        if self._stream is None:
            return _Slot(host, host)
        copied = torch.cuda.Event(blocking=True)  # blocking: a thread that waits sleeps instead of occupying a CPU
        return _Slot(host, host.to(self._device), copied, torch.cuda.Event())

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        """See `PoolLoader`. Raises the error of a reader, with its traceback."""
        self.prepare()
        if first_pool == self.sampler.pools_per_epoch:
            return
        if self._next != (epoch, first_pool):
            later = map(self.sampler.pools, range(epoch + 1, self._n_epochs))
            self._start(chain(self.sampler.pools(epoch, first_pool), chain.from_iterable(later)))
        self._next = None  # until all pools of this epoch have been taken
        while True:
            while not self.readers.n_threads and self._ready.empty():
                with suppress(Empty):
                    if item := self._jobs.get(timeout=POLL_S):
                        self.readers.do(*item, self._inbox)
            slot = self._ready.get()
            if not isinstance(slot, _Slot):
                self._ready.put(slot)  # for a caller that asks again
                self._end_threads(0 if isinstance(slot, HangError) else CLOSE_S)
                if slot:
                    raise slot
                return
            plan = slot.plan
            if slot.copied:
                torch.cuda.current_stream(self._device).wait_event(slot.copied)
            yield Pool(plan, slot.device.slice(0, plan.n_rows))
            self._release(slot)
            if plan.number + 1 == self.sampler.pools_per_epoch:
                if epoch + 1 < self._n_epochs:
                    self._next = (epoch + 1, 0)
                else:
                    self._end_threads(CLOSE_S)
                return

    def _start(self, plans: Iterator[PoolPlan]) -> None:
        """Begin to read. Pools from an earlier start are dropped."""
        self._end_threads(self._timeout_s)
        if self._threads:  # threads that have not ended could still write to the slots
            raise self._hang_error
        self._closing = threading.Event()
        # Each waits at its own queue: the feeder for messages, or the error of a job; the readers for jobs; the loop
        # for slots with a pool, or the error that ended the feeder. None ends the thread that takes it.
        self._inbox: SimpleQueue[_Free | _Done | BaseException | None] = SimpleQueue()
        self._jobs: SimpleQueue[tuple[Callable[[], None], _Done] | None] = SimpleQueue()
        self._ready: SimpleQueue[_Slot | BaseException | None] = SimpleQueue()
        for slot in self._slots:
            slot.n_jobs = 0
            self._release(slot)
        read = partial(self.readers.work, self._jobs, self._inbox, self._closing)
        work: dict[str, Callable[[], None]] = {f"reader_{n}": read for n in range(self.readers.n_threads)}
        work["feeder"] = partial(self._feed, plans)
        self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in work.items()]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and processes for good. It is safe to call this twice, and while a pool is in use."""
        atexit.unregister(self.close)
        self.readers.source.close()
        self._end_threads(CLOSE_S)

    def _end_threads(self, timeout_s: float) -> None:
        """End the threads. Threads that have not ended after this time stay in `_threads`."""
        if not self._threads:
            return
        self._closing.set()
        self._inbox.put(None)
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():  # a signal may have come before all threads were started
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._stream:  # copies may be under way to memory that will be free for other uses
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _release(self, slot: _Slot) -> None:
        if slot.used:
            slot.used.record(torch.cuda.current_stream(self._device))
        self._inbox.put(_Free(slot))

    def _feed(self, plans: Iterator[PoolPlan]) -> None:
        """Keep every free slot filling, and hand over the filled ones in order."""
        filling: list[_Slot] = []
        try:
            if self._stream:  # a new thread uses GPU 0, and would open a context there on every rank
                torch.cuda.set_device(self._device)
            has_more = True
            while has_more or filling:
                message = self._next_message() if filling and self.readers.n_threads else self._inbox.get()
                # While the loader is being closed, readers skip jobs.
                if message is None or self._closing.is_set():
                    break
                match message:
                    case BaseException():
                        raise message
                    case _Done(slot):
                        slot.n_jobs -= 1
                    case _Free(slot) if plan := next(plans, None):
                        self._fill(slot, plan)
                        filling.append(slot)
                    case _Free():
                        has_more = False
                while filling and not filling[0].n_jobs:
                    self._hand_over(filling.pop(0))
        except Empty:
            faulthandler.dump_traceback(all_threads=True)  # where the readers hang
            self._ready.put(self._hang_error)
        except BaseException as error:
            self._ready.put(error)  # the loop raises it, with the traceback of this thread
        else:
            self._ready.put(None)

    def _next_message(self) -> _Free | _Done | BaseException | None:
        """The next message of the readers. Raises Empty if they hang."""
        for _ in range(WAITS - 1):
            with suppress(Empty):
                return self._inbox.get(timeout=self._timeout_s / WAITS)
        return self._inbox.get(timeout=self._timeout_s / WAITS)

    def _fill(self, slot: _Slot, plan: PoolPlan) -> None:
        if slot.copied:
            slot.copied.synchronize()  # after this, the readers may overwrite the staging memory
        source, n_rows = self.readers.source, self.readers.rows_per_job
        row_ids = plan.row_ids if source.stored_lengths else None
        for name, lengths in source.stored_lengths.items():
            self._set_lengths(slot, name, lengths[row_ids])
        slot.plan = plan
        slot.items.clear()
        out = slot.host.numpy()
        # Rows in the page cache are gathered in the order of the pool. Other rows are read in the order of the file.
        jobs = source.gathers(plan, out, n_rows) if isinstance(source, HDF5Dataset) else []
        if isinstance(source, ItemSource):  # it reads rows one at a time, so several threads may share a block
            jobs = [partial(_read_items, source, slot, reads, out) for reads in plan.reads.singly().split(n_rows)]
        jobs = jobs or [partial(source.read, plan, reads, out) for reads in plan.reads.split(n_rows)]
        slot.n_jobs = len(jobs)
        done = _Done(slot)
        for job in jobs:
            self._jobs.put((job, done))

    def _hand_over(self, slot: _Slot) -> None:
        for _ in range(self.readers.dismiss()):
            self._jobs.put(None)
        if slot.items:
            self._write_ragged(slot)
        if self._stream and slot.copied and slot.used:
            n_rows = slot.plan.n_rows
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.used)
                slot.device.slice(0, n_rows).copy_(slot.host.slice(0, n_rows), non_blocking=True)
                slot.copied.record(self._stream)
        self._ready.put(slot)

    def _write_ragged(self, slot: _Slot) -> None:
        """Write the ragged fields of items, after the lengths of all items are known."""
        for name in slot.items[0][1]:
            lengths = np.empty(slot.plan.n_rows, np.int32)
            for places, columns in slot.items:
                lengths[places] = np.diff(columns[name].offsets)
            self._set_lengths(slot, name, lengths)
            column = slot.host[name].numpy()
            for places, columns in slot.items:
                column.values[column.places(places)] = columns[name].values

    def _set_lengths(self, slot: _Slot, name: str, lengths: np.ndarray) -> None:
        """Write the offsets of ragged rows, and give the column more memory if the values do not fit."""
        n_values = int(lengths.sum(dtype=np.int64))
        slot.host.make_room(name, n_values, pinned=self._stream is not None)
        if slot.device.make_room(name, n_values) and self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # kernels of a previous owner may run
        np.cumsum(lengths, out=slot.host[name].host_offsets[1 : len(lengths) + 1])


def _read_items(source: ItemSource, slot: _Slot, reads: Reads, out: Mapping[str, Out]) -> None:
    """Read items, and write their fields to `out`. Ragged fields are kept in `slot`."""
    plan = slot.plan
    # Each run has one row.
    columns = source.read_rows(reads.runs.starts, plan.seed, plan.epoch, plan.repeats[reads.places])
    ragged = {name: column for name, column in columns.items() if isinstance(column, RaggedArray)}
    for name in columns.keys() - ragged.keys():
        np.asarray(out[name])[reads.places] = columns[name]
    if ragged:
        slot.items.append((reads.places, ragged))


def bottleneck(loader: Loader) -> str:
    """See `Readers.bottleneck`. Empty for loaders without readers."""
    return loader.readers.bottleneck() if isinstance(loader, PrefetchLoader) else ""
