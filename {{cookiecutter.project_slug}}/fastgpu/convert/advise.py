"""Pixels or encoded images, and of which size? Decided by measured rates of this disk and these CPUs."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.convert.image_files import RecodedRows
from fastgpu.images.encoded import Kept, keep, measure
from fastgpu.process.machine import available_cpus, free_host_bytes
from fastgpu.rows.contract import Source
from fastgpu.storage.layout import BLOCK_BYTES

MARGIN = 1.15
"""How many times the rows that are trained on a store should supply."""
SAMPLE_ROWS = 64
DISK_BYTES = 256 << 20
"""Bytes that are read to measure the disk, in blocks of BLOCK_BYTES at random places ..."""
DISK_THREADS = 4
"""... by so many threads."""
MIN_SCALE = 0.08


class Way(NamedTuple):
    """One way to keep the rows."""

    name: str
    row_bytes: float
    decoded_per_s: float
    """Images that all CPUs decode and resize in a second. inf: there is nothing to decode."""
    command: str
    """What writes the rows so. Empty: they lie so already."""

    def supply(self, disk_bytes_per_s: float, n_rows: int) -> float:
        """Rows per second. The disk does not count where the page cache has room for all rows."""
        fits = n_rows * self.row_bytes <= free_host_bytes()
        return min(self.decoded_per_s, np.inf if fits else disk_bytes_per_s / self.row_bytes)


def advise(path: str, source: Source, size: int, rows_per_s: float) -> Iterator[str]:
    """Lines of text: what each store would supply, and which to choose.

    source: the rows of the file `path`, encoded or as pixels. size: height and width to train on. rows_per_s: rows that
    all processes of this machine train on in a second. Raises UserError if the rows have no images.
    """
    rows = RecodedRows(source, Kept())
    name = next(name for name, field in rows.fields.items() if field.codec)
    is_encoded = bool(source.fields[name].codec)
    disk = measure_disk(path)
    sample = np.linspace(0, len(source) - 1, min(SAMPLE_ROWS, len(source))).astype(int)
    files = [rows.decode(row)[name].tobytes() for row in sample.tolist()]
    side = size * 8 // 7
    repack = f"repack {path} NEW.h5"

    def encoded(name: str, files: Sequence[bytes], command: str) -> Way:
        row_bytes, decoding_s = measure(files, (size, size), MIN_SCALE)
        return Way(name, row_bytes, available_cpus() / decoding_s, command)

    pixels = f"pixels, {size} x {size}"
    if is_encoded:
        small = [keep(data, Kept(side)) for data in files]
        stores = [
            Way(pixels, 3.0 * size * size, np.inf, f"{repack} --size {size}"),
            encoded("encoded, as they are", files, ""),
            encoded(f"encoded, shorter side {side}", small, f"{repack} --size {side} --quality 92"),
        ]
    else:
        row_bytes = float(source.fields[name].row_bytes)
        stores = [Way(pixels, row_bytes, np.inf, ""), encoded("encoded, same size", files, f"{repack} --quality 92")]
    yield (
        f"{path}: {len(source):,} rows; this disk reads {disk / 1e9:.2f} GB/s, {available_cpus()} CPUs decode, "
        f"{free_host_bytes() / 1e9:.0f} GB of memory are free; needed: {rows_per_s:,.0f} rows/s"
    )
    yield f"  {'store':<28} {'kB/row':>7} {'GB':>8} {'disk rows/s':>12} {'decoded/s':>10} {'supply':>10}"
    supplies = [store.supply(disk, len(source)) for store in stores]
    for store, supply in zip(stores, supplies, strict=True):
        yield (
            f"  {store.name:<28} {store.row_bytes / 1e3:>7.1f} {store.row_bytes * len(source) / 1e9:>8.2f} "
            f"{disk / store.row_bytes:>12,.0f} {_format(store.decoded_per_s, '-'):>10} {_format(supply, 'memory'):>10}"
        )
    enough = [number for number, supply in enumerate(supplies) if supply >= MARGIN * rows_per_s]
    best = enough[0] if enough else int(np.argmax(supplies))
    cure = f": python convert.py {stores[best].command}" if stores[best].command else ", as the rows lie now"
    yield f"best: {stores[best].name}{cure}"
    if not enough:
        share = supplies[best] / rows_per_s
        cure = f"more CPUs or a faster disk, or data.echo={max(1.5, 1 / share):.1f}"
        yield f"  it supplies {share:.2f} of what is needed: {cure}"
    if best == 0 and is_encoded:
        yield "  pixels take the centre; random parts of the full resolution (data.min_crop_scale) need encoded images"


def measure_disk(path: str) -> float:
    """Bytes per second that the disk gives at random places of a file. Its pages leave the page cache before."""
    size = Path(path).stat().st_size
    starts = np.random.default_rng(0).permutation(np.arange(0, size, BLOCK_BYTES))[: DISK_BYTES // BLOCK_BYTES]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        t0 = time.perf_counter()
        with ThreadPoolExecutor(DISK_THREADS) as threads:
            counts = threads.map(lambda start: len(os.pread(descriptor, BLOCK_BYTES, start)), starts.tolist())
            return sum(counts) / (time.perf_counter() - t0)
    finally:
        os.close(descriptor)


def _format(rate: float, unlimited: str) -> str:
    return unlimited if np.isinf(rate) else f"{rate:,.0f}"
