"""Host -> device, ahead of the loop: reader threads, staging memory, one copy stream, events.

A slot is one pool's place: staging on the host and, on a GPU, its twin on the device. It has one owner at a time:

    readers         fill slot.host; they may start once the slot's last copy has left it (`copied`)
    copy stream     slot.host -> slot.device; it waits on the device for the loop's last use (`used`)
    loop            reads slot.device after its stream has waited for `copied`; when it asks for the next pool,
                    `used` is recorded behind all it has queued, and the slot is free again

The pools' memory is allocated once. Nothing in the steady loop allocates on the device, synchronises the host with it,
or calls `record_stream`. On a CPU host and device are the same memory and the events are no-ops; the rest is the same.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fastgpu.rows.contract import PoolPlan, Read
from fastgpu.rows.field import Field
from fastgpu.rows.rows import Rows

JOB_BYTES = 1 << 20  # a reader fetches at least so much at a time,
JOBS_A_READER = 8  # or else this part of its share of a pool
READERS_NICE = 5  # priority of the readers below the loop's, in steps of nice(1)


class Supplier(Protocol):
    """Rows that any thread may read: a `Store`, `Arrays`, `ImageFiles`, `Loading`."""

    fields: dict[str, Field]
    block_rows: np.ndarray
    lengths: Mapping[str, np.ndarray]

    @property
    def row_bytes(self) -> int: ...

    def read(self, reads: Iterable[Read], out: Mapping[str, Any]) -> None:
        """Rows first, first + 1, ... of each block -> out[field][places].

        Of ragged fields, `out` holds a RaggedArray whose offsets say where the values of each place go.
        """


class _Slot(NamedTuple):
    host: Rows
    device: Rows
    copied: torch.cuda.Event | None
    used: torch.cuda.Event | None


class Prefetcher:
    """Pools on the device in the order of the plans, `slots - 1` of them prepared ahead of the one in use.

    rows: their `read` is called from `readers` threads. pool_rows: of the largest pool. pool_values: {ragged field:
    values of the fullest pool}. `start` may be called again at any time; `close` ends every thread.
    """

    def __init__(
        self,
        rows: Supplier,
        pool_rows: int,
        device: torch.device,
        readers: int,
        slots: int,
        pin_memory: bool = True,
        pool_values: Mapping[str, int] | None = None,
    ):
        self._rows, self._readers, self._device = rows, readers, device
        self._block_start = (
            np.cumsum(rows.block_rows, dtype=np.int64) - rows.block_rows if rows.lengths else np.empty(0)
        )
        job_rows = JOB_BYTES // max(1, rows.row_bytes)
        self._rows_a_job = max(1, job_rows, pool_rows // (JOBS_A_READER * readers))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [self._make_slot(pool_rows, pool_values or {}, pin_memory) for _ in range(slots)]
        if self._stream:  # the slots' memory may have had an owner whose kernels still run on the loop's stream
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread: threading.Thread | None = None
        self._supply = self._asked = (0.0, 0)  # seconds, rows: read so far; of them, when last asked
        self._handed_t0 = 0.0

    def _make_slot(self, pool_rows: int, pool_values: Mapping[str, int], pin_memory: bool) -> _Slot:
        pinned = pin_memory and self._stream is not None
        host = Rows.empty(self._rows.fields, pool_rows, torch.device("cpu"), pinned, pool_values)
        if self._stream is None:
            return _Slot(host, host, None, None)
        return _Slot(host, host.on(self._device), torch.cuda.Event(), torch.cuda.Event())

    def start(self, plans: Iterator[PoolPlan]) -> None:
        """Begin to read; what an earlier start had prepared is dropped."""
        self.close()
        self._closing = threading.Event()
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[PoolPlan, _Slot] | BaseException | None] = SimpleQueue()
        for slot in self._slots:
            self._release(slot)
        self._thread = threading.Thread(target=self._run, args=(plans,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[PoolPlan, Rows]]:
        """(plan, its rows on the device, valid until the next pool is asked for). Raises what a reader raised."""
        while True:
            item = self._ready.get()
            if not isinstance(item, tuple):
                self._ready.put(item)  # for whoever asks again
                self.close()
                if item:
                    raise item
                return
            plan, slot = item
            if slot.copied:
                torch.cuda.current_stream(self._device).wait_event(slot.copied)
            yield plan, slot.device.slice(0, plan.rows)
            self._release(slot)

    def supply_s(self) -> float:
        """Seconds of reading a row took since last asked: from one pool's last row to the next's, without the time
        that the readers had no slot to fill. 0 if none was read."""
        (seconds, rows), (before_s, before) = self._supply, self._asked
        self._asked = seconds, rows
        return (seconds - before_s) / max(1, rows - before)

    def close(self) -> None:
        """End the threads; safe to call twice, and while a pool is in use."""
        if self._thread:
            self._closing.set()
            self._free.put(None)
            self._thread.join()
            self._thread = None

    def _release(self, slot: _Slot) -> None:
        if slot.used:
            slot.used.record(torch.cuda.current_stream(self._device))
        self._free.put(slot)

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self, plans: Iterator[PoolPlan]) -> None:
        """Keep every free slot filling, and hand the filled ones over in order."""
        filling: deque[tuple[PoolPlan, _Slot, float, list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(self._readers, "reader", initializer=_step_back)
        end: BaseException | None = None
        try:
            more = True
            while more or filling:
                try:  # with reads under way, do not wait for a slot: the loop may need those pools to free one
                    slot = self._free.get(block=not filling) if more else None
                except Empty:
                    slot = None
                if self._closing.is_set():
                    break
                if slot and (plan := next(plans, None)):
                    if slot.copied:
                        slot.copied.synchronize()  # the readers may overwrite the staging memory now
                    out, t0 = slot.host.numpy(), time.perf_counter()
                    self._lay_out(plan, out)
                    reads = [pool.submit(self._fill, job, out) for job in self._jobs(plan.reads)]
                    filling.append((plan, slot, t0, reads))
                elif slot:
                    more = False
                else:
                    self._hand_over(*filling.popleft())
        except BaseException as error:
            end = error  # the loop raises it, with this thread's traceback
        pool.shutdown(cancel_futures=True)
        self._ready.put(end)

    def _lay_out(self, plan: PoolPlan, out: Mapping[str, Any]) -> None:
        """The offsets of ragged rows, which say where each row's values go."""
        for name, lengths in self._rows.lengths.items():
            offsets = out[name].offsets[: plan.rows + 1]
            for block, first, places in plan.reads:
                start = self._block_start[block] + first
                offsets[places + 1] = lengths[start : start + len(places)]
            np.cumsum(offsets, out=offsets)

    def _jobs(self, reads: list[Read]) -> Iterator[list[Read]]:
        """Reads in portions worth a thread's while: a block may be a single row."""
        start = rows = 0
        for stop, read in enumerate(reads, 1):
            rows += len(read.places)
            if rows >= self._rows_a_job or stop == len(reads):
                yield reads[start:stop]
                start, rows = stop, 0

    def _fill(self, reads: list[Read], out: Mapping[str, Any]) -> None:
        self._rows.read(takewhile(lambda _: not self._closing.is_set(), reads), out)

    def _hand_over(self, plan: PoolPlan, slot: _Slot, t0: float, reads: list[Future[None]]) -> None:
        for read in reads:
            read.result()
        now, (seconds, rows) = time.perf_counter(), self._supply
        self._supply = seconds + now - max(t0, self._handed_t0), rows + plan.rows
        self._handed_t0 = now
        if self._stream and slot.copied and slot.used:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.used)
                slot.device.slice(0, plan.rows).copy_(slot.host.slice(0, plan.rows), non_blocking=True)
                slot.copied.record(self._stream)
        self._ready.put((plan, slot))


def _step_back() -> None:
    """Let the loop go before this thread where both want a CPU: it wakes up to queue a step that the device waits for.

    Linux gives threads priorities of their own; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + READERS_NICE)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
