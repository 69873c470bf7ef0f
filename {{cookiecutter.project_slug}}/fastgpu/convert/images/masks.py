"""An image and the mask that has a class for each of its pixels, prepared alike."""

from typing import IO

import numpy as np
import torch
from PIL import ImageOps

from fastgpu.images.decode import EXIF_ON_ITS_SIDE, EXIF_ORIENTATION, open_image
from fastgpu.images.files import decode, fit, format_size
from fastgpu.images.parts import Preprocessing


def decode_pair(
    image_file: IO[bytes], mask_file: IO[bytes], preprocessing: Preprocessing, *, is_binary: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """An image file and its mask -> uint8 (3, H, W), uint8 (H, W): a class for each pixel, or IGNORED_CLASS.

    The classes are the indices of a palette image, or the values of a grey one. is_binary: if not of 1 bit, they are
    0 and 255, which is class 1. Raises ValueError if it has another mode or size than the image, or other values.
    """
    with open_image(image_file) as header:
        image_size = (header.height, header.width)
        if header.getexif().get(EXIF_ORIENTATION, 1) >= EXIF_ON_ITS_SIDE:
            image_size = (header.width, header.height)
    values = read_mask(mask_file)
    if is_binary and values.dtype != bool:
        if not np.isin(values, (0, 255)).all():
            raise ValueError("its mask has other values than 0 and 255, which --binary-masks allows alone")
        values = values // 255
    if values.shape != image_size:
        raise ValueError(f"its mask has {format_size(values.shape)} pixels, the image {format_size(image_size)}")
    mask_CHW = torch.from_numpy(values.astype(np.uint8))[None]
    mask_HW = fit(mask_CHW, preprocessing, is_mask=True)[0].contiguous().numpy()
    image_file.seek(0)
    return decode(image_file, preprocessing), mask_HW


def read_mask(file: IO[bytes]) -> np.ndarray:
    """The values of a grey image or the indices of a palette image: uint8 (H, W), or bool if they have 1 bit. Raises
    ValueError for others."""
    with open_image(file) as mask:
        ImageOps.exif_transpose(mask, in_place=True)
        values = np.array(mask)
        mode = mask.mode
    if values.ndim != 2 or values.dtype.kind not in "bui" or values.min() < 0 or values.max() > 255:
        raise ValueError(f"its mask has the mode {mode}; allowed are grey values or a palette, 0 to 255")
    return values if mode == "1" else values.astype(np.uint8)
