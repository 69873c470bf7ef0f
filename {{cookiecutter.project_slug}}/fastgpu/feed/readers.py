"""The readers of a loader: their number, the size of their jobs, and an account of their time."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fastgpu.dataset.source import ItemDataset, rows_per_ask
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import read_launch
from fastgpu.process.machine import cpus_of_rank, lower_priority
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.filters import DECODING

MAX_READERS = 8
"""Maximum number of threads that copy rows, if loader.num_readers is auto. Threads that decode may use all CPUs."""
NETWORK_READERS = 64
"""Number of threads that read through a network, if loader.num_readers is auto. They wait for most of their time."""
JOB_BYTES = 1 << 20
"""Minimum size of a job of a reader thread. A pool has at most 8 jobs for each thread."""


def choose_readers(source: Dataset, loader: LoaderConfig, n_local: int) -> tuple[str, int]:
    """(key of section `loader`, number): reader threads of each rank, or worker processes for a torch Dataset.

    auto: one for each CPU of the rank. Threads that only copy are at most MAX_READERS; threads that wait for a network
    are NETWORK_READERS. n_local: number of ranks that share the CPUs of this machine.
    """
    has_items = isinstance(source, ItemDataset)
    key, asked = ("num_workers", loader.num_workers) if has_items else ("num_readers", loader.num_readers)
    if asked != "auto":
        return key, asked
    if not source.is_local:
        return key, NETWORK_READERS
    n_cpus = cpus_of_rank(n_local)
    return key, n_cpus if has_items or source.decoding else min(n_cpus, MAX_READERS)


class Readers:
    """The work of the reader threads of a loader, and an account of their time."""

    def __init__(self, source: Dataset, sampler: BlockSampler, loader: LoaderConfig):
        """Start worker processes for a torch Dataset that has none yet. Raises UserError if that is impossible."""
        n_local = read_launch().local_world_size
        _, n_readers = choose_readers(source, loader, n_local)
        self.source = source
        self.n_threads = n_readers
        self.rows_per_job = max(
            1, JOB_BYTES // max(1, source.row_bytes), sampler.max_pool_rows // (8 * max(1, n_readers))
        )
        if isinstance(source, ItemDataset):
            self.rows_per_job = rows_per_ask(source, sampler)
            if n_readers and not source.n_workers:  # a training run has started them when it opened the Dataset
                self.source = source = source.with_workers(n_readers, loader.timeout_s)
            # While one thread of a worker copies rows to their places, the worker reads for the other thread. Without
            # workers, the loop itself reads: a Dataset may belong to its thread, as a connection to SQLite does.
            self.n_threads = 2 * source.n_workers
        # When all rows are on this machine, 64 threads would wait for CPUs. A number that is not from `auto` is kept.
        is_chosen_for_network = n_readers == NETWORK_READERS and not source.is_local
        self._n_later = min(self.n_threads, cpus_of_rank(n_local)) if is_chosen_for_network else self.n_threads
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._reading_s = self._decoding_s = 0.0  # sums over all threads
        self._n_requests = source.n_requests

    def work(self, jobs: SimpleQueue[Any], inbox: SimpleQueue[Any], closing: threading.Event) -> None:
        """The main function of a thread. jobs: (job, done) for `do`; None ends the thread. `closing` ends it, too."""
        lower_priority()
        while (item := jobs.get()) and not closing.is_set():
            self.do(item[0], item[1], inbox)

    def do(self, job: Callable[[], None], done: object, inbox: SimpleQueue[Any]) -> None:
        """Do a job. Put `done` into the inbox, or the error that the job raised."""
        t0, decoding_s = time.perf_counter(), DECODING.seconds
        try:
            job()
            decoding_s = DECODING.seconds - decoding_s
            with self._lock:
                self._reading_s += time.perf_counter() - t0 - decoding_s
                self._decoding_s += decoding_s
            inbox.put(done)
        except BaseException as error:
            inbox.put(error)

    def dismiss(self) -> int:
        """The number of threads to end, because all rows are on this machine now. Counts them as ended."""
        if self.n_threads == self._n_later or not self.source.is_local:
            return 0
        n_surplus, self.n_threads = self.n_threads - self._n_later, self._n_later
        return n_surplus

    def bottleneck(self) -> str:
        """The stage that took most of the readers' time since the last call, and what to try first, in words.

        Empty if the readers were idle for half of the time or more: then they were not the reason for a wait.
        """
        now, n_readers = time.perf_counter(), max(1, self.n_threads)
        with self._lock:
            reading_s, decoding_s, elapsed_s = self._reading_s, self._decoding_s, now - self._since
            self._reading_s = self._decoding_s = 0.0
            self._since = now
        n_before, self._n_requests = self._n_requests, self.source.n_requests
        if reading_s + decoding_s < n_readers * elapsed_s / 2:
            return ""
        if isinstance(self.source, ItemDataset):
            cure = f"try loader.num_workers={2 * self.source.n_workers or 'auto'}"
            return f"the Dataset's items; {cure}, or write them to an HDF5 file once"
        if decoding_s > reading_s:
            return "decoding; try to decode once, into pixels without compression, or more CPUs"
        cure = f"try loader.num_readers={2 * n_readers}"
        if self._n_requests > n_before:
            return f"the network; each block is fetched only once, to data.cache; {cure}"
        return f"reading; {cure}, or a faster disk"
