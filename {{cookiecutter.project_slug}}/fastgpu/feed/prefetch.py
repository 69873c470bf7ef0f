"""Host to device, ahead of the loop: reader threads, staging memory, one copy stream, events.

A slot holds one pool: staging memory on the host and, on a GPU, its twin on the device. It has one owner at a time:

    readers         fill slot.host; they may start once the last copy from the slot has ended (`copied`)
    copy stream     slot.host -> slot.device; it waits on the device for the loop's last use of the slot (`used`)
    loop            reads slot.device after its stream has waited for `copied`; when it asks for the next pool, `used`
                    is recorded behind everything it has queued, and the slot is free again

The memory of the pools is allocated once. Nothing in the steady loop allocates on the device, makes the host wait for
the device, or calls `record_stream`. On a CPU, host and device memory are the same and there are no events.
"""

import atexit
import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from fastgpu.process.config import Loader
from fastgpu.process.launch import HangError
from fastgpu.rows.contract import Dataset, Pool, PoolPlan
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray, Rows

JOB_BYTES = 1 << 20
"""A reader thread is given at least this much at a time, ..."""
JOBS_PER_READER = 8
"""... or this fraction of its part of a pool, whichever is more."""
READERS_NICE = 5
"""How much lower the priority of the readers is than that of the loop, in steps of nice(1)."""
CLOSE_S = 3.0
"""How long `close` waits for threads. Those that hang are left behind: they are daemons."""


class _Slot(NamedTuple):
    host: Rows
    device: Rows
    copied: torch.cuda.Event | None
    used: torch.cuda.Event | None


class _Filling(NamedTuple):
    """A pool whose rows are being read: by jobs, which any reader thread takes."""

    plan: PoolPlan
    slot: _Slot
    out: dict[str, Any]
    jobs: Sequence[Callable[[], None]]
    ended: SimpleQueue[BaseException | None]
    """An entry for each job that has ended: its error."""


class PrefetchLoader:
    """The pools of one epoch after the other, read ahead: `loader.prefetch_pools` before the one in use.

    The first pools of the next epoch are read while this one ends. `close` ends every thread. If no rows come for
    `loader.timeout_s`, it is a HangError, and the stacks of all threads are printed.
    """

    def __init__(self, source: Dataset, order: BlockSampler, device: torch.device, n_threads: int, *, loader: Loader):
        """loader: prefetch_pools and timeout_s are used."""
        self.order = order
        self._source = source
        self._timeout_s = loader.timeout_s
        self._n_threads = n_threads
        self._device = device
        ragged = {name for name, field in source.fields.items() if field.is_ragged}
        self._unknown = ragged - source.lengths.keys()  # a Dataset's: how long its rows are is known once they are read
        job_rows = JOB_BYTES // max(1, source.row_bytes)
        self._rows_per_job = max(1, job_rows, order.max_pool_rows // (JOBS_PER_READER * n_threads))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [self._make_slot() for _ in range(loader.prefetch_pools + 1)]
        if self._stream:  # kernels of a previous owner of the slots' memory may still run on the loop's stream
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._threads: list[threading.Thread] = []
        self._next: tuple[int, int] | None = None  # (epoch, number) of the pools that are being read now
        self._pools: Iterator[Pool] = iter(())

    def _make_slot(self) -> _Slot:
        is_pinned = self._stream is not None
        host = Rows.empty(self._source.fields, self.order.max_pool_rows, torch.device("cpu"), pinned=is_pinned)
        if self._stream is None:
            return _Slot(host, host, None, None)
        copied = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps; others occupy a CPU
        return _Slot(host, host.to(self._device), copied, torch.cuda.Event())

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        """The pools of an epoch, beginning with that number. Rows are valid until the next pool is asked for."""
        if first_pool == self.order.pools_per_epoch:
            return
        if self._next != (epoch, first_pool):
            self.start(self.order.plans(epoch, first_pool))
            self._pools = iter(self)
        self._next = None  # until all pools of this epoch have been taken
        for pool in self._pools:
            yield pool
            if pool.plan.is_last:
                self._next = (epoch + 1, 0)
                return

    def start(self, plans: Iterator[PoolPlan]) -> None:
        """Begin to read. Pools that an earlier start has prepared are dropped."""
        self._end_threads(self._timeout_s)
        if self._threads:  # they may yet write to the slots
            raise self._hang_error()
        self._closing = threading.Event()
        self._todo: SimpleQueue[tuple[Callable[[], None], _Filling] | None] = SimpleQueue()
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[PoolPlan, _Slot] | BaseException | None] = SimpleQueue()
        for slot in self._slots:
            self._release(slot)
        threads = [threading.Thread(target=self._run, args=(plans,), name="prefetch", daemon=True)]
        for number in range(self._n_threads):
            threads.append(threading.Thread(target=self._run_jobs, name=f"reader_{number}", daemon=True))
        atexit.register(self.close)  # a daemon that runs C++ while Python ends would abort the process
        for thread in threads:
            thread.start()
            self._threads.append(thread)  # a signal may come at any line, and `close` joins those that run

    def __iter__(self) -> Iterator[Pool]:
        """The pools that `start` has begun. Raises the error of a reader."""
        while True:
            item = self._ready.get()
            if not isinstance(item, tuple):
                self._ready.put(item)  # for a caller that asks again
                self._end_threads(0 if isinstance(item, HangError) else CLOSE_S)
                if item:
                    raise item
                return
            plan, slot = item
            if slot.copied:
                torch.cuda.current_stream(self._device).wait_event(slot.copied)
            yield Pool(plan, slot.device.slice(0, plan.n_rows))
            self._release(slot)

    def close(self) -> None:
        """End the threads. It is safe to call this twice, and while a pool is in use."""
        self._end_threads(CLOSE_S)
        self._source.close()

    def _end_threads(self, timeout_s: float) -> None:
        """End the threads, and keep in `_threads` those that have not ended in that time."""
        if not self._threads:
            return
        atexit.unregister(self.close)
        self._closing.set()
        self._free.put(None)
        for _ in self._threads:
            self._todo.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._stream:  # copies may be under way to memory that is now free for others
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _release(self, slot: _Slot) -> None:
        if slot.used:
            slot.used.record(torch.cuda.current_stream(self._device))
        self._free.put(slot)

    def _hang_error(self) -> HangError:
        return HangError(
            f"no rows have come from {self._source.name}: it hangs, or is slower than loader.timeout_s "
            f"({self._timeout_s}) allows"
        )

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self, plans: Iterator[PoolPlan]) -> None:
        """Keep every free slot filling, and hand over the filled ones in order."""
        filling: deque[_Filling] = deque()
        end: BaseException | None = None
        try:
            if self._stream:  # a thread begins with GPU 0, and would open a context there on every rank
                torch.cuda.set_device(self._device)
            has_more = True
            while has_more or filling:
                slot = None
                with suppress(Empty):  # while reads are under way, do not wait: the loop may need their pools first
                    slot = self._free.get(block=not filling) if has_more else None
                if self._closing.is_set():
                    break
                if slot is None:
                    self._hand_over(filling.popleft())
                    continue
                plan = next(plans, None)
                if plan is None:
                    has_more = False
                    continue
                if slot.copied:
                    slot.copied.synchronize()  # afterwards the readers may overwrite the staging memory
                self._write_offsets(plan, slot)
                out = slot.host.numpy() | {name: [] for name in self._unknown}
                jobs = [*self._source.jobs(plan, out, self._rows_per_job)]
                pool = _Filling(plan, slot, out, jobs, SimpleQueue())
                filling.append(pool)
                for job in jobs:
                    self._todo.put((job, pool))
        except BaseException as error:
            end = error  # the loop raises it, with the traceback of this thread
        self._ready.put(end)

    def _write_offsets(self, plan: PoolPlan, slot: _Slot) -> None:
        """Write the offsets of ragged rows, which say where the values of each row go."""
        row_ids = plan.row_ids if self._source.lengths else None
        for name, lengths in self._source.lengths.items():
            counts = lengths[row_ids]
            self._make_room(slot, name, int(counts.sum(dtype=np.int64)))
            np.cumsum(counts, out=slot.host[name].host_offsets[1 : plan.n_rows + 1])

    def _join(self, plan: PoolPlan, slot: _Slot, name: str, parts: Sequence[tuple[np.ndarray, RaggedArray]]) -> None:
        """Write the parts of a ragged column of a Dataset, (places, rows), to a slot."""
        self._make_room(slot, name, sum(int(rows.offsets[-1]) for _, rows in parts))
        column = slot.host[name].numpy()
        for places, rows in parts:
            column.offsets[places + 1] = np.diff(rows.offsets)
        np.cumsum(column.offsets[1 : plan.n_rows + 1], out=column.offsets[1 : plan.n_rows + 1])
        for places, rows in parts:
            column.values[column.places(places)] = rows.values

    def _make_room(self, slot: _Slot, name: str, n_values: int) -> None:
        """Give a slot more memory if the values of a pool do not fit: the pools themselves say how much they need."""
        slot.host.make_room(name, n_values, pinned=self._stream is not None)
        if slot.device.make_room(name, n_values) and self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # kernels of a previous owner may run

    def _run_jobs(self) -> None:
        """Read one job after the other, in a reader thread."""
        _lower_priority()
        while item := self._todo.get():
            job, pool = item
            error = None
            try:
                if not self._closing.is_set():
                    job()
            except BaseException as raised:
                error = raised
            pool.ended.put(error)

    def _hand_over(self, pool: _Filling) -> None:
        """Wait until a pool has been read, copy it to the device and give it to the loop."""
        for _ in pool.jobs:
            try:
                error = pool.ended.get(timeout=self._timeout_s)
            except Empty:
                faulthandler.dump_traceback(all_threads=True)  # where the readers hang
                raise self._hang_error() from None
            if error:
                raise error
        plan, slot = pool.plan, pool.slot
        for name in self._unknown:
            self._join(plan, slot, name, pool.out[name])
        if self._closing.is_set():  # the readers may have left out rows
            return
        if self._stream and slot.copied and slot.used:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.used)
                slot.device.slice(0, plan.n_rows).copy_(slot.host.slice(0, plan.n_rows), non_blocking=True)
                slot.copied.record(self._stream)
        self._ready.put((plan, slot))


def _lower_priority() -> None:
    """Let the loop run first where both want a CPU: it wakes up to queue a step that the device is waiting for.

    Linux gives each thread its own priority.
    """
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + READERS_NICE)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
