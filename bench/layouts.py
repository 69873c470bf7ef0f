"""What the layout of a file costs: the same rows in other blocks, compressed, or checked, read by the disk tier.

python bench/layouts.py

`convert.py info` gives advice by these figures. The rows are smooth pictures with a little noise, so that the filters
have something to do; what they save depends on the pictures, and is in the table.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import project  # noqa: F401
import report
import torch
from contenders import Batch
from data import Rows
from fastgpu.convert.writer import Writer
from fastgpu.feed import sizes as auto
from fastgpu.feed.tiers import make_feed
from fastgpu.rows.field import Field
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.layout import BLOCK_BYTES
from fastgpu.storage.store import open_store
from processes import kept_warm, make_cold
from worker import endless, run

ROUNDS = 3
FOLDER = Path(__file__).parent / "data" / "layouts"


ROWS = (Rows("celeba", 4_000, (3, 218, 178), 256), Rows("cifar", 60_000, (3, 32, 32), 1024))


def layouts(rows: Rows) -> dict[str, dict[str, Any]]:
    """{what it is called: arguments of h5py's create_dataset; none: as convert.py writes it}"""
    block_rows = BLOCK_BYTES // rows.row_bytes
    blocks = (block_rows, *rows.shape)
    found: dict[str, dict[str, Any]] = {
        "blocks of 2 MiB": {},
        "blocks of 2 MiB, data.verify": {},
        "in one piece": {"chunks": None},
        "chunks of 1 row": {"chunks": (1, *rows.shape)},
        "chunks of 64 MiB": {"chunks": (32 * block_rows, *rows.shape)},
        "chunks that split rows (h5py's guess)": {"chunks": True},
        "gzip": {"chunks": blocks, "compression": "gzip", "compression_opts": 1},
        "lz4": {"chunks": blocks, **hdf5plugin.LZ4()},
        "zstd": {"chunks": blocks, **hdf5plugin.Zstd(clevel=1)},
        "fletcher32 (HDF5's own checksum)": {"chunks": blocks, "fletcher32": True},
    }
    if rows.name == "cifar":
        found.pop("chunks of 64 MiB")
    return found


def pictures(rows: Rows) -> np.ndarray:
    """uint8 (rows, C, H, W): waves of random direction and phase, and noise of a few grey levels."""
    rng = np.random.default_rng(0)
    C, H, W = rows.shape
    few = np.empty((min(rows.rows, 500), C, H, W), np.uint8)
    y, x = np.mgrid[:H, :W] / 32
    for picture in few:
        for channel in picture:
            a, b, phase = *rng.normal(size=2), rng.uniform(0, 6)
            channel[:] = 128 + 90 * np.sin(a * x + b * y + phase) + rng.normal(0, 2, (H, W))
    return np.resize(few, (rows.rows, C, H, W))


def write(path: Path, images: np.ndarray, options: dict[str, Any]) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = np.arange(len(images))
    if not options:
        fields = {"images": Field(images.dtype, images.shape[1:]), "labels": Field(labels.dtype, ())}
        with Writer(path, len(images), fields) as writer:
            writer.append({"images": images, "labels": labels})
        return
    with h5py.File(path.with_suffix(".partial"), "w") as file:
        file.create_dataset("images", data=images, **options)
        file["labels"] = labels
    path.with_suffix(".partial").rename(path)


class Reader:
    """The disk tier on one file."""

    def __init__(self, path: Path, rows: Rows, verify: bool):
        store = open_store("data.train", str(path), {"images": "images", "labels": "labels"}, verify=verify)
        pool = auto.choose_pool_batches("auto", rows.batch_size, store.row_bytes, len(store))
        order = BlockSampler(store.block_rows, rows.batch_size, pool_batches=pool)
        self.feed = make_feed(store, order, "disk", torch.device("cpu"), auto.choose_readers("auto", 1))
        self.batch_size = rows.batch_size

    def epoch(self, number: int) -> Iterator[Batch]:
        for pool in self.feed.pools(number):
            for batch in pool.rows.batches(self.batch_size):
                yield batch["images"], batch["labels"]


def measure(rows: Rows, paths: dict[str, Path]) -> dict[str, dict[str, list[float]]]:
    """{layout: {"warm": rows/s of each round, "cold": the same}}"""
    found: dict[str, dict[str, list[float]]] = {name: {"warm": [], "cold": []} for name in paths}
    make: Callable[[str], Reader] = lambda name: Reader(paths[name], rows, name.endswith("verify"))  # noqa: E731
    for number in range(ROUNDS):
        for name, path in paths.items():
            print(f"{rows.name}, round {number + 1}: {name}", file=sys.stderr, flush=True)
            for kind in ("cold", "warm"):
                reader = make(name)
                stream = endless(reader)
                if kind == "cold":
                    make_cold([path])
                    got = run(stream, None, [0, 10], 0)
                else:
                    with kept_warm([path]):
                        got = run(stream, [0, 1], [1, 2], 0)
                found[name][kind].append(got["rows"] / got["seconds"])
                reader.feed.close()
    return found


def table(rows: Rows, found: dict[str, dict[str, list[float]]], paths: dict[str, Path]) -> report.Table:
    best, lines = found["blocks of 2 MiB"], []
    size = paths["blocks of 2 MiB"].stat().st_size
    for name, got in found.items():
        line = [name, f"{paths[name].stat().st_size / size:.2f}"]
        for kind in ("warm", "cold"):
            slower = median(a / b for a, b in zip(best[kind], got[kind], strict=True))
            line += [f"{median(got[kind]):,.0f} [{min(got[kind]):,.0f}-{max(got[kind]):,.0f}]", f"{slower:.1f}"]
        lines.append(line)
    columns = ["layout", "size", "warm: rows/s", "times slower", "cold: rows/s", "times slower"]
    shape = "x".join(map(str, rows.shape))
    note = (
        f"{ROUNDS} rounds in turn: median [min-max], and the median of the ratios within a round. Warm: in the page "
        "cache; cold: evicted before, one epoch with the first touch of the buffers. Size: of the file, over the first."
    )
    return report.Table(f"{rows.name}: {rows.rows:,} rows of {shape} uint8", columns, lines, note)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tables, data = [], {}
    for rows in ROWS:
        images, paths = pictures(rows), dict[str, Path]()
        for name, options in layouts(rows).items():
            slug = "".join(c if c.isalnum() else "-" for c in name.removesuffix(", data.verify"))
            paths[name] = FOLDER / f"{rows.name}-{slug}.h5"
            write(paths[name], images, options)
        data[rows.name] = measure(rows, paths)
        tables.append(table(rows, data[rows.name], paths))
    report.write("layouts", tables, data, "python bench/layouts.py")


if __name__ == "__main__":
    main()
