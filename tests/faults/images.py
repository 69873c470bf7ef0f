"""Decode a million small images: the memory of the process stays flat.

    make images                                     all of it
    python tests/faults/images.py --images 100000   a short form

JPEG, PNG and WebP files of many sizes, some of which are grey, progressive or on their side, are decoded by reader
threads in epoch after epoch, as random parts; the memory of the process is read on the way.
"""

import argparse
import sys
import tempfile
from contextlib import closing
from itertools import chain, count
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("{{cookiecutter.project_slug}}", "tests")]

import numpy as np
import psutil
import torch
from PIL import Image

from fastgpu.images.column import ImageCodec
from fastgpu.process.machine import available_cpus
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store
from support.images import image_file, write_encoded
from support.rows import open_feed

N_DISTINCT = 2000  # images
SIDES = (24, 160)  # pixels
MARKS = (0.1, 0.5, 1.0)  # shares of the images
MAX_GROWTH = 1.25  # of the memory, from the first of these marks to the last


WAYS = [("RGB", "JPEG", {"progressive": True}), ("RGB", "PNG", {}), ("RGB", "WEBP", {}), *6 * [("RGB", "JPEG", {})]]
WAYS += [("L", "JPEG", {}), ("CMYK", "JPEG", {})]
"""[(mode, format, options)]"""


def make_image(number: int) -> bytes:
    """An image of any size, format, mode and orientation."""
    rng = np.random.default_rng(number)
    pixels = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize(rng.integers(*SIDES, 2))
    mode, kind, options = WAYS[number % len(WAYS)]
    orientation = Image.Exif()
    orientation[0x0112] = 1 + number % 8
    return image_file(pixels.convert(mode), kind, exif=orientation, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    n_images = parser.parse_args().images
    files = [make_image(number) for number in range(min(N_DISTINCT, n_images))]
    memory: list[float] = []
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        path = write_encoded(Path(folder) / "rows.h5", files)
        source = open_store("FILE", path, {"images": "images"}, {"images": ImageCodec((32, 32), 0.08)})
        sampler = BlockSampler(source.block_rows, 256, pool_batches=4, drop_last=False)
        n_done = 0
        with closing(open_feed(source, sampler, n_readers=available_cpus())) as feed:
            pools = chain.from_iterable(map(feed.pools, count()))
            for mark in MARKS:
                while n_done < mark * n_images:
                    n_done += len(next(pools).rows)
                memory.append(psutil.Process().memory_info().rss / 2**20)
    print(f"memory in MiB after {MARKS} of the images: {memory}")
    return int(memory[-1] > MAX_GROWTH * memory[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
