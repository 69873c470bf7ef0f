"""What does the layout of a file cost? The disk tier reads the same rows in other blocks, compressed, or checked.

python bench/layouts.py

`convert.py info` bases its advice on these numbers. The rows are smooth pictures with a little noise, so that filters
can compress them. How much they save depends on the pictures; it is shown in the table.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import project  # noqa: F401
import publish
from contenders import FastGpu
from data import DataSpec
from peers import Task
from processes import kept_warm, make_cold
from worker import endless, run

from fastgpu.convert.writer import Writer
from fastgpu.convert.writing import complete_or_absent
from fastgpu.rows.rows import Field
from fastgpu.storage.layout import BLOCK_BYTES

ROUNDS = 3
FOLDER = Path(__file__).parent / "data" / "layouts"
DATA = (DataSpec("celeba", 4_000, (3, 218, 178), 256), DataSpec("cifar", 60_000, (3, 32, 32), 1024))
DEFAULT = "blocks of 2 MiB"
N_PICTURES = 500
"""Number of different pictures; they repeat after that."""

Speeds = dict[str, list[float]]
"""{"warm" or "cold": rows/s in each round}"""


def layouts(spec: DataSpec) -> dict[str, dict[str, Any]]:
    """{name: arguments of h5py's create_dataset}. No arguments: the file is written as convert.py does."""
    import hdf5plugin  # here, because other benchmarks take pictures from this module on machines without it

    block_rows = BLOCK_BYTES // spec.row_bytes
    chunks = (block_rows, *spec.shape)
    options: dict[str, dict[str, Any]] = {
        DEFAULT: {},
        "in one piece": {"chunks": None},
        "chunks of 1 row": {"chunks": (1, *spec.shape)},
        "chunks of 64 MiB": {"chunks": (32 * block_rows, *spec.shape)},
        "chunks that split rows (h5py's guess)": {"chunks": True},
        "gzip": {"chunks": chunks, "compression": "gzip", "compression_opts": 1},
        "lz4": {"chunks": chunks, **hdf5plugin.LZ4()},
        "zstd": {"chunks": chunks, **hdf5plugin.Zstd(clevel=1)},
        "fletcher32 (HDF5's own checksum)": {"chunks": chunks, "fletcher32": True},
    }
    if spec.name == "cifar":
        options.pop("chunks of 64 MiB")
    return options


def pictures(n_rows: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 (n_rows, C, H, W): waves of random direction and phase, and noise of a few grey levels."""
    rng = np.random.default_rng(0)
    C, H, W = shape
    images = np.empty((min(n_rows, N_PICTURES), C, H, W), np.uint8)
    y, x = np.mgrid[:H, :W] / 32
    for image in images:
        for channel in image:
            a, b = rng.normal(size=2)
            phase = rng.uniform(0, 6)
            channel[:] = 128 + 90 * np.sin(a * x + b * y + phase) + rng.normal(0, 2, (H, W))
    return np.resize(images, (n_rows, C, H, W))


def write(path: Path, images: np.ndarray, options: dict[str, Any]) -> None:
    """Write images (N, C, H, W) and their numbers as labels. A file that exists is kept."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = np.arange(len(images))
    if not options:
        fields = {"images": Field(images.dtype, images.shape[1:]), "labels": Field(labels.dtype, ())}
        with complete_or_absent(path) as folder, Writer(folder / path.name, len(images), fields) as writer:
            writer.append({"images": images, "labels": labels})
        return
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        file.create_dataset("images", data=images, **options)
        file["labels"] = labels
    partial.rename(path)


def measure(spec: DataSpec, paths: dict[str, Path]) -> dict[str, Speeds]:
    """{layout: its speeds}"""
    speeds: dict[str, Speeds] = {name: {"warm": [], "cold": []} for name in paths}
    for number in range(ROUNDS):
        for name, path in paths.items():
            print(f"{spec.name}, round {number + 1}: {name}", file=sys.stderr, flush=True)
            for kind in ("cold", "warm"):
                task = Task(path, FOLDER, spec.batch_size, n_workers=0, seed=0)
                reader = FastGpu(task)
                stream = endless(reader)
                if kind == "cold":
                    make_cold([path])
                    result = run(stream, None, [0, 10], 0)
                else:
                    with kept_warm([path]):
                        result = run(stream, [0, 1], [1, 2], 0)
                speeds[name][kind].append(result["rows"] / result["seconds"])
                reader.feed.close()
    return speeds


def table(spec: DataSpec, speeds: dict[str, Speeds], paths: dict[str, Path]) -> publish.Table:
    best = speeds[DEFAULT]
    size = paths[DEFAULT].stat().st_size
    rows = []
    for name, by_kind in speeds.items():
        row = [name, f"{paths[name].stat().st_size / size:.2f}"]
        for kind in ("warm", "cold"):
            values = by_kind[kind]
            row += [publish.spread(values, ",.0f"), f"{median(publish.ratios(best[kind], values)):.1f}"]
        rows.append(row)
    columns = ["layout", "size", "warm: rows/s", "times slower", "cold: rows/s", "times slower"]
    shape = "x".join(map(str, spec.shape))
    note = (
        f"{ROUNDS} rounds, in which the layouts take turns: median [minimum-maximum], and the median of the ratios "
        "within a round. Warm: in the page cache. Cold: evicted before; one epoch, which includes the first touch of "
        "the buffers. Size: of the file, relative to the first one."
    )
    return publish.Table(f"{spec.name}: {spec.n_rows:,} rows of {shape} uint8", columns, rows, note)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tables = []
    results = {}
    for spec in DATA:
        images = pictures(spec.n_rows, spec.shape)
        paths = {}
        for name, options in layouts(spec).items():
            slug = "".join(c if c.isalnum() else "-" for c in name)
            paths[name] = FOLDER / f"{spec.name}-{slug}.h5"
            write(paths[name], images, options)
        results[spec.name] = measure(spec, paths)
        tables.append(table(spec, results[spec.name], paths))
    publish.write("layouts", tables, results, "python bench/layouts.py")


if __name__ == "__main__":
    main()
