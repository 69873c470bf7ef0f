"""Rows of a file that is larger than the free memory: through the page cache, and around it (O_DIRECT).

Needs root: a cgroup limits the memory of each run, page cache included. Every run is a process of its own that begins
with an evicted file; its first epoch is not counted. The project's feed reads around the page cache and through it, in
turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import data
import ours
import publish
from data import DataSpec
from processes import make_cold
from publish import spread, take_turns
from tables import compare, cpu_us, speeds

from fastgpu.storage import store

CGROUPS = Path("/sys/fs/cgroup")
SPEC = DataSpec("rows", 40_000, (3, 128, 128), 256)
PROCESS_BYTES = 500 << 20
"""What a process needs besides the page cache."""
TIMES_FREE = (1.25, 1.6, 2.5, 5.0)
"""Size of the file / free memory."""
EPOCHS = 3
WAYS = ("around", "through")


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[Path]:
    """A cgroup with this limit, of version 2 or 1. Yields the file that takes the processes of it."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = CGROUPS / ("" if is_v2 else "memory") / f"fastgpu-bench-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(n_bytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def measure(way: str, path: Path, limit: int) -> dict[str, float]:
    """What `run_feed` prints in a process under the limit."""
    make_cold([path])
    with memory_limit(limit) as procs:
        command = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", sys.executable, __file__, "--child", way, path]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return json.loads(subprocess.check_output(command, env=environment))


def run_feed(way: str, path: Path) -> None:
    """Read the epochs, and print rows, seconds and CPU seconds of all but the first one."""
    store.AROUND_PAGE_CACHE = 0.0 if way == "around" else float("inf")
    rows = ours.open_rows(path)
    assert rows.file.is_direct == (way == "around")
    # Small pools, because they count as memory of the process.
    with closing(ours.open_feed(rows, SPEC.batch_size, n_readers=2, pool_batches=5)) as feed:
        for epoch in range(1 + EPOCHS):
            if epoch == 1:
                t0, cpu_before_s = time.perf_counter(), time.process_time()
            n_rows = sum(pool.plan.n_rows for pool in feed.pools(epoch))
    seconds, cpu_s = time.perf_counter() - t0, time.process_time() - cpu_before_s
    print(json.dumps({"rows": EPOCHS * n_rows, "seconds": seconds, "cpu_s": cpu_s}))


def main() -> None:
    args = publish.parser(__doc__).parse_args()
    spec = SPEC.small() if args.quick else SPEC
    data.make(spec)
    rows = []
    results = {}
    for times_free in TIMES_FREE:
        limit = PROCESS_BYTES + int(spec.h5.stat().st_size / times_free)
        ways = {way: partial(measure, way, spec.h5, limit) for way in WAYS}
        measured = results[f"{times_free:g}"] = take_turns(f"{times_free} x", ways, args.rounds)
        cells = [spread(speeds(measured, way), ",.0f") for way in WAYS]
        cells.append(spread(compare(measured, *WAYS), ".2f"))
        cells += [spread(cpu_us(measured, way), ",.0f") for way in WAYS]
        rows.append([f"{times_free:g}", *cells])
    columns = ["size / free memory", *(f"{way}, rows/s" for way in WAYS), "around / through"]
    columns += [f"{way}, CPU us/row" for way in WAYS]
    note = (
        f"{spec.n_rows:,} rows of {spec.row_bytes:,} bytes in blocks of 2 MiB, two readers; {EPOCHS} epochs after the "
        "first one; median, minimum and maximum; ratios within a round. The free memory is what a cgroup leaves beside "
        f"{PROCESS_BYTES >> 20} MiB for the process."
    )
    table = publish.Table("files larger than the memory", columns, rows, note)
    publish.write_result("beyond-ram", [table], results, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_feed(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
