"""Pictures for tests, and image files of them."""

import io

import numpy as np
from harness import image_file
from PIL import Image


def pixels(height: int = 30, width: int = 40) -> np.ndarray:
    """A smooth picture, which JPEG keeps, that has no symmetry."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 200 // height, columns * 200 // width, (rows + columns) % 50 * 4], axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    return io.BytesIO(image_file(image, kind, **options))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


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
