"""Image files as rows: found in folders, decoded by Pillow, resized by torch. All scripts read images by this code.

Every image becomes RGB and upright, as its EXIF orientation says: grey, palette, CMYK and 16-bit images, too.
An alpha channel is dropped.

Shapes: C channels, H and W pixels.
"""

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, get_args

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from fastgpu.images.decode import (
    EXIF_ON_ITS_SIDE,
    EXIF_ORIENTATION,
    FORMATS,
    EncodedImage,
    open_image,
    open_whole,
    resize_pixels,
    to_rgb,
)
from fastgpu.images.parts import Preprocessing, Resize, centre_box
from fastgpu.process.launch import UserError

IGNORED_CLASS = 255
"""Pixels of a mask that have no class."""


def read_preprocessing(text: str) -> Preprocessing:
    """What `Preprocessing.to_json` wrote. Raises UserError if this version does not know that way."""
    values = json.loads(text)
    if values.get("crop") or values["resize"] not in get_args(Resize):
        raise UserError(f"images that were prepared with {text} need the version that prepared them")
    size = tuple(values["size"]) if values["size"] else None
    return Preprocessing(size, values["resize"], values.get("centre_share"))


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    kind = Image.registered_extensions().get(Path(name).suffix.lower())
    return kind in (*FORMATS, "MPO") and not name.startswith(".")


def list_images(root: Path) -> list[str]:
    """Paths, relative to `root`, of the image files in it at any depth, in the order of their names.

    Links to folders are followed, but not back into `root`, and not twice to one folder. Prints how many other files of
    which kind there are, and hidden folders. Raises UserError if `root` is no folder, OSError if one cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    seen: set[Path] = set()
    paths: list[str] = []
    others: Counter[str] = Counter()
    for place, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        others.update(name for name in folders if name.startswith("."))  # such as .ipynb_checkpoints
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in [Path(place, name) for name in folders]:
            target = path.resolve()
            if path.is_symlink() and (target in seen or target.is_relative_to(root.resolve())):
                folders.remove(path.name)
            seen.add(target)
        paths += [os.path.relpath(Path(place, name), root) for name in sorted(files) if is_image(name)]
        others.update(Path(name).suffix.lower() or name for name in files if not is_image(name))
    if others:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(10))
        print(f"left out of {root}: {kinds} (formats that Pillow reads by itself, such as JPEG and PNG, are taken)")
    return paths


def read_image(path: Path, preprocessing: Preprocessing, shape: tuple[int, ...]) -> np.ndarray:
    """An image file -> uint8 (3, H, W), or if `shape` is that of grey rows, (1, H, W) or (H, W).

    Raises an exception of any kind if the file is damaged, ValueError if the image has another size.
    """
    with path.open("rb") as file:
        image_CHW = decode(file, preprocessing)
    if image_CHW.shape[1:] != shape[-2:]:
        raise ValueError(f"it has {image_CHW.shape[1:]} pixels, the others {shape[-2:]}; resize it")
    if shape[:-2] == (3,):
        return image_CHW
    return np.asarray(Image.fromarray(image_CHW.transpose(1, 2, 0)).convert("L")).reshape(shape)


def decode(file: IO[bytes], preprocessing: Preprocessing) -> np.ndarray:
    """An image file -> uint8 (3, H, W)."""
    if preprocessing.size and preprocessing.centre_share:
        data = np.frombuffer(file.read(), np.uint8)
        return decode_centre(data, preprocessing.size, preprocessing.centre_share)
    with open_whole(file) as opened:
        image: Image.Image = opened
        if preprocessing.size:  # a JPEG is decoded at 1/2, 1/4 or 1/8, to twice the size or more
            height, width = preprocessing.size
            if image.getexif().get(EXIF_ORIENTATION, 1) >= EXIF_ON_ITS_SIDE:
                height, width = width, height
            image.draft("RGB", (2 * width, 2 * height))
        ImageOps.exif_transpose(image, in_place=True)
        image_CHW = to_rgb(image)
    return fit(image_CHW, preprocessing).contiguous().numpy()


def decode_centre(data: np.ndarray, size: tuple[int, int], share: float) -> np.ndarray:
    """The centre of an image, resized (see `centre_box`): uint8 (3, H, W), valid until this thread decodes again."""
    image = EncodedImage(data, obeys_exif=True)
    return image.decode(centre_box(image.height, image.width, size, share), size)


def describe_losses(file: IO[bytes]) -> list[str]:
    """What `decode` does not keep of an image file but its mode. Reads headers alone."""
    losses = []
    with open_image(file) as image:
        layout = str(image.tile)  # of the pixels in the file: Pillow itself reads 16 bits a color as mode RGB
        if image.mode.startswith("I") or (";16" in layout and "BGR;16" not in layout):
            losses.append("16 bits to 8 (to keep them: a float32 array of the images, `convert.py arrays`)")
        elif image.has_transparency_data:
            losses.append("without the transparency")
        with suppress(Exception):  # a file that is damaged behind its first frame may raise anything
            if getattr(image, "is_animated", False):
                losses.append("the first of several frames or pages, without the others")
    return losses


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
