"""Images as map-style Datasets, for `convert.py` to write, or to train on as `data.dataset`.

Each returns {"images": uint8 (3, H, W), "labels": ...} for a row. Copy one to read your own data.
"""

import io
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps
from tqdm import tqdm

from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import SPLIT_OF_WORD, read_splits
from fastgpu.convert.writer import CODECS
from fastgpu.imagefiles.folders import is_image, list_images
from fastgpu.imagefiles.pixels import EXIF_ON_ITS_SIDE, EXIF_ORIENTATION, UprightImage, decode, fit
from fastgpu.images.crops import Box, Preprocessing
from fastgpu.images.decode import open_whole
from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError, list_first, warn

__all__ = ["ImageFolder"]

JPEG_QUALITY = 92
"""Quality of images that are made smaller and encoded again."""
IGNORED_CLASS = 255
"""Pixels of a mask that have no class."""
SOFT_VALUES = 64
"""A mask with this many values probably has soft edges, since an image shows fewer classes."""
MIN_SPARSE_CLASSES = 16
PIXEL = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9]?[0-9])"
PIXELS = rf"^(?:{PIXEL}\s+)*{PIXEL}$"
"""Whole numbers from 0 to 255 with spaces between them."""


class ImageReader(Reader):
    """Images, with labels if there are any. A subclass defines `read_file`, and calls `__init__` when it can read.

    prepared: without a size, all images must have the size of the first one. encoded: rows are the bytes of the image
    files, which each epoch decodes; if `prepared` has a size, larger images become JPEG files with this shorter side.
    For the other arguments, see `Reader`.
    """

    def __init__(
        self,
        name: str,
        n_rows: int | np.ndarray,
        labels: np.ndarray | None = None,
        *,
        prepared: Preprocessing = Preprocessing(),  # noqa: B008 (immutable)
        encoded: bool = False,
        broken: dict[int, str] | None = None,
    ):
        super().__init__(name, n_rows, labels, broken=broken)
        self.prepared = prepared
        self.encoded = encoded
        if not encoded:
            _, height, width = self.fields["images"].shape
            self.attributes["preprocessing"] = prepared._replace(size=(height, width)).to_json()

    def read_file(self, row: int) -> bytes:
        """The image file of a row. Raises an exception of any kind if it cannot be read."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises an exception of any kind if the row is broken."""
        self.refuse(row)
        return self.item(row, UprightImage(np.frombuffer(self.read_file(row), np.uint8)))

    def item(self, row: int, image: UprightImage) -> dict[str, Any]:
        """The fields of a row, from its image file. Raises an exception of any kind if it is broken."""
        size = self.prepared.size
        values = keep(image, size and size[0]) if self.encoded else decode(image, self.prepared)
        losses = describe_losses(image.header)
        if self.encoded and values is not image.data and not losses:
            losses = ["re-encoded: too large, not upright, or neither RGB nor grey"]
        if losses:
            self.losses[row] = losses
        return {"images": values} if self.labels is None else {"images": values, "labels": self.labels[row]}


class ImageFiles(ImageReader):
    """Image files in a folder.

    source: the folder, or a file in it that lists the images. paths: relative to the folder. how: see `ImageReader`.
    """

    def __init__(self, source: Path, paths: Sequence[str], labels: np.ndarray | None = None, **how: Any):
        self.paths = paths
        self.folder = source if source.is_dir() else source.parent
        super().__init__(str(source), len(paths), labels, **how)

    def read_file(self, row: int) -> bytes:
        return read_file(Path(self.folder, self.paths[row]))

    def where(self, row: int) -> str:
        return os.path.join(self.folder, self.paths[row])  # noqa: PTH118 (ten times as fast)


class ImageFolder(ImageFiles):
    """root/<class>/**, or root/{train,val,test}/<class>/**. how: `prepared` and `encoded` of `ImageReader`."""

    def __init__(self, root: str | Path, **how: Any):
        paths = list_images(Path(root))
        others = [suffix for suffix in (".parquet", ".tar") if any(Path(root).glob(f"*{suffix}"))]
        cure = f"name its files: '{root}/*{others[0]}'" if others else "list others in a CSV of path,label"
        found = ClassFolders(str(root), paths, cure)
        super().__init__(Path(root), [paths[place] for place in found.places], found.labels, **how)
        self.attributes["class_names"] = found.class_names
        self.splits = found.splits


class ClassFolders:
    """Labels, and splits if there are any, from the folders of images: see `ImageFolder`.

    Prints the number of images outside of class folders. Raises UserError, with this cure, if all are outside.
    """

    def __init__(self, root: str, paths: Sequence[str], cure: str):
        parts = [path.split("/") for path in paths]
        depth = int({part[0].lower() for part in parts if len(part) > 1} <= SPLIT_OF_WORD.keys())
        self.places = [place for place, part in enumerate(parts) if len(part) > depth + 1]
        """Places in `paths` of the images in class folders."""
        if not self.places:
            raise UserError(f"{root} has no images in sub-folders, one for each class; {cure}")
        if len(self.places) < len(paths):
            print(f"images beside the class folders of {root}, which are left out: {len(paths) - len(self.places):,}")
        classes, self.labels = np.unique([parts[place][depth] for place in self.places], return_inverse=True)
        self.class_names: list[str] = classes.tolist()
        self.splits = read_splits(root, [parts[place][0] for place in self.places]) if depth else None


class Masks(ImageFiles):
    """Images in a folder, with masks (H, W) of the same names, apart from the suffix, in another folder.

    is_binary: the masks hold 0 and 255, and 255 is class 1. drawn_on: where an EXIF orientation turns images, whether
    masks fit the images as `shown` or as `stored`; None: the sizes decide. Raises UserError with the images that have
    no mask.
    """

    def __init__(
        self, root: str | Path, masks: str | Path, *, is_binary: bool = False, drawn_on: str | None = None, **how: Any
    ):
        images = list_images(Path(root))
        names = [path.rpartition(".")[0] for path in images]
        found = list_images(Path(masks))
        mask_of = {path.rpartition(".")[0]: path for path in found}
        if len(mask_of) < len(found):
            raise UserError(f"{masks} has masks of the same name with different suffixes; keep one of each name")
        ending = _common_ending(names, sorted(mask_of))
        if lonely := [path for path, name in zip(images, names, strict=True) if name + ending not in mask_of]:
            cure = f"names have to be equal but for the suffix; there are {', '.join(found[:3]) or 'no images'}"
            found_none = f"{len(lonely):,} of {len(images):,} images have no mask in {masks}"
            raise UserError(f"{found_none}: {list_first(lonely)}; {cure}")
        if ending:
            print(f"masks in {masks} are taken for the images without {ending} at the end of the name")
        if n_unused := len(mask_of.keys() - {name + ending for name in names}):
            print(f"masks without an image in {root}, which are left out: {n_unused:,}")
        self._masks = [Path(masks, mask_of[name + ending]) for name in names]
        self._is_binary = is_binary
        self._drawn_on = drawn_on
        self._kinds: dict[bytes, int] = {}  # {which of the 256 values a mask has, as bytes of bool: a row}
        super().__init__(Path(root), images, **how)

    def item(self, row: int, image: UprightImage) -> dict[str, Any]:
        """Raises ValueError if the mask is unusable, or does not have the size of the image."""
        item = super().item(row, image)
        values_HW = self._read_upright(row, image)
        has_value = np.bincount(values_HW.ravel(), minlength=256) > 0
        if has_value.sum() >= SOFT_VALUES:
            cure = "save the number of a class for each pixel, such as mask > 127"
            raise ValueError(f"its mask has {has_value.sum()} values, as soft edges and photos have; {cure}")
        self._kinds.setdefault(has_value.tobytes(), row)
        mask_HW = fit(torch.from_numpy(values_HW)[None], self.prepared, is_mask=True)[0].contiguous().numpy()
        return item | {"masks": mask_HW}

    def _read_upright(self, row: int, image: UprightImage) -> np.ndarray:
        """The mask of a row, (H, W), turned like its image. Raises ValueError if it does not fit the image."""
        values_HW = read_mask(self._masks[row], is_binary=self._is_binary)
        shape = (image.height, image.width)
        stored_shape = shape[::-1] if image.orientation >= EXIF_ON_ITS_SIDE else shape
        fits = self._drawn_on
        if image.orientation > 1 and not fits:
            if values_HW.shape == shape == stored_shape:
                found = f"its EXIF orientation is {image.orientation}, and nothing says whether its mask is turned"
                raise ValueError(f"{found}; --masks-fit shown, or stored: masks of the turned images, or of the files")
            fits = "stored" if values_HW.shape == stored_shape else "shown"
        expected = stored_shape if fits == "stored" else shape
        if values_HW.shape != expected:
            raise ValueError(f"its mask has {values_HW.shape} pixels, the image {expected}")
        if fits == "stored" and image.orientation > 1:
            values_HW = turn_upright(values_HW, image.orientation)
            self.losses.setdefault(row, []).append("masks turned as the EXIF orientation of their images says")
        return values_HW

    def facts(self) -> dict[str, Any]:
        values = np.array([np.frombuffer(kind, bool) for kind in self._kinds])  # (kinds, 256)
        classes = np.flatnonzero(values[:, :IGNORED_CLASS].any(0))
        if not classes.any():
            raise UserError(f"{self.name}: no mask has a class above 0; if 255 is one, --binary-masks says so")
        n_classes = int(classes.max()) + 1
        is_black_and_white = values[:, IGNORED_CLASS] & ~values[:, 1:IGNORED_CLASS].any(1)
        if is_black_and_white.any():
            row = [*self._kinds.values()][int(is_black_and_white.argmax())]
            told = f"{self._masks[row]} and others of 0 and 255 alone have no class but 0; if 255 is one"
            warn(f"{told}, write all masks alike, or --binary-masks if there are two classes")
        if len(classes) >= SOFT_VALUES or n_classes > MIN_SPARSE_CLASSES + 2 * len(classes):
            told = f"{len(classes)} values of {n_classes} classes occur in the masks"
            warn(f"{told}: if they have soft edges, save mask > 127 and the like; if there are gaps, number them")
        return {"n_classes": n_classes}


def _common_ending(names: Sequence[str], mask_names: Sequence[str]) -> str:
    """The ending of the names of masks after the names of images, such as _mask. Empty: there is none, or several."""
    known = {*mask_names}
    endings = {name[len(names[0]) :] for name in mask_names if name.startswith(names[0])} if names else {""}
    whole = [ending for ending in endings if all(name + ending in known for name in names)]
    return "" if "" in endings or len(whole) != 1 else whole[0]


class ImageTable(ImageFiles):
    """A CSV with an image file and its labels in each line. Paths are relative to the folder of the CSV.

    columns: the column with the files, then the columns with labels (see `parse_labels`). split_by: the column that
    decides the split (see `Reader`). has_header: see `Table`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Sequence[str] = ("path", "label"),
        split_by: str = "",
        has_header: bool = True,
        **how: Any,
    ):
        if len(columns) < 2:
            raise UserError(f"--columns is {','.join(columns)}; it should be two names or more: PATH,LABEL")
        from fastgpu.convert.tables import Table, parse_labels  # polars is of the extra `convert`

        broken: dict[int, str] = {}
        table = Table(Path(path), has_header=has_header, broken=broken)
        files, *others = (name.strip() for name in columns)
        if has_header and is_image(files):
            raise UserError(f"{path}: its first line has the image {files}; --no-header calls the columns 1, 2, ...")
        paths = table.texts(files).fill_null("").to_list()
        labels, attributes = parse_labels(table, others)
        self.split_by = table.split_column(split_by)
        known = [*filter(None, paths)]
        if n_repeated := len(known) - len({*map(os.path.normpath, known)}):
            print(f"lines of {path} whose image an earlier line names, perhaps for another split: {n_repeated:,}")
        super().__init__(table.path, paths, labels, broken=broken, **how)
        self.attributes |= attributes


class PixelTable(Reader):
    """A CSV of square grey images, with a column for each pixel (MNIST), or one column with all pixels (FER2013).

    label: the column with the labels. Empty: the only column that is neither `pixels` nor split_by, or `label`. See
    `ImageTable` for the other arguments.
    """

    def __init__(self, path: str | Path, *, label: str = "", split_by: str = "", has_header: bool = True):
        from fastgpu.convert.tables import Table, parse_labels

        broken: dict[int, str] = {}
        table = Table(Path(path), has_header=has_header, broken=broken)
        others = [name for name in table.names if name not in ("pixels", split_by)]
        label = label or (others[0] if len(others) == 1 else "label")
        labels, attributes = parse_labels(table, [label])
        columns = [name for name in others if name != label]
        columns = ["pixels"] if "pixels" in table.names else columns
        if not columns:
            raise UserError(f"{path} has no column of pixels beside {label}; `images` reads a CSV of paths and labels")
        self._pixels: Sequence[str] | np.ndarray
        if len(columns) == 1:
            texts = table.texts(columns[0])
            counts = texts.str.count_matches(r"\S+")
            n_pixels = int(counts.mode().max() or 0)  # type: ignore[arg-type]
            cure = f"it should be {n_pixels:,} whole numbers from 0 to 255"
            table.check(texts, (counts == n_pixels) & texts.str.contains(PIXELS), cure)
            self._pixels = texts.to_list()
        else:
            numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in columns]
            if numbers != sorted(numbers):
                raise UserError(
                    f"{path} has columns of pixels in another order than their numbers; sort them by number"
                )
            n_pixels = len(columns)
            bar = tqdm(columns, unit="columns", unit_scale=True, desc=str(path), disable=None)
            self._pixels = np.stack([table.whole_numbers(name, 255).astype(np.uint8) for name in bar], axis=1)
        self._side = isqrt(n_pixels)
        if self._side**2 != n_pixels:
            raise UserError(f"{path} has {n_pixels:,} pixels in a row, which are no square; save arrays (.npy)")
        self.split_by = table.split_column(split_by)
        super().__init__(str(path), len(labels), labels, broken=broken)
        self.attributes |= attributes

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.refuse(row)
        assert self.labels is not None
        pixels = self._pixels[row]
        values = np.array(pixels.split(), np.uint8) if isinstance(pixels, str) else pixels
        return {"images": values.reshape(1, self._side, self._side), "labels": self.labels[row]}


def describe_losses(image: ImageFile.ImageFile) -> list[str]:
    """What an image loses when `decode` reads it, apart from its mode. image: opened, not decoded."""
    losses = []
    # Pillow itself reads 16 bits a color as mode RGB: only the layout of the pixels in the file tells.
    layout = str(image.tile)
    if image.mode.startswith("I") or (";16" in layout and "BGR;16" not in layout):
        losses.append("16 bits to 8 (to keep them: a float32 array of the images, `convert.py arrays`)")
    elif image.has_transparency_data:
        losses.append("without the transparency")
    with suppress(Exception):  # a file with damage after its first frame may raise anything
        if getattr(image, "is_animated", False):
            losses.append("the first of several frames or pages, without the others")
    return losses


def read_mask(path: Path, *, is_binary: bool) -> np.ndarray:
    """The values of a grey image, or the indices of a palette image, uint8 (H, W). Raises ValueError; see `Masks`."""
    with open_regular(path) as file, open_whole(file) as mask:
        ImageOps.exif_transpose(mask, in_place=True)
        values = np.array(mask)
        if mask.format in ("JPEG", "MPO"):
            raise ValueError("its mask is a JPEG file, which changes the values; save masks as PNG")
        if values.ndim != 2 or values.dtype.kind not in "bui" or values.min() < 0 or values.max() > 255:
            raise ValueError(f"its mask has the mode {mask.mode}; allowed are grey values or a palette, 0 to 255")
    if is_binary and values.max() > 1:
        if not np.isin(values, (0, 255)).all():
            raise ValueError("its mask has other values than 0 and 255, which --binary-masks allows alone")
        values = values // 255
    return values.astype(np.uint8)


def turn_upright(values_HW: np.ndarray, orientation: int) -> np.ndarray:
    """Turn stored pixels by an EXIF orientation."""
    image = Image.fromarray(values_HW)
    image.getexif()[EXIF_ORIENTATION] = orientation
    return np.array(ImageOps.exif_transpose(image))


def read_file(path: Path) -> bytes:
    """The content of a file. Raises ValueError for a FIFO."""
    with open_regular(path) as file:
        return file.read()


def keep(image: UprightImage, side: int | None = None) -> np.ndarray:
    """`image.data`, or the bytes of a smaller JPEG file if its shorter side is longer than `side`: (bytes,) uint8.

    Files that are not upright RGB or grey are re-encoded as JPEG or PNG. Raises any exception if one is damaged.
    """
    whole = Box(0, 0, image.height, image.width)
    scale = min(1, side / min(image.height, image.width)) if side else 1
    is_upright_rgb = image.header.mode in ("RGB", "L") and image.orientation == 1
    if scale == 1 and is_upright_rgb and image.data[0] in CODECS:
        image.decode(whole, (1, 1))  # all of the file is decoded even for one pixel, so damage shows
        return image.data
    pixels_CHW = image.decode(whole, (round(image.height * scale), round(image.width * scale)))
    kind = "JPEG" if scale < 1 or image.header.format in ("JPEG", "MPO") else "PNG"
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))).save(file, kind, quality=JPEG_QUALITY)
    return np.frombuffer(file.getvalue(), np.uint8)
