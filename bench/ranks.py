"""What grows with the number of ranks, from 2 to 1,024, on a machine that has room for one of them?

python bench/ranks.py

One rank is real. The others are torch's fake process group, which answers at once, or threads that ask a real store.
So this is the work of this project's code and of the store, not of a network: each table says what it is.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning for each connection to the store

import numpy as np
import project  # noqa: F401
import psutil
import publish
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastgpu.process.launch import Launch
from fastgpu.process.peers import Peers
from fastgpu.process.world import World
from fastgpu.rows.mixture import MixedSampler, Mixture
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.run.checkpoint import Progress
from fastgpu.telemetry.log import Log
from fastgpu.telemetry.tags import machine_names

RANKS = (2, 8, 64, 256, 1024)
GPUS = 8
"""GPUs of a machine."""
ROUNDS = 5
CALLS = 20
"""Calls of a round; their mean counts."""
STORE_TIMEOUT = timedelta(seconds=120)
N_BLOCKS = 100_000
BLOCK_ROWS = 100
GLOBAL_BATCH = 8192
POOL_BATCHES = 16


class Alike(World):
    """Rank 0 of a job whose other ranks have the same values. torch's part of a collective runs; nothing is sent."""

    def all_gather(self, value: float) -> list[float]:
        super().all_gather(value)
        return [value] * self.world_size


class Machines(World):
    """Rank 0 of a job on machines with eight GPUs each, all of which report the same counters."""

    def all_gather(self, value: float) -> list[float]:
        super().all_gather(value)
        return [float(rank % GPUS == 0) for rank in range(self.world_size)]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        super().all_reduce_sum(values)
        if values.ndim == 2:
            values[1:] = values[0]
        return values


def spread(values: Iterable[float]) -> str:
    """Median, minimum and maximum; one number if they are the same."""
    values = [*values]
    shown = [f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (median(values), min(values), max(values))]
    return f"{shown[0]} [{shown[1]}-{shown[2]}]" if shown[1] != shown[2] else shown[0]


def time_ms(function: Callable[[], object]) -> float:
    """Mean of some calls."""
    function()
    t0 = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1000 * (time.perf_counter() - t0) / CALLS


def make_world(kind: type[World], n_ranks: int) -> World:
    """Rank 0 of so many ranks, with a fake process group of this size."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    return kind(0, n_ranks, min(GPUS, n_ranks), torch.device("cpu"))


# ---------------------------------------------------------------------------------------------- rank 0's own work


def measure_checks(n_ranks: int) -> dict[str, float]:
    """Time in ms of each exchange of a start, and of the one that agrees on a checkpoint."""
    settings = {f"section.key{number}": number for number in range(150)}
    world = make_world(Alike, n_ranks)
    return {
        "check_same (150 settings)": time_ms(lambda: world.check_same(settings)),
        "check_everywhere": time_ms(lambda: world.check_everywhere(True, "")),
        "agreement on the checkpoint": time_ms(lambda: world.check_same({"the last checkpoint": Progress()})),
        "asking for signals": time_ms(lambda: world.all_reduce_max(0.0)),
    }


def measure_report(n_ranks: int) -> dict[str, float]:
    """Time in ms and bytes of one point of the log, from gathering the counters to the file and TensorBoard."""
    world = make_world(Machines, n_ranks)
    names = machine_names(GPUS)
    own = dict.fromkeys(names, 12.345678)
    point = world.gather_by_node(own, names)
    payload = pickle.dumps((True, own))
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder), planned_rows=1, config={"log.to": ["tensorboard"]})
        threads_before_s = time.process_time() - time.thread_time()
        loop_ms = time_ms(lambda: log.scalars(1, point))
        log.finish({})  # waits for the thread of the sinks
        threads_s = time.process_time() - time.thread_time() - threads_before_s
        line = (Path(folder) / "metrics.jsonl").read_text().splitlines()[-1]
    return {
        "tensors: gather, ms": time_ms(lambda: world.gather_by_node(own, names)),
        "objects: unpickle, ms": time_ms(lambda: [pickle.loads(payload) for _ in range(n_ranks)]),
        "scalars": len(point),
        "bytes of metrics.jsonl": len(line) + 1,
        "in the loop, ms": loop_ms,
        "TensorBoard's thread, CPU ms": 1000 * threads_s / (CALLS + 1),
    }


def measure_sampler(n_ranks: int) -> dict[str, float]:
    """Time and memory of the first pool of a rank in the middle, and time of each further one."""
    block_rows = np.full(N_BLOCKS, BLOCK_ROWS, np.int32)
    shard = Shard(n_ranks // 2, n_ranks)
    make = partial(BlockSampler, block_rows, GLOBAL_BATCH // n_ranks, shard=shard, pool_batches=POOL_BATCHES)
    t0 = time.perf_counter()
    plans = make().pools(0)
    next(plans)
    first_ms = 1000 * (time.perf_counter() - t0)
    pool_ms = time_ms(lambda: next(plans))
    tracemalloc.start()
    order = make()
    plans = order.pools(0)
    next(plans)
    memory_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    few = block_rows[: N_BLOCKS // 10]
    mixture = Mixture(("a", "b"), (1.0, 3.0), np.repeat([0, 1], len(few) * BLOCK_ROWS // 2), by_block=True)
    t0 = time.perf_counter()
    mixed = MixedSampler(mixture, few, GLOBAL_BATCH // n_ranks, shard=shard, pool_batches=POOL_BATCHES)
    next(mixed.pools(0))
    mixed_ms = 1000 * (time.perf_counter() - t0)
    return {
        "first pool, ms": first_ms,
        "each further pool, ms": pool_ms,
        "memory, MB": memory_mb,
        "mixture of 10^6 rows: first pool, ms": mixed_ms,
    }


# ---------------------------------------------------------------------------------------------- the store


def serve() -> None:
    """Hold a store until stdin ends; for each line, print this process's memory in bytes and its open files."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    print(store.port, flush=True)
    for _ in sys.stdin:
        me = psutil.Process()
        print(me.memory_info().rss, me.num_fds(), flush=True)


def measure_store(n_ranks: int) -> list[dict[str, float]]:
    """Rounds in which every rank is a thread with a connection of its own to one store, in another process."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        port = int(server.stdout.readline())

        def connect(_: int) -> dist.Store:
            return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)

        sizes = []
        stores: list[dist.Store] = []
        for n_connections in (0, n_ranks):
            with ThreadPoolExecutor(n_ranks) as threads:
                stores += threads.map(connect, range(n_connections))
            print(file=server.stdin, flush=True)
            sizes.append([int(number) for number in server.stdout.readline().split()])
        of_store = {"memory, MB": (sizes[1][0] - sizes[0][0]) / 1e6, "open files": sizes[1][1] - sizes[0][1]}
        rounds = [measure_notes(stores, f"round {number}") | of_store for number in range(ROUNDS)]
        server.stdin.close()
    return rounds


def measure_notes(stores: list[dist.Store], prefix: str) -> dict[str, float]:
    """Time in ms until all ranks have an answer. stores: the connection of each rank."""
    n_ranks = len(stores)
    stores = [dist.PrefixStore(prefix, store) for store in stores]
    local = min(GPUS, n_ranks)
    peers = [Peers(store, Launch(rank, n_ranks, rank % local, local)) for rank, store in enumerate(stores)]
    same_s = run_together([partial(each.check_device, "cpu") for each in peers])
    keys = [f"at{rank}" for rank in range(n_ranks)]
    all_s = run_together([partial(store.multi_get, keys) for store in stores])
    peers[-1].tell("its disk is gone")
    why_s = run_together([each.explain for each in peers[:-1]])
    return {"same device, ms": 1000 * same_s, "formerly, ms": 1000 * all_s, "why a rank ended, ms": 1000 * why_s}


def run_together(functions: list[Callable[[], Any]]) -> float:
    """Seconds until all have returned, each in a thread of its own."""
    begin = threading.Barrier(len(functions) + 1)

    def call(function: Callable[[], Any]) -> None:
        begin.wait()
        function()

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    begin.wait()
    t0 = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - t0


# ---------------------------------------------------------------------------------------------- the page

NOTES = {
    "exchanges at start, ms on rank 0": (
        "The fake process group: this is the time of Python and torch on one rank, without a network. Each is one "
        "reduction of a tensor of 8 bytes a rank (8 KB at 1,024), and of 8 bytes for signals. Objects are broadcast "
        "from one rank, and only where ranks differ."
    ),
    "a point of the log": (
        "The fake process group, machines of eight GPUs. `tensors` is what a report exchanges: one tensor of 8 bytes a "
        "rank, and one of 832 bytes a machine (106 KB at 1,024 ranks). `objects` is the former way without the "
        "network: every rank unpickled the counters of all. Above 16 machines a point has the values of the first "
        "machine, and the lowest and highest of all. Two ranks are one machine, which gathers nothing."
    ),
    "sampler": (
        f"A real sampler of one rank over {N_BLOCKS:,} blocks of {BLOCK_ROWS} rows, global batch {GLOBAL_BATCH}, pools "
        f"of {POOL_BATCHES} batches. Nothing is exchanged. The memory is that of NumPy and Python at its peak."
    ),
    "the store of the job": (
        "A real TCPStore in a process of its own, and a thread with a connection for each rank, all at once in one "
        "Python process on this machine: the lock of Python is part of the time, a network is not. `formerly` each "
        "rank asked for the device of every rank. `why a rank ended` begins with a pause of 100 ms; then each rank "
        "makes about 30 requests and looks at seven processes (formerly 3,000 requests at 1,024 ranks). A rank makes "
        "as many requests in a large job as in a small one, so the work of the store grows in proportion. `memory` and "
        "`open files` are what the connections add to the process that holds the store: rank 0, or torchrun. Rank 0 "
        "raises its limit of open files (often 1,024) as far as it may."
    ),
}
STATED = (
    "Not measured here: NCCL and its start, DDP's reduction of gradients, a file system that is shared. What grows "
    "with the ranks there, by reading the code: every machine reads the first blocks of the files and, when it "
    "resumes, the newest checkpoint once (its other ranks find them in the page cache), and every rank opens every "
    "file of the data. Rank 0 alone writes checkpoints and logs, whatever the number of ranks."
)


def main() -> None:
    torch.set_num_threads(1)
    parts: dict[str, Callable[[int], dict[str, float]]] = {
        "exchanges at start, ms on rank 0": measure_checks,
        "a point of the log": measure_report,
        "sampler": measure_sampler,
    }
    data: dict[str, dict[int, list[dict[str, float]]]] = {title: {n: [] for n in RANKS} for title in parts}
    for _ in range(ROUNDS):
        for title, measure in parts.items():
            for n_ranks in RANKS:
                print(f"{title}, {n_ranks} ranks", file=sys.stderr, flush=True)
                data[title][n_ranks].append(measure(n_ranks))
    data["the store of the job"] = {n_ranks: measure_store(n_ranks) for n_ranks in RANKS}
    tables = []
    for title, by_ranks in data.items():
        columns = [*by_ranks[RANKS[0]][0]]
        rows = [
            [f"{n_ranks:,}", *(spread(each[name] for each in rounds) for name in columns)]
            for n_ranks, rounds in by_ranks.items()
        ]
        note = f"{NOTES[title]} Median of {ROUNDS} rounds, minimum and maximum."
        tables.append(publish.Table(title, ["ranks", *columns], rows, note))
    tables[-1] = tables[-1]._replace(note=f"{tables[-1].note}\n\n{STATED}")
    publish.write("ranks", tables, data, "python bench/ranks.py")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
