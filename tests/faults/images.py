"""Decode a million small images, and 2,000 damaged ones: memory stays flat, nothing crashes, each damaged one is named.

    make images                                                 all of it
    python tests/faults/images.py --images 4000 --damaged 200   a short form

**A million.** JPEG and PNG files of many sizes, some of which are grey, progressive or on their side, are decoded by
reader threads in epoch after epoch, as random parts; the memory of the process is read on the way.

**Damaged.** Each file follows from the seed and its number. All go through `convert.py images --keep-encoded --on-error
skip`, among a hundred times as many whole ones, and are read one by one from
the source that training reads; each of the two is a process of its own. A file either decodes or is named.
"""

import argparse
import io
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT))

import h5py
import numpy as np
import psutil
import torch
from mutations import flip
from PIL import Image

from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.images.column import decoded
from fastgpu.process.launch import RankError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store

PLAN = next(BlockSampler(np.ones(1, np.int32), 1, seed=None).pools(0))
"""A plan that draws nothing at random."""
N_DISTINCT = 2000
"""Whole images; they are repeated."""
WHOLE_PER_DAMAGED = 110
"""At most 1 % of the rows may be damaged."""
SIZE = (32, 32)
BATCH = 256
SIDES = (24, 160)
"""Of whole images, in pixels."""
BOMB_SIDE = 30_000
MARKS = (0.1, 0.5, 1.0)
MAX_GROWTH = 1.25
"""Of the memory, from the first of these marks to the last."""


# ---------------------------------------------------------------------------------------------- files


def make_image(number: int) -> bytes:
    """A whole image of any size, format, mode and orientation."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(*SIDES, 2)
    pixels = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((width, height))
    file = io.BytesIO()
    kind = number % 10
    if kind == 0:
        pixels.save(file, "PNG")
    elif kind == 1:
        pixels.convert("L").save(file, "JPEG")
    elif kind == 2:
        pixels.save(file, "JPEG", progressive=True)
    elif kind == 3:
        exif = Image.Exif()
        exif[0x0112] = 6  # on its side
        pixels.save(file, "JPEG", exif=exif)
    elif kind == 4:
        pixels.save(file, "WEBP")
    elif kind == 5:
        pixels.convert("CMYK").save(file, "JPEG")
    else:
        pixels.save(file, "JPEG")
    return file.getvalue()


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(1, len(data) * 9 // 10)]


def with_other_size(data: bytes, rng: random.Random) -> bytes:
    """The header has another height and width than the pixels."""
    height, width = (rng.choice((0, 1, rng.randint(2, 300), 2000, 65_500)) for _ in range(2))
    return with_size(data, height, width)


def bomb(data: bytes, rng: random.Random) -> bytes:
    """900 million pixels in at most some kilobytes."""
    if rng.random() < 0.5:
        return png_bomb()
    return with_size(make_image(6), BOMB_SIDE, BOMB_SIDE)


@cache
def png_bomb() -> bytes:
    rows = zlib.compress(bytes(BOMB_SIDE * (BOMB_SIDE // 8 + 1)), 9)
    header = struct.pack(">IIBBBBB", BOMB_SIDE, BOMB_SIDE, 1, 0, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header), png_chunk(b"IDAT", rows), png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def with_size(data: bytes, height: int, width: int) -> bytes:
    """An image whose header, with a right checksum, says another size."""
    if data.startswith(b"\x89PNG"):
        header = struct.pack(">II", width, height) + data[24:29]
        return data[:8] + png_chunk(b"IHDR", header) + data[33:]
    if data.startswith(b"RIFF"):
        at = data.index(b"VP8 ") + 14  # the two sizes of a lossy WebP file, 14 bits each
        return data[:at] + struct.pack("<HH", width & 0x3FFF, height & 0x3FFF) + data[at + 4 :]
    at = next(match.start() for match in re.finditer(b"\xff[\xc0\xc2]\x00[\x0b\x11\x14]\x08", data))
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": truncated,
    "flipped bits": flip,
    "another size in the header": with_other_size,
    "decompression bomb": bomb,
    "noise behind a header": lambda data, rng: data[:20] + rng.randbytes(len(data)),
    "zeros": lambda data, rng: bytes(len(data)),
}
ALWAYS_NAMED = ("truncated", "decompression bomb", "noise behind a header", "zeros")


def damage_of(number: int) -> str:
    return list(DAMAGES)[number % len(DAMAGES)]


def make_damaged(number: int, seed: int) -> bytes:
    rng = random.Random(f"{seed}:{number}")
    return DAMAGES[damage_of(number)](make_image(rng.randrange(N_DISTINCT)), rng)


def write_rows(path: Path, files: Sequence[bytes], row_of: np.ndarray) -> None:
    """Encoded rows: row n is files[row_of[n]]; its label is that number."""
    with h5py.File(path, "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "jpeg+png+webp"
        group["indptr"] = np.concatenate([[0], np.cumsum([len(files[each]) for each in row_of])])
        group["values"] = np.frombuffer(b"".join([files[each] for each in row_of]), np.uint8)
        file["labels"] = row_of


# ---------------------------------------------------------------------------------------------- their own processes


def opened(path: str) -> tuple[Dataset, Any]:
    """The rows of a file and their feed."""
    store = open_store("FILE", path, {"images": "images", "labels": "labels"})
    source = decoded(store, SIZE, min_scale=0.08)
    order = BlockSampler(source.block_rows, BATCH, pool_batches=4, drop_last=False)
    return source, make_feed(source, order, Placement("disk", torch.device("cpu"), available_cpus()))


def decode_many(path: str, n_images: str) -> list[float]:
    """MiB of memory at each of the marks."""
    _, feed = opened(path)
    process = psutil.Process()
    memory: list[float] = []
    n_done = 0
    with closing(feed):
        for epoch in count():
            for pool in feed.pools(epoch):
                n_done += len(pool.rows)
                while n_done >= MARKS[len(memory)] * int(n_images):
                    memory.append(process.memory_info().rss / 2**20)
                    if len(memory) == len(MARKS):
                        return memory
    return memory


def decode_damaged(path: str) -> list[int]:
    """Labels of the rows that cannot be decoded: each row is read alone, as a reader thread reads it."""
    source, feed = opened(path)
    feed.close()
    out = {name: np.empty((1, *field.shape), field.dtype) for name, field in source.fields.items()}
    named = []
    for row, label in enumerate(source.column("labels")):
        try:
            source.read(PLAN, Reads(np.array([row]), np.array([1]), np.array([0])), out)
        except RankError:
            named.append(int(label))
    return named


def call(function: str, *arguments: object) -> Any:
    """Call a function of this file in another process. None: it crashed."""
    command = [sys.executable, __file__, function, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return None if done.returncode else json.loads(done.stdout)


# ---------------------------------------------------------------------------------------------- damaged files


def named_by_convert(folder: Path, whole: Sequence[bytes], damaged: Sequence[bytes], row_of: np.ndarray) -> set[int]:
    """Convert all files, named by a CSV. Returns the numbers of the damaged files that were left out."""
    for name, files in (("whole", whole), ("damaged", damaged)):
        (folder / name).mkdir()
        for number, data in enumerate(files):
            (folder / name / f"{number}.jpg").write_bytes(data)
    lines = ["path,label"]
    for row in row_of.tolist():
        number = row - len(damaged)
        lines.append(f"whole/{number}.jpg,{row % 2}" if number >= 0 else f"damaged/{row}.jpg,{row % 2}")
    (folder / "list.csv").write_text("\n".join(lines))
    words = ["images", "list.csv", "out.h5", "--keep-encoded", "--on-error", "skip"]
    subprocess.run([sys.executable, str(PROJECT / "convert.py"), *words], cwd=folder, check=True)
    listed = (folder / "out.h5.skipped.txt").read_text()
    assert "whole/" not in listed, "a whole image was left out"
    return {int(number) for number in re.findall(r"damaged/(\d+)\.jpg", listed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--damaged", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    whole = [make_image(number) for number in range(min(N_DISTINCT, args.images))]
    damaged = [make_damaged(number, args.seed) for number in range(args.damaged)]
    row_of = np.arange(args.damaged * (1 + WHOLE_PER_DAMAGED))
    row_of[args.damaged :] = args.damaged + row_of[args.damaged :] % len(whole)
    np.random.default_rng(args.seed).shuffle(row_of)
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        folder = Path(name)
        write_rows(folder / "rows.h5", [*damaged, *whole], row_of)
        write_rows(folder / "whole.h5", whole, np.arange(len(whole)))
        named = {
            "convert": named_by_convert(folder, whole, damaged, row_of),
            "training": call("decode_damaged", folder / "rows.h5"),
        }
        memory = call("decode_many", folder / "whole.h5", args.images)
    problems = [f"{name} crashed" for name, numbers in named.items() if numbers is None]
    for damage in DAMAGES:
        files = {number for number in range(args.damaged) if damage_of(number) == damage}
        for name, numbers in named.items():
            missed = files - set(numbers or ())
            print(f"{damage}: {len(files) - len(missed)} of {len(files)} files are named by {name}")
            if missed and damage in ALWAYS_NAMED:
                problems.append(f"not named by {name}: {sorted(missed)[:5]} ({damage})")
    if any(number >= args.damaged for number in named["training"] or ()):
        problems.append("a whole image was named")
    print(f"memory in MiB after {MARKS} of the images: {memory}")
    if memory is None or memory[-1] > MAX_GROWTH * memory[0]:
        problems.append("memory has grown, or decoding crashed")
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    torch.set_num_threads(1)
    functions = {"decode_many": decode_many, "decode_damaged": decode_damaged}
    if sys.argv[1:] and sys.argv[1] in functions:
        print(json.dumps(functions[sys.argv[1]](*sys.argv[2:])))
    else:
        sys.exit(main())
