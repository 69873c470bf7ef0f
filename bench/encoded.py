"""How fast do encoded images become batches? Compares the feed with torch's DataLoader over Pillow and simplejpeg.

python bench/encoded.py

All decode the same made-up JPEG files, cut the same kind of random part (8 to 100 % of the area) and resize it to 224 x
224. The DataLoader reads files from a folder, one worker process for each CPU, batches of 256; the feed reads the HDF5
file of `convert.py images --keep-encoded`, one reader thread for each CPU. Each contender is a process of its own that
reads one epoch before it is measured for two. `bare` is a loop of one thread over decoder and resize, with the bytes in
memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import layouts
import numpy as np
import project
import psutil
import publish
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.machine import available_cpus
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.decoded import DecodedImages
from fastgpu.storage.encoded import Box, draw, random_box, simplejpeg
from fastgpu.storage.store import open_store

FOLDER = Path(__file__).parent / "data" / "encoded"
N_IMAGES = 1000
N_EPOCHS = 2
BATCH = 256
SIZE = (224, 224)
MIN_SCALE = 0.08
ROUNDS = 3
KINDS = {"500 x 375": [], "shorter side 256": ["--size", "256", "--quality", "92"]}
"""{files: flags of convert.py}"""
CONTENDERS = ("bare", "feed, 1 reader", "feed", "DataLoader + simplejpeg", "DataLoader + Pillow")


def make(kind: str) -> Path:
    """The HDF5 file of a kind, and beside it a folder with the same JPEG files."""
    target = FOLDER / f"{kind.replace(' ', '-')}.h5"
    if target.exists():
        return target
    source = FOLDER / "source" / "all"
    if not source.exists():
        source.mkdir(parents=True)
        rng = np.random.default_rng(0)
        pictures = layouts.pictures(min(N_IMAGES, layouts.N_PICTURES), (3, 375, 500)).transpose(0, 2, 3, 1)
        for number in range(N_IMAGES):
            noise = rng.normal(0, 8, (375, 500, 3))
            pixels = (pictures[number % len(pictures)] + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(source / f"{number:05d}.jpg", quality=92)
    command = [sys.executable, project.FOLDER / "convert.py", "images", source.parent, target, "--keep-encoded"]
    subprocess.run(list(map(str, [*command, *KINDS[kind]])), check=True, stdout=subprocess.DEVNULL)
    target.with_suffix("").mkdir()
    for number, data in enumerate(files_of(target)):
        (target.with_suffix("") / f"{number:05d}.jpg").write_bytes(data.tobytes())
    return target


def files_of(path: Path) -> list[np.ndarray]:
    """The bytes of each row of a file."""
    import h5py

    with h5py.File(path) as file:
        values = file["images/values"][:]
        return np.split(values, file["images/indptr"][1:-1])


def by_simplejpeg(data: np.ndarray, box: Callable[[int, int], Box]) -> torch.Tensor:
    """Decoder and resize as a user of both libraries writes them."""
    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width = box(*pixels.shape[:2])
    part = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    return F.interpolate(torch.from_numpy(part).permute(2, 0, 1)[None], SIZE, mode="bilinear", antialias=True)[0]


def by_pillow(path: Path, box: Callable[[int, int], Box]) -> torch.Tensor:
    """What torchvision's RandomResizedCrop does with an image of Pillow."""
    with Image.open(path) as image:
        top, left, height, width = box(image.height, image.width)
        part = image.convert("RGB").crop((left, top, left + width, top + height))
        return torch.from_numpy(np.array(part.resize(SIZE[::-1], Image.Resampling.BILINEAR))).permute(2, 0, 1)


class Files(Dataset):
    """The JPEG files of a folder."""

    def __init__(self, folder: Path, decoder: str):
        self.paths = sorted(folder.glob("*.jpg"))
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> torch.Tensor:
        draws = np.random.default_rng().random(22).tolist()

        def box(height: int, width: int) -> Box:
            return random_box(draws, height, width, MIN_SCALE)

        if self.decoder == "Pillow":
            return by_pillow(self.paths[row], box).contiguous()
        return by_simplejpeg(np.fromfile(self.paths[row], np.uint8), box).contiguous()


def epochs_of(contender: str, path: Path) -> Callable[[int], Iterable[Any]]:
    """epoch -> its batches or pools."""
    if contender == "bare":
        torch.set_num_threads(1)
        files = files_of(path)
        draws = draw(0, 0, np.arange(len(files))).tolist()
        return lambda epoch: (
            by_simplejpeg(data, lambda height, width, row=row: random_box(draws[row], height, width, MIN_SCALE))[None]
            for row, data in enumerate(files)
        )
    if contender.startswith("feed"):
        n_readers = 1 if "1 reader" in contender else available_cpus()
        source = DecodedImages(open_store("FILE", str(path), {"images": "images", "labels": "labels"}), SIZE, MIN_SCALE)
        order = BlockSampler(source.block_rows, BATCH, pool_batches=1)  # as many rows ahead as the DataLoader has
        feed = make_feed(source, order, Placement("disk", torch.device("cpu"), n_readers))
        return lambda epoch: (pool.rows["images"] for pool in feed.pools(epoch))
    dataset = Files(path.with_suffix(""), contender.rpartition(" ")[2])
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=available_cpus(), persistent_workers=True, drop_last=True
    )
    return lambda epoch: loader


def measure_here(contender: str, path: Path) -> dict[str, float]:
    """images_per_s and cpu_s_per_1000 after the first epoch, worker processes included."""

    def cpu_s() -> float:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    epochs = epochs_of(contender, path)
    for _ in epochs(0):
        pass
    t0, cpu0 = time.perf_counter(), cpu_s()
    n_images = sum(len(images) for epoch in range(1, 1 + N_EPOCHS) for images in epochs(epoch))
    return {
        "images_per_s": n_images / (time.perf_counter() - t0),
        "cpu_s_per_1000": 1000 * (cpu_s() - cpu0) / n_images,
    }


def main() -> None:
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    tables = []
    for kind in KINDS:
        path = make(kind)
        results[kind] = {contender: [] for contender in CONTENDERS}
        for number in range(ROUNDS):
            for contender in CONTENDERS:  # in turns, so that other work on the machine disturbs all of them alike
                print(f"{kind}, round {number + 1}: {contender}", file=sys.stderr, flush=True)
                command = [sys.executable, __file__, contender, str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results[kind][contender].append(json.loads(done.stdout))
        kb = np.mean([len(data) for data in files_of(path)]) / 1e3
        rows = [[contender, *(spread(each, key) for key in each[0])] for contender, each in results[kind].items()]
        columns = ["contender", "images/s", "CPU seconds per 1,000 images"]
        tables.append(publish.Table(f"JPEG files, {kind}, {kb:.0f} kB", columns, rows))
    note = (
        f"Random part of 8 to 100 % of the area to 224 x 224; {N_IMAGES:,} made-up files in the page cache; "
        f"{available_cpus()} CPUs. Median of {ROUNDS} rounds, minimum and maximum in brackets. Where other work shares "
        "the machine, CPU seconds say more than images/s."
    )
    tables[-1] = tables[-1]._replace(note=note)
    publish.write("encoded", tables, results, "python bench/encoded.py")


def spread(rounds: list[dict[str, float]], key: str) -> str:
    """`median [minimum-maximum]`"""
    form = ",.0f" if key == "images_per_s" else ".2f"
    values = [each[key] for each in rounds]
    return f"{median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure_here(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
