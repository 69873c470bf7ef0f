"""How many rows a second do the usual ways of loading small images supply, and what do a DataLoader's settings change?

python bench/idle.py

Ways to read CIFAR-shaped rows, ways to read 48 x 48 grey images that a CSV file lists, numbers of workers, and prefetch
factors in front of a device that is simulated by sleeps. The page docs/why-is-my-gpu-idle.md of a project shows them.
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import layouts
import numpy as np
import project  # noqa: F401
import publish
import torch
from contenders import FastGpu
from peers import Task
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from worker import cpu_s, endless

from fastgpu.images.augment import random_crop, random_flip

ROUNDS = 5
SECONDS = 2.0
"""Time of each measurement in each round."""
FOLDER = Path(__file__).parent / "data" / "idle"
N_CIFAR = 50_000
N_FACES = 10_000
BATCH_SIZE = 256
STEP_S = 0.02
"""Time that the simulated device needs for a batch."""


class Tutorial(Dataset[tuple[Tensor, int]]):
    """CIFAR-shaped rows in memory as most tutorials read them: pad, crop, flip and normalise each image on the CPU."""

    def __init__(self, images: np.ndarray):
        self.images = images.transpose(0, 2, 3, 1).copy()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        padded = Image.new("RGB", (40, 40))
        padded.paste(Image.fromarray(self.images[row]), (4, 4))
        left, top = torch.randint(0, 9, (2,)).tolist()
        image = padded.crop((left, top, left + 32, top + 32))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x_CHW = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return (x_CHW - 0.5) / 0.25, row % 10


class PixelStrings(Dataset[tuple[Tensor, int]]):
    """Lines `label,"0 12 255 ..."` of a CSV file, which are parsed each time a row is asked for."""

    def __init__(self, images: np.ndarray):
        self.lines = [" ".join(map(str, image.ravel())) for image in images]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        pixels = np.array(self.lines[row].split(), dtype="float32").reshape(1, 48, 48)
        return torch.from_numpy(pixels / 255), row % 7


class Files(Dataset[tuple[Tensor, int]]):
    """PNG files whose paths a CSV file lists, decoded each time a row is asked for."""

    def __init__(self, images: np.ndarray):
        self.paths = [FOLDER / f"faces/{row:05d}.png" for row in range(len(images))]
        if not self.paths[-1].exists():
            self.paths[0].parent.mkdir(parents=True, exist_ok=True)
            for path, image in zip(self.paths, images, strict=True):
                Image.fromarray(image[0]).save(path)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[row]) as image:
            pixels = np.array(image, dtype="float32")[None]
        return torch.from_numpy(pixels / 255), row % 7


class Waiting(Dataset[int]):
    """Rows that take 1 ms each without using a CPU, like small files on a network file system."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, row: int) -> int:
        time.sleep(0.001)
        return row


class Uneven(Dataset[int]):
    """Rows for which two workers need 0.9 of the device's time. Every 21st batch takes ten times as long."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, row: int) -> int:
        if row % BATCH_SIZE == 0:
            mean_s = 2 * 0.9 * STEP_S
            is_slow = row // BATCH_SIZE % 21 == 0
            time.sleep(mean_s * (10 if is_slow else 1) * 21 / 30)
        return row


def loader(dataset: Dataset, num_workers: int) -> Callable[[], Iterable]:
    """An endless stream of batches of a DataLoader."""

    def batches() -> Iterable:
        batched = DataLoader(
            dataset,
            BATCH_SIZE,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        while True:
            yield from batched

    return batches


def ours(name: str, images: np.ndarray, augments: bool) -> Callable[[], Iterable]:
    """An endless stream of batches of the disk tier; with augments, cropped, flipped and normalised as a batch."""
    path = FOLDER / f"{name}.h5"
    layouts.write(path, images, {})

    def batches() -> Iterable:
        reader = FastGpu(Task(path, FOLDER, BATCH_SIZE, n_workers=0, seed=0))
        rng = torch.Generator().manual_seed(0)
        with closing(reader.feed):
            for x_BCHW, labels_B in filter(None, endless(reader)):
                if augments:
                    yield random_flip(random_crop(x_BCHW, 4, rng), rng) * (1 / 63.75) - 2, labels_B
                else:
                    yield x_BCHW, labels_B

    return batches


class Speed(NamedTuple):
    """A measurement of a stream of batches."""

    rows_per_s: float
    cpu_us_per_row: float
    """CPU time of this process and its workers: it hardly depends on what else the machine does."""


def measure(batches: Callable[[], Iterable]) -> Speed:
    """The speed of a stream after the batches that lay ready."""
    stream = iter(batches())
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < 1:
        next(stream)
    n_rows = 0
    t0 = time.perf_counter()
    cpu_before_s = cpu_s()
    while time.perf_counter() - t0 < SECONDS:
        next(stream)
        n_rows += BATCH_SIZE
    used_s = cpu_s() - cpu_before_s
    return Speed(n_rows / (time.perf_counter() - t0), 1e6 * used_s / n_rows)


def wait_pct(prefetch_factor: int) -> float:
    """Share of the time that the simulated device waits for the uneven rows of two workers."""
    stream = iter(DataLoader(Uneven(), BATCH_SIZE, num_workers=2, prefetch_factor=prefetch_factor))
    for _ in range(40):
        next(stream)
        time.sleep(STEP_S)
    waited = 0.0
    begin = time.perf_counter()
    for _ in range(200):
        t0 = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - t0
        time.sleep(STEP_S)
    return 100 * waited / (time.perf_counter() - begin)


def speeds(title: str, ways: dict[str, Callable[[], Iterable]]) -> tuple[publish.Table, dict[str, list[Speed]]]:
    """A table of rounds in which the ways take turns; the ratios are to the first way, within a round."""
    measured: dict[str, list[Speed]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, batches in ways.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            measured[name].append(measure(batches))
    first = next(iter(measured.values()))
    rows = []
    for name, values in measured.items():
        rates = [value.rows_per_s for value in values]
        ratios = publish.ratios(rates, [value.rows_per_s for value in first])
        cpu = publish.spread([value.cpu_us_per_row for value in values], ",.3g")
        rows.append([name, publish.spread(rates, ",.0f"), publish.spread(ratios, ".3g"), cpu])
    note = f"Batches of {BATCH_SIZE}. Median of {ROUNDS} rounds in which they take turns, minimum and maximum."
    return publish.Table(title, ["way", "rows/s", "x the first", "CPU us a row"], rows, note), measured


def main() -> None:
    torch.set_num_threads(1)
    cifar = layouts.pictures(N_CIFAR, (3, 32, 32))
    faces = layouts.pictures(N_FACES, (1, 48, 48))
    tutorial, strings, files = Tutorial(cifar), PixelStrings(faces), Files(faces)
    tables, data = [], {}
    for title, ways in {
        "CIFAR-shaped rows, augmented": {
            "each image in the Dataset, 0 workers": loader(tutorial, 0),
            "each image in the Dataset, 2 workers": loader(tutorial, 2),
            "disk tier, batches augmented on this CPU": ours("cifar", cifar, True),
            "disk tier, without augmentation": ours("cifar", cifar, False),
        },
        "48 x 48 grey images": {
            "pixel strings of a CSV, 0 workers": loader(strings, 0),
            "pixel strings of a CSV, 2 workers": loader(strings, 2),
            "PNG files, 0 workers": loader(files, 0),
            "PNG files, 2 workers": loader(files, 2),
            "disk tier, converted once": ours("faces", faces, False),
        },
        "workers: PNG files in the page cache": {f"{n} workers": loader(files, n) for n in (0, 1, 2, 4)},
        "workers: rows that wait 1 ms each": {f"{n} workers": loader(Waiting(), n) for n in (0, 1, 2, 4, 8)},
    }.items():
        table, data[title] = speeds(title, ways)
        tables.append(table)
    waits: dict[int, list[float]] = {factor: [] for factor in (1, 2, 8, 32)}
    for _ in range(3):
        for factor, values in waits.items():
            values.append(wait_pct(factor))
    note = (
        "A device that needs 20 ms a batch; two workers need 0.9 of that, but every 21st batch takes ten times as long."
    )
    rows = [[str(factor), publish.spread(values, ".0f", " %")] for factor, values in waits.items()]
    tables.append(publish.Table("prefetch factor", ["prefetch_factor", "time waiting for data"], rows, note))
    publish.write("idle", tables, data | {"prefetch factor": waits}, "python bench/idle.py")


if __name__ == "__main__":
    main()
