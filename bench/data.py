"""The files that benchmarks read: rows that can be told apart, smooth pictures, and JPEG files."""

import math
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import project
from PIL import Image

from fastgpu.convert.writer import write_rows
from fastgpu.process.files import new_file
from fastgpu.rows.rows import Field

HERE = Path(__file__).parent
FOLDER = HERE / "data"
"""Where benchmarks keep their files."""
N_PICTURES = 500
"""Number of different pictures; they repeat after that."""
NOISE = 19
"""Grey levels of noise that give JPEG files the size of published ones."""


class DataSpec(NamedTuple):
    """A data set, and the batch size that it is read in."""

    name: str
    n_rows: int
    shape: tuple[int, ...]
    """(C, H, W) of an image, or (items,) of a user."""
    batch_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape)

    @property
    def folder(self) -> Path:
        """The folder of the HDF5 file, in which contenders keep their own formats of the data, too."""
        return FOLDER / f"{'x'.join(map(str, self.shape))}-{self.n_rows}"

    @property
    def h5(self) -> Path:
        return self.folder / "rows.h5"

    def small(self) -> "DataSpec":
        """A part of it, to try the benchmark itself."""
        return self._replace(n_rows=self.n_rows // 25, batch_size=self.batch_size // 16)


FULL = (DataSpec("celeba", 12_000, (3, 218, 178), 256), DataSpec("cifar", 200_000, (3, 32, 32), 1024))
QUICK = tuple(spec.small() for spec in FULL)


def write(
    path: Path, n_rows: int, parts: Iterable[Mapping[str, np.ndarray]], attributes: Mapping[str, Any] | None = None
) -> None:
    """Write rows as convert.py would. A file that exists is kept, since a writer leaves whole files only."""
    if path.exists():
        return
    parts = iter(parts)
    first = next(parts)
    fields = {name: Field(array.dtype, array.shape[1:]) for name, array in first.items()}
    with new_file(path, replace=True) as partial:
        write_rows(partial, n_rows, fields, chain([first], parts), attributes=attributes or {})


def numbered(n_rows: int, shape: tuple[int, int, int]) -> Iterable[dict[str, np.ndarray]]:
    """Parts of `n_rows` pictures. The first four bytes of image n hold n, and so does its label."""
    images = pictures(min(n_rows, N_PICTURES), shape)
    for start in range(0, n_rows, len(images)):
        labels = np.arange(start, min(start + len(images), n_rows))
        part = images[: len(labels)]
        part.reshape(len(part), -1)[:, :4] = labels.astype("<u4").view(np.uint8).reshape(-1, 4)
        yield {"images": part, "labels": labels}


def make(spec: DataSpec) -> None:
    """Write the rows of a data set, so that the rows that a loader delivers can be checked."""
    write(spec.h5, spec.n_rows, numbered(spec.n_rows, spec.shape))


def pictures(n_rows: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 (n_rows, C, H, W): waves of random direction and phase, and noise of a few grey levels."""
    rng = np.random.default_rng(0)
    C, H, W = shape
    images = np.empty((min(n_rows, N_PICTURES), C, H, W), np.uint8)
    y, x = np.mgrid[:H, :W] / 32
    for image in images:
        for channel in image:
            a, b = rng.normal(size=2)
            phase = rng.uniform(0, 6)
            channel[:] = 128 + 90 * np.sin(a * x + b * y + phase) + rng.normal(0, 2, (H, W))
    return np.resize(images, (n_rows, C, H, W))


def write_jpegs(folder: Path, n_files: int, size: tuple[int, ...], n_classes: int = 1) -> Path:
    """A folder of JPEG files, one sub-folder for each class. size: (height, width). A folder that exists is kept."""
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    for label in range(n_classes):
        (partial / str(label)).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    base = pictures(min(n_files, N_PICTURES), (3, *size)).transpose(0, 2, 3, 1)
    for number in range(n_files):
        noise = NOISE * rng.standard_normal((*size, 3), np.float32)
        pixels = (base[number % len(base)] + noise).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(partial / str(number % n_classes) / f"{number:05d}.jpg", quality=92)
    partial.rename(folder)
    return folder


def make_jpegs(spec: DataSpec) -> None:
    """A file of encoded images by convert.py, and beside it a folder of JPEG files with the same bytes."""
    if spec.h5.exists():
        return
    source = write_jpegs(spec.folder / "source", spec.n_rows, spec.shape[1:], n_classes=10)
    target = spec.folder / "encoded.h5"
    run_script(project.FOLDER / "convert.py", "images", source, target, "--keep-encoded", "--force")
    (spec.folder / "jpegs").mkdir(exist_ok=True)
    for number, encoded in enumerate(encoded_rows(target)):
        (spec.folder / f"jpegs/{number:05d}.jpg").write_bytes(encoded.tobytes())
    target.rename(spec.h5)


def make_users(spec: DataSpec) -> None:
    """Made-up users and items. Users for validation, with items held out, are in users-val.h5."""
    if spec.h5.exists():
        return
    mean_items = spec.shape[0] // 275 + 1  # 74 of MovieLens-20M's 20,108 items
    numbers = ["--users", spec.n_rows, "--items", spec.shape[0], "--mean-items", mean_items, "--train-share", 0.85367]
    spec.folder.mkdir(parents=True, exist_ok=True)
    run_script(HERE.parent / "tools/make_interactions.py", spec.folder / "users.h5", *numbers)
    (spec.folder / "users-train.h5").rename(spec.h5)


def run_script(script: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, (script, *arguments))], check=True, stdout=sys.stderr)


def encoded_rows(path: Path) -> list[np.ndarray]:
    """The bytes of each encoded image of a file."""
    with h5py.File(path) as file:
        return np.split(file["images/values"][:], file["images/indptr"][1:-1])
