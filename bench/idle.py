"""The contenders of bench/run.py idle: the usual ways to load small images, and what a DataLoader's settings change.

The page docs/why-is-my-gpu-idle.md of a project shows them. The name of a contender begins with that of its rows.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from contenders import fastgpu, in_memory, ram_batches
from peers import Contender, Items, Task, loader
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fastgpu.images.augment import random_crop, random_flip

STEP_S = 0.02
"""Time that a simulated device needs for a batch."""
N_UNEVEN = 21
"""One of so many batches takes ten times as long as the others."""


def tutorial(task: Task) -> Items:
    """CIFAR-shaped rows in memory as most tutorials read them: pad, crop, flip and normalise each image on the CPU."""
    images = in_memory(task.h5)[0].transpose(0, 2, 3, 1).copy()

    def item(row: int) -> tuple[Tensor, int]:
        padded = Image.new("RGB", (40, 40))
        padded.paste(Image.fromarray(images[row]), (4, 4))
        left, top = torch.randint(0, 9, (2,)).tolist()
        image = padded.crop((left, top, left + 32, top + 32))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x_CHW = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return (x_CHW - 0.5) / 0.25, row % 10

    return Items(len(images), item)


def augmented_batches(task: Task) -> Items:
    """Batches of the same rows, which are cropped, flipped and normalised as a whole, as this project does it."""
    rows = ram_batches(task)

    def batch(row_ids: list[int]) -> tuple[Tensor, Tensor]:
        x_BCHW, labels_B = rows[row_ids]
        return augment(x_BCHW, torch.default_generator), labels_B % 10

    return Items(len(rows), batch)


def augment(x_BCHW: Tensor, rng: torch.Generator) -> Tensor:
    return random_flip(random_crop(x_BCHW, 4, rng), rng) * (1 / 63.75) - 2


def pixel_strings(task: Task) -> Items:
    """Numbers in the text of a CSV file, which are parsed."""
    lines = [" ".join(map(str, image.ravel())) for image in in_memory(task.h5)[0]]

    def item(row: int) -> tuple[Tensor, int]:
        pixels = np.array(lines[row].split(), dtype="float32").reshape(1, 48, 48)
        return torch.from_numpy(pixels / 255), row % 7

    return Items(len(lines), item)


def png_files(task: Task) -> Items:
    """PNG files, which are decoded."""
    images = in_memory(task.h5)[0]
    paths = [task.folder / f"png/{row:05d}.png" for row in range(len(images))]
    if not paths[-1].exists():
        paths[0].parent.mkdir(exist_ok=True)
        for path, image in zip(paths, images, strict=True):
            Image.fromarray(image[0]).save(path)

    def item(row: int) -> tuple[Tensor, int]:
        with Image.open(paths[row]) as image:
            pixels = np.array(image, dtype="float32")[None]
        return torch.from_numpy(pixels / 255), row % 7

    return Items(len(paths), item)


def png_batches(task: Task) -> Items:
    """Batches of the same files."""
    rows = png_files(task)
    return Items(len(rows), lambda row_ids: default_collate([rows[row] for row in row_ids]))


def waiting(task: Task) -> Items:
    """Rows that take 1 ms each without using a CPU, like small files on a network file system."""

    def item(row: int) -> tuple[int]:
        time.sleep(0.001)
        return (row,)

    return Items(1_000_000, item)


def uneven(task: Task) -> Items:
    """Rows for which two workers need 0.9 of the device's time in the mean. Some batches take ten times as long."""

    def item(row: int) -> tuple[int]:
        if row % task.batch_size == 0:
            is_slow = row // task.batch_size % N_UNEVEN == 0
            time.sleep(2 * 0.9 * STEP_S * (10 if is_slow else 1) * N_UNEVEN / (N_UNEVEN + 9))
        return (row,)

    return Items(1_000_000, item)


def before_device(task: Task, *, prefetch_factor: int) -> Contender:
    """Uneven rows of two workers in front of a device that needs 20 ms for a batch. 0: the device alone."""
    batches = DataLoader(uneven(task), task.batch_size, num_workers=2, prefetch_factor=prefetch_factor or None)

    def epoch(number: int) -> Iterator[Any]:
        for batch in batches if prefetch_factor else repeat([torch.zeros(task.batch_size)], 1000):
            time.sleep(STEP_S)
            yield batch

    return Contender([], epoch)


def augmented(task: Task) -> Contender:
    """This project. Batches are cropped, flipped and normalised on this CPU."""
    feed = fastgpu(task)
    rng = torch.Generator().manual_seed(0)

    def epoch(number: int) -> Iterator[Any]:
        for x_BCHW, _ in feed.epoch(number):
            yield [augment(x_BCHW, rng)]

    return Contender(feed.files, epoch)


CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    "cifar: each image in the Dataset, 0 workers": partial(loader, rows=tutorial, workers=0),
    "cifar: each image in the Dataset, 2 workers": partial(loader, rows=tutorial, workers=2),
    **{
        f"cifar: batches in the Dataset, {n} workers": partial(
            loader, rows=augmented_batches, in_batches=True, workers=n
        )
        for n in (0, 2)
    },
    "cifar: disk tier, batches augmented on this CPU": augmented,
    "cifar: disk tier, without augmentation": fastgpu,
    "faces: pixel strings of a CSV, 0 workers": partial(loader, rows=pixel_strings, workers=0),
    "faces: pixel strings of a CSV, 2 workers": partial(loader, rows=pixel_strings, workers=2),
    **{f"faces: PNG files, {n} workers": partial(loader, rows=png_files, workers=n) for n in (0, 1, 2, 4)},
    "faces: batches of PNG files, 2 workers": partial(loader, rows=png_batches, in_batches=True, workers=2),
    "faces: batches of pixels in memory, 0 workers": partial(loader, rows=ram_batches, in_batches=True, workers=0),
    "faces: disk tier, converted once": fastgpu,
    **{f"waiting: 1 ms a row, {n} workers": partial(loader, rows=waiting, workers=n) for n in (0, 1, 2, 4, 8)},
    "uneven: the device alone": partial(before_device, prefetch_factor=0),
    **{f"uneven: prefetch_factor {n}": partial(before_device, prefetch_factor=n) for n in (1, 2, 8, 32)},
}
