"""Pictures, image files of them, and HDF5 files whose rows are image files."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image


def image_file(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file. options: of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def photo(number: int) -> bytes:
    """A PNG or JPEG file of a size of its own. That of number 1, a JPEG file, has 16 x 16 pixels."""
    rng = np.random.default_rng(number)
    height, width = (16, 16) if number == 1 else rng.integers(8, 60, 2)
    corners = Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8))
    return image_file(corners.resize((width, height)), "PNG" if number % 5 == 0 else "JPEG")


def write_encoded(path: Path, files: list[bytes], **columns: np.ndarray) -> str:
    """Write an HDF5 file whose `images` are image files, with other columns. Returns its path."""
    with h5py.File(path, "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "jpeg+png+webp"
        for name, column in columns.items():
            file[name] = column
    return str(path)


def write_photos(path: Path, rows: int, start: int = 0) -> str:
    """Write an HDF5 file with photos as encoded `images`, and their numbers as `labels`. Returns its path."""
    numbers = range(start, start + rows)
    return write_encoded(path, [photo(number) for number in numbers], labels=np.array(numbers))


def pixels(height: int = 30, width: int = 40) -> np.ndarray:
    """A smooth picture, which JPEG keeps, that has no symmetry."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 200 // height, columns * 200 // width, (rows + columns) % 50 * 4], axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    return io.BytesIO(image_file(image, kind, **options))


def bytes_of(file: io.BytesIO) -> np.ndarray:
    return np.frombuffer(file.getvalue(), np.uint8)


KINDS = {
    "baseline": ("RGB", "JPEG", {"quality": 95}),
    "progressive": ("RGB", "JPEG", {"quality": 95, "progressive": True}),
    "full color": ("RGB", "JPEG", {"quality": 95, "subsampling": 0}),
    "grey": ("L", "JPEG", {"quality": 95}),
    "CMYK": ("CMYK", "JPEG", {"quality": 95}),
    "PNG": ("RGB", "PNG", {}),
    "PNG with a palette": ("P", "PNG", {}),
    "PNG with transparency": ("RGBA", "PNG", {}),
    "WebP": ("RGB", "WEBP", {"lossless": True}),
    "BMP": ("RGB", "BMP", {}),
}
"""{kind: (mode, format, options of Pillow)}"""


def file_of(kind: str) -> io.BytesIO:
    """A file of 150 x 200 pixels."""
    mode, suffix, options = KINDS[kind]
    return encoded(Image.fromarray(pixels(150, 200)).convert(mode), suffix, **options)
