"""What bench/gpu.py trains: rows that are made up, a config for each kind of rows, and the DataLoaders that compete.

The cases are as large as the real thing, or tiny, to try the benchmark without a GPU: JPEG files for a ResNet-18 at
224 x 224, rows in the shape of CIFAR-10, and users and items as in MovieLens-20M.
"""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import project
import recsys
import torch
import torch.nn.functional as F
import yaml
from files import rows_of
from peers import npy_arrays
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastgpu.convert.writer import Writer
from fastgpu.convert.writing import complete_or_absent
from fastgpu.images.parts import random_box
from fastgpu.process.machine import available_cpus
from fastgpu.rows.rows import Field, Ragged, Rows

RESNET18 = {"width": 64, "blocks": 2}
N_CLASSES = 10
JPEG_SHAPE = (256, 341)
"""(height, width) of the JPEG files: a photograph of 500 x 375 whose shorter side was made 256."""
QUALITY = 92
MIN_SCALE = 0.08
"""Smallest share of the area of a random part."""
PREFETCH_FACTOR = 4

ToRows = Callable[[Any, torch.device, bool], Rows]
"""(a batch of a DataLoader, device, whether the copies need not be waited for) -> the batch on the device"""


class Case(NamedTuple):
    """Rows, and the network that is trained on them."""

    config: Path
    """A config for train.py."""
    file: Path
    """What the disk tier reads."""
    row_bytes: int
    """Mean size of a row in the file."""
    dataset: Dataset[Any]
    """The same rows for a DataLoader, one at a time."""
    to_rows: ToRows
    collate: Callable[[list[Any]], Any] | None = None

    def batches(self, batch_size: int, device: torch.device, *, is_tuned: bool) -> Iterator[list[Rows]]:
        """Batches of a DataLoader without end, each in a list of its own.

        is_tuned: worker processes on all CPUs, which stay and work ahead, page-locked memory, and copies that the host
        does not wait for. Otherwise the defaults of DataLoader, which load in the training process.
        """
        options: dict[str, Any] = {}
        if is_tuned:
            options = {"num_workers": available_cpus(), "persistent_workers": True, "prefetch_factor": PREFETCH_FACTOR}
            options["pin_memory"] = device.type == "cuda"
        loader = DataLoader(self.dataset, batch_size, shuffle=True, drop_last=True, collate_fn=self.collate, **options)
        while True:
            for batch in loader:
                yield [self.to_rows(batch, device, is_tuned)]


def write_config(path: Path, workload: str, data: dict[str, Any], model: dict[str, Any], *, with_sgd: bool) -> Path:
    """A config for train.py. The validation rows are the training rows, if `data` names no others."""
    optim = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
    if with_sgd:
        optim = {"name": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-5}
    data = {"val": data["train"], **data}
    train = {"precision": "auto"}
    sections = {"workload": workload, "data": data, "model": model, "optim": optim, "train": train}
    path.write_text(yaml.safe_dump(sections))
    return path


# ---------------------------------------------------------------------------------------------- decoded images


class ArrayRows(Dataset[tuple[np.ndarray, Any]]):
    """Rows of a memory-mapped .npy file: the fastest storage for rows that are asked for one by one."""

    def __init__(self, folder: Path):
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return np.array(self.images[row]), int(self.labels[row])


def image_rows(batch: list[Tensor], device: torch.device, non_blocking: bool) -> Rows:
    images, labels = (part.to(device, non_blocking=non_blocking) for part in batch)
    return Rows({"images": images, "labels": labels})


def write_images(path: Path, n_rows: int, shape: tuple[int, ...]) -> None:
    """An HDF5 file as convert.py writes it: noise that repeats, and classes. A file that exists is kept."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {"images": Field(np.dtype(np.uint8), shape), "labels": Field(np.dtype(np.int64), ())}
    noise = np.random.default_rng(0).integers(0, 256, (min(n_rows, 1000), *shape), np.uint8)
    with (
        complete_or_absent(path) as folder,
        Writer(folder / path.name, n_rows, fields, {"n_classes": N_CLASSES}) as writer,
    ):
        for start in range(0, n_rows, len(noise)):
            labels = np.arange(start, min(start + len(noise), n_rows)) % N_CLASSES
            writer.append({"images": noise[: len(labels)], "labels": labels})


def decoded_images(
    folder: Path, *, n_rows: int, shape: tuple[int, int, int], batch_size: int, model: dict[str, Any]
) -> Case:
    """uint8 images (C, H, W) in blocks of 2 MiB."""
    name = f"{n_rows}-{'x'.join(map(str, shape))}"
    path = folder / f"{name}.h5"
    write_images(path, n_rows, shape)
    data = {"train": str(path), "fields": {"images": "images", "labels": "labels"}, "batch_size": batch_size}
    config = write_config(folder / f"{name}.yaml", "images", data, {"flip": True, **model}, with_sgd=True)
    return Case(config, path, prod(shape), ArrayRows(npy_arrays(path, folder / name)), image_rows)


# ---------------------------------------------------------------------------------------------- JPEG files


class JpegRows(Dataset[tuple[Tensor, int]]):
    """JPEG files in memory, of which a random part is decoded and resized, as torchvision's RandomResizedCrop does."""

    def __init__(self, path: Path, size: int):
        self.encoded = rows_of(path)
        self.size = size

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self.encoded[row])) as image:
            top, left, height, width = random_box(torch.rand(22).tolist(), image.height, image.width, MIN_SCALE)
            part = image.convert("RGB").crop((left, top, left + width, top + height))
            pixels_HWC = np.array(part.resize((self.size, self.size), Image.Resampling.BILINEAR))
        pixels = torch.from_numpy(pixels_HWC).permute(2, 0, 1)
        return pixels.contiguous(), row % N_CLASSES


def write_jpeg(path: Path, number: int) -> None:
    """A smooth picture with some noise, which takes about as many bytes as a photograph."""
    rng = np.random.default_rng(number)
    coarse_CHW = torch.from_numpy(rng.normal(128, 60, (1, 3, 8, 11)).astype(np.float32))
    smooth_CHW = F.interpolate(coarse_CHW, JPEG_SHAPE, mode="bicubic")[0].numpy()
    noisy_CHW = smooth_CHW + rng.normal(0, 6, smooth_CHW.shape)
    pixels_HWC = noisy_CHW.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(pixels_HWC)).save(path, quality=QUALITY)


def jpeg_images(folder: Path, *, n_rows: int, size: int, batch_size: int, model: dict[str, Any]) -> Case:
    """JPEG files in an HDF5 file, decoded in each epoch to size x size pixels."""
    path = folder / f"jpeg-{n_rows}.h5"
    if not path.exists():
        images = folder / f"jpeg-{n_rows}"
        names = [images / str(number % N_CLASSES) / f"{number:05d}.jpg" for number in range(n_rows)]
        for name in names[:N_CLASSES]:
            name.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(available_cpus()) as threads:
            list(threads.map(write_jpeg, names, range(n_rows)))
        command = [sys.executable, project.FOLDER / "convert.py", "images", images, path, "--keep-encoded", "--force"]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    data = {"train": str(path), "fields": {"images": "images", "labels": "labels"}, "batch_size": batch_size}
    data |= {"image_size": size, "min_crop_scale": MIN_SCALE}
    model = {"flip": True, "crop_padding": 0, **model}
    config = write_config(folder / f"jpeg-{n_rows}.yaml", "images", data, model, with_sgd=True)
    return Case(config, path, path.stat().st_size // n_rows, JpegRows(path, size), image_rows)


# ---------------------------------------------------------------------------------------------- users and items


class UserRows(Dataset[np.ndarray]):
    """The items of each user, int32."""

    def __init__(self, path: Path):
        with h5py.File(path) as file:
            self.items = file["items/indices"][:].astype(np.int32)
            self.offsets = file["items/indptr"][:]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.items[self.offsets[row] : self.offsets[row + 1]]


def join_users(users: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """(values, offsets) of the users of a batch."""
    offsets = np.zeros(len(users) + 1, np.int32)
    np.cumsum([len(items) for items in users], out=offsets[1:])
    return torch.from_numpy(np.concatenate(users)), torch.from_numpy(offsets)


def user_rows(batch: list[Tensor], device: torch.device, non_blocking: bool) -> Rows:
    values, offsets = batch
    items = Ragged(values, offsets, offsets.numpy())
    return Rows({"items": items}).to(device, non_blocking=non_blocking)


def users_and_items(folder: Path, *, size: recsys.Size, batch_size: int) -> Case:
    """Sparse rows, and the network of the paper (600-200-600)."""
    path = recsys.make(size, folder)
    val = str(path).replace("-train.h5", "-val.h5")
    data = {"train": str(path), "val": val, "fields": {"items": "items"}, "batch_size": batch_size}
    data["val_fields"] = {"items": "items", "held_out": "held_out"}
    config = write_config(folder / f"{size.name}.yaml", "recsys", data, {}, with_sgd=False)
    dataset = UserRows(path)
    return Case(config, path, 4 * len(dataset.items) // len(dataset), dataset, user_rows, join_users)


# ---------------------------------------------------------------------------------------------- all cases

CASES: dict[str, Callable[[Path], Case]] = {
    "ResNet-18, JPEG files": partial(jpeg_images, n_rows=4_096, size=224, batch_size=256, model=RESNET18),
    "CIFAR-10": partial(
        decoded_images, n_rows=50_000, shape=(3, 32, 32), batch_size=512, model={"width": 64, "crop_padding": 4}
    ),
    "Mult-VAE, MovieLens-20M": partial(users_and_items, size=recsys.ML20M, batch_size=500),
}
TINY = {"width": 4}
TINY_CASES: dict[str, Callable[[Path], Case]] = {
    "ResNet-18, JPEG files": partial(jpeg_images, n_rows=32, size=32, batch_size=8, model=TINY),
    "CIFAR-10": partial(decoded_images, n_rows=64, shape=(3, 16, 16), batch_size=8, model=TINY),
    "Mult-VAE, MovieLens-20M": partial(
        users_and_items, size=recsys.QUICK._replace(name="tiny", n_users=400, n_items=200), batch_size=20
    ),
}
"""The same code for a CPU, in seconds. The numbers mean nothing."""
