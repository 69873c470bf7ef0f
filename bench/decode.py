"""How fast do JPEG files become an HDF5 file? Compares `convert.py images` with Pillow, which decodes in one thread.

python bench/decode.py

The pictures are synthetic: smooth waves with a little noise, 500 x 375 pixels, quality 90. Their files are about as
large as photographs of that size. Two runs of the same command, with few and with many files, give its rate without the
time that it takes to start.
"""

import subprocess
import sys
import time
from pathlib import Path

import layouts
import numpy as np
import project
import publish
from PIL import Image, ImageOps

from fastgpu.process.machine import available_cpus

ROUNDS = 3
FOLDER = Path(__file__).parent / "data" / "jpegs"
SCRIPT = project.FOLDER / "convert.py"
FEW = 500
MANY = 8_000
N_DECODED = 1_000
"""Number of files that Pillow decodes."""
HEIGHT = 375
WIDTH = 500
SIZE = 224


def make(n_files: int) -> Path:
    """A folder with JPEG files of one class, of which 500 are different."""
    folder = FOLDER / str(n_files)
    if not folder.exists():
        images = layouts.pictures(min(n_files, layouts.N_PICTURES), (3, HEIGHT, WIDTH)).transpose(0, 2, 3, 1)
        (folder / "all").mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(np.ascontiguousarray(image)).save(folder / f"all/{number:06d}.jpg", quality=90)
        for number in range(len(images), n_files):
            data = (folder / f"all/{number % len(images):06d}.jpg").read_bytes()
            (folder / f"all/{number:06d}.jpg").write_bytes(data)
    return folder


def decoded_per_s(folder: Path) -> float:
    """Images per second that Pillow alone decodes, resizes and passes to NumPy in this thread."""
    paths = sorted(folder.glob("all/*.jpg"))[:N_DECODED]
    t0 = time.perf_counter()
    for path in paths:
        with Image.open(path) as image:
            image.draft("RGB", (2 * SIZE, 2 * SIZE))
            np.asarray(ImageOps.fit(image, (SIZE, SIZE), Image.Resampling.BILINEAR))
    return len(paths) / (time.perf_counter() - t0)


def command_s(folder: Path) -> float:
    """Seconds that the whole command takes."""
    target = FOLDER / "out.h5"
    command = [sys.executable, SCRIPT, "images", folder, target, "--size", str(SIZE), "--force"]
    t0 = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - t0
    target.unlink()
    return seconds


def measure(few: Path, many: Path) -> dict[str, float]:
    """One round. decoded, converted: images/s; start_s: seconds; ratio: converted / (cores x decoded)."""
    decoded = decoded_per_s(many)
    few_s = command_s(few)
    many_s = command_s(many)
    converted = (MANY - FEW) / (many_s - few_s)
    return {
        "decoded": decoded,
        "start_s": few_s - FEW / converted,
        "converted": converted,
        "ratio": converted / decoded / available_cpus(),
    }


def main() -> None:
    few = make(FEW)
    many = make(MANY)
    rounds = []
    for number in range(ROUNDS):
        print(f"round {number + 1}", file=sys.stderr, flush=True)
        rounds.append(measure(few, many))

    def spread(key: str, form: str) -> str:
        return publish.spread([result[key] for result in rounds], form)

    rows = [
        ["decoded and resized by Pillow in one thread, images/s", spread("decoded", ",.0f")],
        [f"converted by {available_cpus()} threads, images/s", spread("converted", ",.0f")],
        ["time to start the command, s", spread("start_s", ".1f")],
    ]
    targets = [["JPEG files converted / cores x decoded by Pillow in one thread", spread("ratio", ".2f"), "0.9"]]
    note = (
        f"Median of {ROUNDS} rounds, minimum and maximum in brackets. Converted: read, decoded, resized, put into "
        "random order, hashed and written."
    )
    title = f"{WIDTH} x {HEIGHT} JPEG files to {SIZE} x {SIZE} rows"
    tables = [
        publish.Table("targets", publish.TARGET_COLUMNS, targets),
        publish.Table(title, ["what", "measured"], rows, note),
    ]
    publish.write("decode", tables, {"rounds": rounds}, "python bench/decode.py")


if __name__ == "__main__":
    main()
