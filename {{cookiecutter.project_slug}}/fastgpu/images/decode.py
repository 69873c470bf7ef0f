"""One encoded image (JPEG, PNG, WebP): the pixels of any crop, resized.

simplejpeg (libjpeg-turbo) decodes JPEG files, and Pillow everything else. If simplejpeg is not installed, Pillow
decodes JPEG files to the same pixels. A crop is taken from a JPEG file decoded at 1/2, 1/4 or 1/8 of its size, if the
crop then still has at least the requested number of pixels. Shapes: C channels, H and W pixels.
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

from fastgpu.images.crops import Box
from fastgpu.storage.file import scratch

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA", "ICO", "PCX", "SGI", "QOI")
"""Image formats that Pillow decodes itself. For other formats it starts programs, such as Ghostscript for EPS."""
MAX_PIXELS = 89_478_485
"""Pillow warns of images with more pixels, and refuses images with twice as many, to stop decompression bombs."""
simplejpeg: Any = import_module("simplejpeg") if find_spec("simplejpeg") else None


class EncodedImage:
    """The bytes of an image file, and the `height` and `width` of the image. An EXIF orientation is ignored."""

    def __init__(self, data: np.ndarray):
        """data: (bytes,) uint8. Raises an exception of any kind if it is no image, or an image of too many pixels."""
        self.data = data
        self.is_plain = False
        """Whether this is a JPEG file that simplejpeg decodes like Pillow. Pillow decodes all other files."""
        if simplejpeg:
            with suppress(ValueError):  # not a JPEG file, or a damaged one: Pillow reads it or says what is wrong
                self.height, self.width, colors, _ = simplejpeg.decode_jpeg_header(data)
                self.is_plain = colors in ("YCbCr", "Gray", "RGB") and self.height * self.width <= MAX_PIXELS
        if not self.is_plain:
            self.width, self.height = self.header.size

    @cached_property
    def header(self) -> ImageFile.ImageFile:
        """Pillow's image before pixels are decoded: format, mode and size. Raises an exception of any kind."""
        return open_image(io.BytesIO(self.data.data))

    def decode(self, box: Box, size: tuple[int, int]) -> np.ndarray:
        """A crop of the image, resized to (height, width): uint8 (3, H, W), channels last in memory.

        The pixels are valid until this thread decodes again. Raises an exception of any kind for damaged bytes.
        """
        top, left, height, width = box
        reduction = max(1, min(8, height // size[0], width // size[1]))
        factor = 1 << (reduction.bit_length() - 1)  # 1, 2, 4 or 8: the largest at which the crop still fills `size`
        pixels_HWC = self._decode_whole(factor)
        if pixels_HWC.shape[:2] == (self.height, self.width):
            factor = 1
        rows = slice(top // factor, -(-(top + height) // factor))
        columns = slice(left // factor, -(-(left + width) // factor))
        # NumPy makes the crop contiguous: torch would wake its own threads for this, in each reader thread.
        crop_CHW = np.ascontiguousarray(pixels_HWC[rows, columns]).transpose(2, 0, 1)
        if crop_CHW.shape[1:] == size:
            return crop_CHW
        return resize_pixels(torch.from_numpy(crop_CHW), size).numpy()

    def _decode_whole(self, factor: int) -> np.ndarray:
        """All pixels, uint8 (H, W, 3): of JPEG files at 1 / factor of their size, of other files in full."""
        if self.is_plain:
            height, width = -(-self.height // factor), -(-self.width // factor)
            buffer = scratch(height * width * 3, "pixels")
            with suppress(ValueError):  # libjpeg-turbo refuses some files that Pillow reads
                return simplejpeg.decode_jpeg(
                    self.data, min_height=height, min_width=width, min_factor=factor, buffer=buffer
                )
        with open_whole(io.BytesIO(self.data.data)) as image:
            image.draft("RGB", (image.width // factor, image.height // factor))
            return to_rgb(image).permute(1, 2, 0).numpy()


def decode_plain(data: np.ndarray, out_HWC: np.ndarray) -> bool:
    """Decode a JPEG file directly into `out_HWC`, uint8 (H, W, 3). False: it has another size, or is no JPEG file."""
    with suppress(ValueError):  # another size or color space, or damaged: the general path reads or reports it
        return bool(simplejpeg) and simplejpeg.decode_jpeg(data, buffer=out_HWC).shape == out_HWC.shape
    return False


def open_image(file: IO[bytes]) -> ImageFile.ImageFile:
    """Read the header of an image. Raises an exception of any kind if it is no image, or has too many pixels."""
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:  # its message has the address of the file object
        raise ValueError("it is not an image that Pillow knows") from None


def open_whole(file: IO[bytes]) -> ImageFile.ImageFile:
    """`open_image` for pixels. Raises an exception of any kind if a PNG file does not match its checksums.

    Pillow decodes the pixels without these checks, so zeros at the end of a broken download would become pixels.
    """
    image = open_image(file)
    if image.format != "PNG":
        return image
    image.verify()
    file.seek(0)  # an image cannot be read after `verify`
    return open_image(file)


def to_rgb(image: Image.Image) -> Tensor:
    """The pixels as RGB, uint8 (3, H, W), channels last in memory. Raises ValueError for 32-bit integers or floats."""
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
    """Resize to (height, width), and keep the memory layout. torch's kernel for bytes gives Pillow's values to within
    one level, in a third of the time."""
    image_1CHW = image_CHW.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # image_CHW[None] would lose the layout
    return F.interpolate(image_1CHW, size, mode="nearest-exact" if is_mask else "bilinear", antialias=not is_mask)[0]
