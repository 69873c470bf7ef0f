"""From `python train.py` to the first point of its log: digits, 128 shards of 1 GB, and 10^9 rows.

The files of the large cases are sparse: their metadata is that of full files, and their bytes are holes, which read as
zeros without a disk. So the time is that of this project's code, h5py and torch, not of a disk.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import publish
from peers import PROJECT
from publish import spread, take_turns

SHARD_ROWS = 21_845
"""Rows of 3 x 128 x 128 bytes in 1 GB."""
DIGITS, SHARDS, SMALL_ROWS = "digits", "128 shards of 1 GB", "10^9 rows of 20 bytes"
LIMITS_S = {DIGITS: 1.0, SHARDS: 2.0, SMALL_ROWS: 3.0}
"""What may pass before the first point besides the import of torch."""
TORCH = "import of torch"


def write_sparse(file: h5py.File, name: str, shape: tuple[int, ...], *, dtype: str, chunk_rows: int) -> None:
    """A dataset whose chunks have their places in the file and are never written."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((chunk_rows, *shape[1:]))
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype)), space, plan)


def make_cases(folder: Path, *, is_quick: bool) -> dict[str, list[str]]:
    """{case: arguments of train.py}. Writes the files."""
    n_shards, n_small_rows = (2, 10**6) if is_quick else (128, 10**9)
    for number in range(n_shards):
        with h5py.File(folder / f"shard-{number:03d}.h5", "w") as file:
            write_sparse(file, "images", (SHARD_ROWS, 3, 128, 128), dtype="u1", chunk_rows=64)
            file["labels"] = np.arange(SHARD_ROWS, dtype=np.int64) % 10
    with h5py.File(folder / "small-rows.h5", "w") as file:
        write_sparse(file, "x", (n_small_rows, 16), dtype="u1", chunk_rows=1 << 17)
        write_sparse(file, "y", (n_small_rows,), dtype="f4", chunk_rows=1 << 19)
    with h5py.File(folder / "small-val.h5", "w") as file:
        file["x"] = np.zeros((1000, 16), np.uint8)
        file["y"] = np.zeros(1000, np.float32)
    data = f"train: {folder}/small-rows.h5, val: {folder}/small-val.h5, fields: {{x: x, y: y}}, batch_size: 8192"
    (folder / "small.yaml").write_text(f"workload: minimal\ndata: {{{data}}}\nmodel: {{hidden_dim: 8}}\n")
    network = ["model.width=8", "model.blocks=1"]
    return {
        DIGITS: network,
        SHARDS: [*network, f"data.train={folder}/shard-*.h5", f"data.val={folder}/shard-000.h5", "data.tier=disk"],
        SMALL_ROWS: ["--config", str(folder / "small.yaml")],
    }


def first_point_s(arguments: list[str], folder: Path) -> float:
    """Seconds until train.py has written a point to metrics.jsonl."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", *arguments, f"run.folder={runs}", "log.every_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    t0 = time.perf_counter()
    with subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=sys.stderr) as process:
        while not any(path.stat().st_size for path in runs.rglob("metrics.jsonl")):
            assert process.poll() is None, f"{' '.join(command)} ended before its first point"
            time.sleep(0.005)
        seconds = time.perf_counter() - t0
        process.kill()
    return seconds


def import_s() -> float:
    """Seconds until a process has imported torch, with torch._dynamo, which any optimizer of torch imports."""
    command = [sys.executable, "-c", "import torch._dynamo; print(flush=True)"]
    t0 = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        return time.perf_counter() - t0


def main() -> None:
    parser = publish.parser(__doc__)
    parser.set_defaults(rounds=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = make_cases(folder, is_quick=args.quick)
        ways = {TORCH: import_s, **{case: partial(first_point_s, words, folder) for case, words in cases.items()}}
        results = {way: times[1:] for way, times in take_turns("start", ways, args.rounds + 1).items()}
    rows = []  # the first round, which warms the page cache, does not count
    for case, limit_s in LIMITS_S.items():
        rest = [whole - torch for whole, torch in zip(results[case], results[TORCH], strict=True)]
        cells = [spread(values, ".2f") for values in (results[TORCH], results[case], rest)]
        rows.append([case, *cells, f"< {limit_s:g}"])
    columns = ["case", TORCH, "first point of the log", "rest", "required"]
    note = (
        "Seconds from the start of a process; median, minimum and maximum. Rest: the time to the first point without "
        "that of the import: other imports, config, files, model, the first pool of up to 256 MiB and the first step, "
        "on a CPU in one thread."
    )
    publish.write_result("start", [publish.Table("seconds to the first point", columns, rows, note)], results, args)


if __name__ == "__main__":
    main()
