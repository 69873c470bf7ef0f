"""Decodes image files to upright RGB pixels of one size: Pillow decodes, torch resizes.

Grey, palette, CMYK and 16-bit images become 8-bit RGB, too. An alpha channel is dropped. Images are
turned as their EXIF orientation says.

Shapes: C channels, H and W pixels.
"""

import io
import json
from pathlib import Path
from typing import get_args

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from fastgpu.images.crops import Preprocessing, Resize, centre_box
from fastgpu.images.decode import EncodedImage, open_whole, resize_pixels, to_rgb
from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError

EXIF_ORIENTATION = 0x0112
EXIF_ON_ITS_SIDE = 5
"""From this EXIF orientation on, images are stored on their side."""


def read_preprocessing(text: str | None) -> Preprocessing:
    """Parse the result of `Preprocessing.to_json`. None: the images were not prepared.

    Raises UserError if another version prepared them in a way that this one lacks.
    """
    if not text:
        return Preprocessing()
    values = json.loads(text)
    if values.get("crop") or values["resize"] not in get_args(Resize):
        raise UserError(f"images that were prepared with {text} need the version that prepared them")
    size = tuple(values["size"]) if values["size"] else None
    return Preprocessing(size, values["resize"], values.get("centre_share"))


def read_image(path: Path, preprocessing: Preprocessing, shape: tuple[int, ...]) -> np.ndarray:
    """Read an image file as uint8 of this shape: (3, H, W), or for grey rows (1, H, W) or (H, W).

    Raises an exception of any kind if the file is damaged, ValueError if its size is another one.
    """
    image_CHW = decode(open_upright(path), preprocessing)
    if image_CHW.shape[1:] != shape[-2:]:
        raise ValueError(f"it has {image_CHW.shape[1:]} pixels, the others {shape[-2:]}; resize it")
    if shape[:-2] == (3,):
        return image_CHW
    return np.asarray(Image.fromarray(image_CHW.transpose(1, 2, 0)).convert("L")).reshape(shape)


class UprightImage(EncodedImage):
    """An encoded image, turned by its EXIF orientation: `height` and `width` belong to the turned image."""

    def __init__(self, data: np.ndarray):
        super().__init__(data)
        self.orientation = orientation_of(self.header)
        if self.orientation >= EXIF_ON_ITS_SIDE:
            self.height, self.width = self.width, self.height

    def decode_whole(self, min_size: tuple[int, int] | None = None) -> Tensor:
        """All pixels, uint8 (3, H, W). Raises an exception of any kind if the bytes are damaged.

        min_size: (height, width). A larger JPEG file may be decoded at 1/2, 1/4 or 1/8, not below this.
        """
        with open_whole(io.BytesIO(self.data.data)) as opened:
            image: Image.Image = opened
            if min_size:
                height, width = min_size
                image.draft("RGB", (height, width) if self.orientation >= EXIF_ON_ITS_SIDE else (width, height))
            ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)

    def _decode_whole(self, factor: int) -> np.ndarray:
        if self.orientation == 1:
            return super()._decode_whole(factor)
        return self.decode_whole((self.height // factor, self.width // factor)).permute(1, 2, 0).numpy()


def open_upright(path: Path) -> UprightImage:
    """Read an image file. Raises an exception of any kind if it is none, and ValueError for a FIFO."""
    with open_regular(path) as file:
        return UprightImage(np.frombuffer(file.read(), np.uint8))


def decode(image: UprightImage, preprocessing: Preprocessing) -> np.ndarray:
    """Decode an image and prepare it: uint8 (3, H, W)."""
    size = preprocessing.size
    if size and preprocessing.centre_share:
        return image.decode(centre_box(image.height, image.width, size, preprocessing.centre_share), size)
    # A JPEG file is decoded at 1/2, 1/4 or 1/8, to twice the size that is asked for or more.
    image_CHW = image.decode_whole(size and (2 * size[0], 2 * size[1]))
    return fit(image_CHW, preprocessing).contiguous().numpy()


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation of an image, 1 to 8. 1 is upright; other values mean nothing, and Pillow turns nothing."""
    orientation: int = image.getexif().get(EXIF_ORIENTATION, 1)
    return orientation if orientation in range(2, 9) else 1


def fit(image_CHW: Tensor, preprocessing: Preprocessing, *, is_mask: bool = False) -> Tensor:
    """Resize an image, or a mask (1, H, W), whose values are not mixed."""
    size, resize, _ = preprocessing
    _, height, width = image_CHW.shape
    if size is None or size == (height, width):
        return image_CHW
    if resize == "shorter":  # the largest part in the centre that has the aspect ratio of `size`
        rows = max(1, min(height, round(width * size[0] / size[1])))
        columns = max(1, min(width, round(height * size[1] / size[0])))
        top = (height - rows) // 2
        left = (width - columns) // 2
        image_CHW = image_CHW[:, top : top + rows, left : left + columns]
    return resize_pixels(image_CHW, size, is_mask=is_mask)
