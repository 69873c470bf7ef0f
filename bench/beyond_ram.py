"""Rows of a file that is larger than the free memory: through the page cache, and around it (O_DIRECT).

python bench/beyond_ram.py

Needs root: a cgroup limits the memory of each run, page cache included. Every run is a process of its own that begins
with an evicted file; its first epoch is not counted. Three ways take turns:

    around      the project's store and feed, told to read around the page cache
    through     the same, told to use it
    8 readers   eight threads that read blocks of 2 MiB in random order and throw them away: the limit by plain reads
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import project  # noqa: F401
import publish
from processes import make_cold

CGROUPS = Path("/sys/fs/cgroup")
SHAPE = (3, 128, 128)
ROW_BYTES = 3 * 128 * 128
BLOCK_BYTES = 2 << 20
BATCH = 256
POOL_BATCHES = 5
"""Small pools, because they count as memory of the process."""
PROCESS_BYTES = 500 << 20
"""What a process needs besides the page cache."""
TIMES_FREE = (1.25, 1.6, 2.5, 5.0)
"""Size of the file / free memory."""
EPOCHS = 3
WAYS = ("around", "through", "8 readers")


def write_rows(path: Path, n_rows: int) -> None:
    """Random bytes, block by block."""
    rng = np.random.default_rng(0)
    block_rows = BLOCK_BYTES // ROW_BYTES
    with h5py.File(path, "w", libver="latest") as file:
        images = file.create_dataset("images", (n_rows, *SHAPE), np.uint8, chunks=(block_rows, *SHAPE))
        for start in range(0, n_rows, block_rows):
            count = min(block_rows, n_rows - start)
            images[start : start + count] = rng.integers(0, 256, (count, *SHAPE), np.uint8)
        file["labels"] = np.zeros(n_rows, np.int64)


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[Path]:
    """A cgroup with this limit, of version 2 or 1. Yields the file that takes the processes of it."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = CGROUPS / ("" if is_v2 else "memory") / "fastgpu-bench"
    folder.mkdir()
    try:
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(n_bytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def measure(way: str, path: Path, limit: int) -> dict[str, float]:
    """One process under the limit. Returns rows/s after the first epoch, and CPU time for each row in us."""
    make_cold([path])
    with memory_limit(limit) as procs:
        command = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", sys.executable, __file__, "--child", way, path]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_feed(way: str, path: Path) -> None:
    """Read some epochs by the project's feed."""
    import torch

    from fastgpu.feed.tiers import Placement, make_feed
    from fastgpu.rows.order import BlockSampler
    from fastgpu.storage import store as store_module

    store_module.AROUND_PAGE_CACHE = 0.0 if way == "around" else float("inf")
    store = store_module.open_store("data.train", str(path), {"images": "images", "labels": "labels"})
    if store.around_page_cache != (way == "around"):
        raise SystemExit(f"{path} is not read {way} the page cache")
    order = BlockSampler(store.block_rows, BATCH, seed=0, pool_batches=POOL_BATCHES)
    feed = make_feed(store, order, Placement("disk", torch.device("cpu"), n_readers=2))
    for epoch in range(1 + EPOCHS):
        if epoch == 1:
            begin = time.perf_counter(), time.process_time()
        n_rows = sum(pool.plan.n_rows for pool in feed.pools(epoch))
    report(EPOCHS * n_rows, *begin)
    feed.close()


def run_plain_readers(path: Path) -> None:
    """Read some epochs of blocks in random order by eight threads."""
    n_blocks = path.stat().st_size // BLOCK_BYTES

    def read(blocks: np.ndarray) -> None:
        buffer = bytearray(BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            for block in blocks.tolist():
                os.preadv(file.fileno(), [buffer], block * BLOCK_BYTES)

    for epoch in range(1 + EPOCHS):
        if epoch == 1:
            begin = time.perf_counter(), time.process_time()
        blocks = np.random.default_rng(epoch).permutation(n_blocks)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(read, np.array_split(blocks, 8)))
    report(EPOCHS * n_blocks * BLOCK_BYTES // ROW_BYTES, *begin)


def report(n_rows: int, begin_s: float, begin_cpu_s: float) -> None:
    seconds = time.perf_counter() - begin_s
    cpu_us = 1e6 * (time.process_time() - begin_cpu_s) / n_rows
    print(json.dumps({"rows/s": n_rows / seconds, "CPU us/row": cpu_us}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    table_rows = []
    data: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.h5"
        write_rows(path, args.rows)
        for times_free in TIMES_FREE:
            limit = PROCESS_BYTES + int(path.stat().st_size / times_free)
            results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(args.rounds):
                for way in WAYS:
                    print(f"{times_free} x, round {number + 1}, {way}", file=sys.stderr, flush=True)
                    results[way].append(measure(way, path, limit))
            data[f"{times_free:g}"] = results
            rates = {way: [each["rows/s"] for each in results[way]] for way in WAYS}
            table_rows.append(
                [
                    f"{times_free:g}",
                    *(publish.spread(rates[way], ",.0f") for way in WAYS),
                    *(publish.spread(publish.ratios(rates["around"], rates[way]), ".2f") for way in WAYS[1:]),
                    *(publish.spread([each["CPU us/row"] for each in results[way]], ",.0f") for way in WAYS[:2]),
                ]
            )
    titles = [
        "size / free memory",
        *(f"{way}, rows/s" for way in WAYS),
        *(f"around / {way}" for way in WAYS[1:]),
        *(f"{way}, CPU us/row" for way in WAYS[:2]),
    ]
    note = (
        f"{args.rows:,} rows of {ROW_BYTES:,} bytes in blocks of 2 MiB; {EPOCHS} epochs after the first one, two "
        f"readers; median of {args.rounds} rounds, minimum and maximum; ratios within a round. The free memory is what "
        f"a cgroup leaves beside {PROCESS_BYTES >> 20} MiB for the process."
    )
    table = publish.Table("files larger than the memory", titles, table_rows, note)
    publish.write("beyond-ram", [table], data, "python bench/beyond_ram.py")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--child"]:
        main()
    elif sys.argv[2] == "8 readers":
        run_plain_readers(Path(sys.argv[3]))
    else:
        run_feed(sys.argv[2], Path(sys.argv[3]))
