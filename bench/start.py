"""From `python train.py` to the first step: digits, 128 shards of 1 GB, and 10^9 rows.

python bench/start.py

The files of the large cases are sparse: their metadata is that of full files, and their bytes are holes, which read as
zeros without a disk. So the time is that of this project's code, h5py and torch, not of a disk.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import project
import psutil
import publish

ROUNDS = 5
N_SHARDS = 128
SHARD_ROWS = 21_845
"""Rows of 3 x 128 x 128 bytes in 1 GB."""
N_SMALL_ROWS = 10**9
"""Rows of 16 bytes and a label of 4."""
LIMITS_S = {"digits": 1.0, f"{N_SHARDS} shards of 1 GB": 2.0, "10^9 rows of 20 bytes": 3.0}
"""What may pass before the first step besides the import of torch."""


def write_sparse(file: h5py.File, name: str, shape: tuple[int, ...], *, dtype: str, chunk_rows: int) -> None:
    """A dataset whose chunks have their places in the file and are never written."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((chunk_rows, *shape[1:]))
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype)), space, plan)


def make_cases(folder: Path) -> dict[str, list[str]]:
    """{case: arguments of train.py}. Writes the files."""
    for number in range(N_SHARDS):
        with h5py.File(folder / f"shard-{number:03d}.h5", "w") as file:
            write_sparse(file, "images", (SHARD_ROWS, 3, 128, 128), dtype="u1", chunk_rows=64)
            file["labels"] = np.arange(SHARD_ROWS, dtype=np.int64) % 10
    with h5py.File(folder / "small-rows.h5", "w") as file:
        write_sparse(file, "x", (N_SMALL_ROWS, 16), dtype="u1", chunk_rows=1 << 17)
        write_sparse(file, "y", (N_SMALL_ROWS,), dtype="f4", chunk_rows=1 << 19)
    with h5py.File(folder / "small-val.h5", "w") as file:
        file["x"] = np.zeros((1000, 16), np.uint8)
        file["y"] = np.zeros(1000, np.float32)
    data = f"train: {folder}/small-rows.h5, val: {folder}/small-val.h5, fields: {{x: x, y: y}}, batch_size: 8192"
    (folder / "small.yaml").write_text(f"workload: minimal\ndata: {{{data}}}\nmodel: {{hidden_dim: 8}}\n")
    network = ["model.width=8", "model.blocks=1"]
    digits, shards, small_rows = LIMITS_S
    return {
        digits: network,
        shards: [*network, f"data.train={folder}/shard-*.h5", f"data.val={folder}/shard-000.h5", "data.tier=disk"],
        small_rows: ["--config", str(folder / "small.yaml")],
    }


def measure(arguments: list[str], folder: Path) -> dict[str, float]:
    """Seconds of one start in a process of its own."""
    command = [sys.executable, __file__, "--child", *arguments, f"run.folder={folder}/runs", "log.every_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=project.FOLDER, env=environment, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def start(arguments: list[str]) -> None:
    """Run train.py in this process up to its first point of the log, and print the times as JSON."""
    begun = psutil.Process().create_time()
    before_torch = time.time()
    import torch._dynamo  # noqa: F401 (any optimizer of torch imports it)

    torch_s = time.time() - before_torch
    from fastgpu.run.run import Run
    from fastgpu.telemetry import TensorBoard

    times = {"import of torch": torch_s}
    count = Run.count

    def note_first_step(self: Run, *args: Any) -> None:
        times.setdefault("first step", time.time() - begun)
        count(self, *args)

    def note_first_point(self: TensorBoard, *args: Any) -> None:
        times["first point of the log"] = time.time() - begun
        print(json.dumps(times), flush=True)
        os._exit(0)

    Run.count = note_first_step  # type: ignore[method-assign]
    TensorBoard.write = note_first_point  # type: ignore[method-assign]
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cases = make_cases(Path(name))
        data: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
        for _ in range(ROUNDS + 1):  # the first round warms the page cache, and Python writes its bytecode
            for case, arguments in cases.items():
                print(case, file=sys.stderr, flush=True)
                data[case].append(measure(arguments, Path(name)))
    rows = []
    for case, rounds in data.items():
        del rounds[0]
        columns = {key: [times[key] for times in rounds] for key in rounds[0]}
        rest = [step - torch for step, torch in zip(columns["first step"], columns["import of torch"], strict=True)]
        rows.append(
            [case, *(publish.spread(each, ".2f") for each in (*columns.values(), rest)), f"< {LIMITS_S[case]:g}"]
        )
    note = (
        f"Seconds since the process began; median of {ROUNDS} rounds, minimum and maximum. `import of torch` includes "
        "torch._dynamo, which every optimizer of torch imports. `rest` is the time to the first step without it: "
        "Python, the other imports, config, files, model, the first pool of up to 256 MiB and the first step itself, "
        "on a CPU in one thread."
    )
    titles = ["case", *columns, "rest", "required"]
    table = publish.Table("seconds to the first step", titles, rows, note)
    publish.write("start", [table], data, "python bench/start.py")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        start(sys.argv[2:])
    else:
        main()
