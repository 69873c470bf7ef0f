"""One encoded image (JPEG, PNG, WebP): the pixels of any part of it, resized.

JPEG files are decoded by simplejpeg (libjpeg-turbo), everything else by Pillow. Where simplejpeg is not installed,
Pillow decodes JPEG files, too, to the same pixels. A part is taken from the image decoded at 1/2, 1/4 or 1/8 of its
size, if the part then still has as many pixels as are asked for. Shapes: C channels, H and W pixels.
"""

import io
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from fastgpu.images.parts import Box
from fastgpu.storage.file import scratch

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA", "ICO", "PCX", "SGI", "QOI")
"""Formats of pixels that Pillow decodes itself. For others it starts programs: Ghostscript for EPS."""
MAX_PIXELS = 89_478_485
"""Pillow warns of images with more pixels, and refuses twice as many: a decompression bomb would fill the memory."""
simplejpeg: Any = import_module("simplejpeg") if find_spec("simplejpeg") else None


class EncodedImage:
    """The bytes of an image file, and the `height` and `width` of the image. An EXIF orientation is ignored."""

    def __init__(self, data: np.ndarray):
        """data: (bytes,) uint8. Raises an exception of any kind if they are no image, or one of too many pixels."""
        self.data = data
        self.is_plain = False
        """Whether it is a JPEG file that simplejpeg decodes as Pillow does. Pillow decodes all others."""
        if simplejpeg:
            with suppress(ValueError):  # not a JPEG file, or a damaged one: Pillow reads it or says what is wrong
                self.height, self.width, colors, _ = simplejpeg.decode_jpeg_header(data)
                self.is_plain = colors in ("YCbCr", "Gray", "RGB") and self.height * self.width <= MAX_PIXELS
        if not self.is_plain:
            self.width, self.height = self.header.size

    @cached_property
    def header(self) -> ImageFile.ImageFile:
        """What Pillow knows of the image before it decodes pixels. Raises an exception of any kind."""
        return open_image(io.BytesIO(self.data.data))

    def decode(self, box: Box, size: tuple[int, int]) -> np.ndarray:
        """A part of the image, resized to (height, width): uint8 (3, H, W), channels last in memory.

        It is valid until this thread decodes again. Raises an exception of any kind if the bytes are damaged.
        """
        top, left, height, width = box
        reduction = max(1, min(8, height // size[0], width // size[1]))
        factor = 1 << (reduction.bit_length() - 1)  # of 1, 2, 4 and 8 the largest at which the part still fills `size`
        pixels_HWC = self._decode_whole(factor)
        if pixels_HWC.shape[:2] == (self.height, self.width):
            factor = 1
        rows = slice(top // factor, -(-(top + height) // factor))
        columns = slice(left // factor, -(-(left + width) // factor))
        # NumPy makes the part contiguous: torch would wake its threads for it, from each of the reader threads.
        part_CHW = np.ascontiguousarray(pixels_HWC[rows, columns]).transpose(2, 0, 1)
        if part_CHW.shape[1:] == size:
            return part_CHW
        return resize_pixels(torch.from_numpy(part_CHW), size).numpy()

    def _decode_whole(self, factor: int) -> np.ndarray:
        """All pixels, uint8 (H, W, 3): JPEG files at 1 / factor of their size, others in full."""
        if self.is_plain:
            height, width = -(-self.height // factor), -(-self.width // factor)
            buffer = scratch(height * width * 3, "pixels")
            with suppress(ValueError):  # libjpeg-turbo also refuses what Pillow reads
                return simplejpeg.decode_jpeg(
                    self.data, min_height=height, min_width=width, min_factor=factor, buffer=buffer
                )
        with open_whole(io.BytesIO(self.data.data)) as image:
            image.draft("RGB", (image.width // factor, image.height // factor))
            return to_rgb(image).permute(1, 2, 0).numpy()


def decode_plain(data: np.ndarray, out_HWC: np.ndarray) -> bool:
    """Decode a JPEG file straight into `out_HWC`, uint8 (H, W, 3). False: it has another size, or is no such file."""
    with suppress(ValueError):  # of another size or color space, or damaged: the general path reads or reports it
        return bool(simplejpeg) and simplejpeg.decode_jpeg(data, buffer=out_HWC).shape == out_HWC.shape
    return False


def open_image(file: IO[bytes]) -> ImageFile.ImageFile:
    """Read the header of an image. Raises an exception of any kind if it is none, or one of too many pixels."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:  # its message has the address of the file object
        raise ValueError("it is not an image that Pillow knows") from None


def open_whole(file: IO[bytes]) -> ImageFile.ImageFile:
    """`open_image` for pixels. Raises an exception of any kind if a PNG file does not match its checksums.

    Pillow decodes its pixels without them, so that zeros at the end of a broken download become pixels.
    """
    image = open_image(file)
    if image.format != "PNG":
        return image
    image.verify()
    file.seek(0)  # an image that was verified cannot be read
    return open_image(file)


def to_rgb(image: Image.Image) -> Tensor:
    """The pixels of an image as RGB, uint8 (3, H, W), channels last in memory. Raises ValueError if they are wider."""
    if image.mode in ("I", "F"):
        raise ValueError(
            "its pixels are integers of 32 bits, or floats; scale them to 0 to 255 and save them as .npy for "
            "`convert.py arrays`"
        )
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode != "RGB":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def resize_pixels(image_CHW: Tensor, size: tuple[int, int], *, is_mask: bool = False) -> Tensor:
    """Resize to (height, width), in the memory layout of the image. torch's kernel for bytes gives the values of Pillow
    to within one level, in a third of the time."""
    image_1CHW = image_CHW.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # image_CHW[None] would lose the layout
    return F.interpolate(image_1CHW, size, mode="nearest-exact" if is_mask else "bilinear", antialias=not is_mask)[0]
