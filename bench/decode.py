"""How fast JPEG files become an HDF5 file: `convert.py images` against Pillow in one thread, decoding and no more.

python bench/decode.py

The pictures are made up: smooth waves with a little noise, 500 x 375 pixels, quality 90; one is about as large as a
photograph of that size. Two lengths of the same command tell its rate without its start-up.
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import layouts
import numpy as np
import project  # noqa: F401
import report
from fastgpu.process import machine
from PIL import Image, ImageOps

ROUNDS = 3
FOLDER = Path(__file__).parent / "data" / "jpegs"
FEW, MANY = 500, 8_000
HEIGHT, WIDTH, SIZE = 375, 500, 224
SCRIPT = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "convert.py"


def make(count: int) -> Path:
    """A folder with so many JPEG files of one class, of which 500 differ."""
    folder = FOLDER / str(count)
    if not folder.exists():
        images = layouts.pictures(layouts.Rows("jpegs", min(count, 500), (3, HEIGHT, WIDTH), 1)).transpose(0, 2, 3, 1)
        (folder / "all").mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(np.ascontiguousarray(image)).save(folder / f"all/{number:06d}.jpg", quality=90)
        for number in range(len(images), count):
            data = (folder / f"all/{number % len(images):06d}.jpg").read_bytes()
            (folder / f"all/{number:06d}.jpg").write_bytes(data)
    return folder


def decoded_per_s(folder: Path, count: int = 1_000) -> float:
    """Images a second that Pillow alone decodes, resizes and gives to NumPy in this thread."""
    paths = sorted(folder.glob("all/*.jpg"))[:count]
    t0 = time.perf_counter()
    for path in paths:
        with Image.open(path) as image:
            image.draft("RGB", (2 * SIZE, 2 * SIZE))
            np.asarray(ImageOps.fit(image, (SIZE, SIZE), Image.Resampling.BILINEAR))
    return len(paths) / (time.perf_counter() - t0)


def command_s(folder: Path) -> float:
    """Seconds of the whole command."""
    target = FOLDER / "out.h5"
    command = [sys.executable, SCRIPT, "images", folder, target, "--size", str(SIZE), "--force"]
    t0 = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - t0
    target.unlink()
    return seconds


def main() -> None:
    few, many, cores = make(FEW), make(MANY), machine.available_cpus()
    rounds: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        print(f"round {number + 1}", file=sys.stderr, flush=True)
        one, short_s, long_s = decoded_per_s(many), command_s(few), command_s(many)
        rate = (MANY - FEW) / (long_s - short_s)
        rounds.append({"decoded": one, "start_s": short_s - FEW / rate, "converted": rate, "ratio": rate / one / cores})

    def shown(key: str, form: str) -> str:
        values = [each[key] for each in rounds]
        return f"{median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"

    rows = [
        ["decoded and resized by Pillow in one thread, images/s", shown("decoded", ",.0f")],
        [f"converted by {cores} threads, images/s", shown("converted", ",.0f")],
        ["start-up of the command, s", shown("start_s", ".1f")],
    ]
    targets = [["JPEG files converted / cores x decoded by Pillow in one thread", shown("ratio", ".2f"), "0.9"]]
    note = (
        "Median of three rounds, least and most in brackets. Converted: read, decoded, resized, put into random order, "
        "hashed and written."
    )
    table = report.Table(f"{WIDTH} x {HEIGHT} JPEG files to {SIZE} x {SIZE} rows", ["what", "measured"], rows, note)
    about = report.Table("targets", ["what", "measured", "must / aim"], targets)
    report.write("decode", [about, table], {"rounds": rounds}, "python bench/decode.py")


if __name__ == "__main__":
    main()
