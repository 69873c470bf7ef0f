"""One image file -> one row: decoded by Pillow, resized by torch. All scripts find and prepare images by this code.

Every image becomes RGB and upright, as its EXIF orientation says: grey, palette, CMYK and 16-bit images, too.
An alpha channel is dropped.

Shapes: C channels, H and W pixels.
"""

import json
import os
import stat
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from fastgpu.process.launch import UserError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA", "ICO", "PCX", "SGI", "QOI")
"""Formats of pixels that Pillow decodes itself. For others it starts programs: Ghostscript for EPS."""
MAX_PIXELS = 89_478_485
"""An image with more pixels is likely made to fill the memory. Pillow only warns, without the name of the file."""
warnings.simplefilter("ignore", Image.DecompressionBombWarning)

Resize = Literal["shorter", "exact"]
EXIF_ORIENTATION = 0x0112
BITS_PER_SAMPLE = 258
"""A tag of TIFF files. Pillow has one mode for integers of 16 bits with a sign and of 32 bits."""
EXIF_ON_ITS_SIDE = 5
"""From this EXIF orientation on, images are stored on their side."""
IGNORED_CLASS = 255
"""Pixels of a mask that have no class."""
SIXTEEN_BITS = "16 bits to 8 (to keep them: a float32 array of the images, `convert.py arrays`)"


class Preprocessing(NamedTuple):
    """How an image becomes (height, width) pixels. A converted file keeps it in its attribute `preprocessing`."""

    size: tuple[int, int] | None = None
    """(height, width). None: the images have one size already."""
    resize: Resize = "shorter"
    """shorter: cover the size and take the centre. exact: stretch."""
    centre_share: float | None = None
    """Decode as encoded rows are for validation: this share of the sides of the largest part in the centre that has the
    aspect ratio of `size`. None: as above."""

    def to_json(self) -> str:
        values = self._asdict()
        if self.centre_share is None:
            del values["centre_share"]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> "Preprocessing":
        """Raises UserError if the images were prepared in a way that this version does not know."""
        values = json.loads(text)
        if values.get("crop") or values["resize"] not in get_args(Resize):
            raise UserError(f"images that were prepared with {text} need the version that prepared them")
        return cls(tuple(values["size"]) if values["size"] else None, values["resize"], values.get("centre_share"))


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    kind = Image.registered_extensions().get(Path(name).suffix.lower())
    return kind in (*FORMATS, "MPO") and not name.startswith(".")


def open_file(path: str | Path) -> IO[bytes]:
    """Open an image file. Raises OSError for a fifo, a socket or a device, which might be waited for without end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is a fifo, a socket or a device; give a regular file")
    return file


def open_image(file: IO[bytes]) -> ImageFile.ImageFile:
    """Read the header of an image. Raises ValueError if it has too many pixels."""
    image = Image.open(file, formats=FORMATS)
    check_size(image.height, image.width)
    return image


def check_size(height: int, width: int) -> None:
    """Raise ValueError if an image has too many pixels."""
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"it has {height * width:,} pixels, more than {MAX_PIXELS:,}; cut it into parts, or make it smaller"
        )


def decode(file: IO[bytes], preprocessing: Preprocessing) -> np.ndarray:
    """An image file -> uint8 (3, H, W)."""
    with open_image(file) as opened:
        image: Image.Image = opened
        if preprocessing.size:  # a JPEG is decoded at 1/2, 1/4 or 1/8, to twice the size or more
            height, width = preprocessing.size
            if image.getexif().get(EXIF_ORIENTATION, 1) >= EXIF_ON_ITS_SIDE:
                height, width = width, height
            image.draft("RGB", (2 * width, 2 * height))
        ImageOps.exif_transpose(image, in_place=True)
        image_CHW = to_rgb(image)
    return fit(image_CHW, preprocessing).contiguous().numpy()


def to_rgb(image: Image.Image) -> Tensor:
    """The pixels of an image as RGB, uint8 (3, H, W), channels last in memory. Raises ValueError if they are wider."""
    is_wide = image.mode == "I" and 32 in getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, ())
    if is_wide or image.mode == "F":
        kind = "integers of 32 bits" if is_wide else "floats"
        raise ValueError(f"its pixels are {kind}; scale them to 0 to 255 and save them as .npy for `convert.py arrays`")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    if image.mode != "RGB":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def describe_changes(file: IO[bytes]) -> list[str]:
    """What `decode` does to the colors of an image file, and whether it leaves out frames. Reads headers alone."""
    changes = []
    with open_image(file) as image:
        layout = str(image.tile)  # of the pixels in the file: Pillow itself reads 16 bits a color as mode RGB
        if image.mode.startswith("I") or (";16" in layout and "BGR;16" not in layout):
            changes.append(SIXTEEN_BITS)
        elif image.has_transparency_data:
            changes.append(f"{image.mode} to RGB, without the transparency")
        elif image.mode != "RGB":
            changes.append(f"{image.mode} to RGB")
        with suppress(Exception):  # a file that is damaged behind its first frame may raise anything
            if getattr(image, "is_animated", False):
                changes.append("the first of several frames or pages, without the others")
    return changes


def fit(image_CHW: Tensor, preprocessing: Preprocessing, *, is_mask: bool = False) -> Tensor:
    """Resize an image, or a mask (1, H, W), whose values are not mixed."""
    size, resize, _ = preprocessing
    _, height, width = image_CHW.shape
    if size is None or size == (height, width):
        return image_CHW
    if resize == "shorter":  # the largest part of the image that has the aspect ratio of `size`
        rows = max(1, min(height, round(width * size[0] / size[1])))
        columns = max(1, min(width, round(height * size[1] / size[0])))
        return resize_pixels(_centre(image_CHW, (rows, columns)), size, is_mask=is_mask)
    return resize_pixels(image_CHW, size, is_mask=is_mask)


def _centre(image_CHW: Tensor, size: tuple[int, int]) -> Tensor:
    """A view of the centre of an image."""
    top = (image_CHW.shape[1] - size[0]) // 2
    left = (image_CHW.shape[2] - size[1]) // 2
    return image_CHW[:, top : top + size[0], left : left + size[1]]


def resize_pixels(image_CHW: Tensor, size: tuple[int, int], *, is_mask: bool = False) -> Tensor:
    """Resize to (height, width). torch's kernel for bytes gives Pillow's values, up to one level, in a third of the
    time."""
    if is_mask:
        return F.interpolate(image_CHW[None], size, mode="nearest-exact")[0]
    return F.interpolate(image_CHW[None], size, mode="bilinear", antialias=True)[0]


def format_size(size: Sequence[int]) -> str:
    """Write (height, width) as `64x48`, the way the command line takes it."""
    return "x".join(str(length) for length in size)


def looks_like_nhwc(row_shape: Sequence[int]) -> bool:
    """Whether rows of this shape are images (H, W, C), as Pillow, OpenCV and Keras have them, and not (C, H, W)."""
    n_channels = (1, 3, 4)
    return len(row_shape) == 3 and row_shape[-1] in n_channels and row_shape[0] not in n_channels
