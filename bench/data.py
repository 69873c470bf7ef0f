"""The files that benchmarks read: rows that can be told apart, smooth pictures, and JPEG files."""

import math
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from peers import PROJECT
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


def make(spec: DataSpec, n_classes: int | None = None) -> None:
    """Write numbered pictures as convert.py would. A file that exists is kept.

    The first four bytes of image n hold n, by which the rows that a loader delivers are checked. Its label is n, too,
    or n modulo the number of classes.
    """
    if spec.h5.exists():
        return
    labels = np.arange(spec.n_rows)
    spec.folder.mkdir(parents=True, exist_ok=True)
    images = np.resize(pictures(min(spec.n_rows, N_PICTURES), spec.shape), (spec.n_rows, *spec.shape))
    images.reshape(spec.n_rows, -1)[:, :4] = labels.astype("<u4").view(np.uint8).reshape(-1, 4)
    fields = {"images": Field(images.dtype, spec.shape), "labels": Field(labels.dtype, ())}
    attributes = {"n_classes": n_classes} if n_classes else {}
    rows = {"images": images, "labels": labels % n_classes if n_classes else labels}
    with new_file(spec.h5) as partial:
        write_rows(partial, spec.n_rows, fields, [rows], attributes=attributes)


def pictures(n_rows: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 (n_rows, C, H, W): waves of random direction and phase, and noise of a few grey levels."""
    rng = np.random.default_rng(0)
    C, H, W = shape
    images = np.empty((n_rows, C, H, W), np.uint8)
    y, x = np.mgrid[:H, :W] / 32
    for image in images:
        for channel in image:
            a, b = rng.normal(size=2)
            phase = rng.uniform(0, 6)
            channel[:] = 128 + 90 * np.sin(a * x + b * y + phase) + rng.normal(0, 2, (H, W))
    return images


def make_jpegs(spec: DataSpec) -> None:
    """A folder of JPEG files, and a file of encoded images with the same bytes, by convert.py."""
    if spec.h5.exists():
        return
    source = spec.folder / "source"
    rng = np.random.default_rng(0)
    C, H, W = spec.shape
    base = pictures(min(spec.n_rows, N_PICTURES), spec.shape).transpose(0, 2, 3, 1)
    for number in range(spec.n_rows):
        pixels = base[number % len(base)] + NOISE * rng.standard_normal((H, W, C), np.float32)
        path = source / str(number % 10) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=92)
    run_script(PROJECT / "convert.py", "images", source, spec.h5, "--keep-encoded")


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
