"""Image files as rows of one shape: decoded once by Pillow and resized by torch, in the reader threads.

Whatever Pillow opens becomes RGB and upright, as its EXIF orientation says: grey, palette, CMYK and 16-bit images, too.
An alpha channel is dropped.

Shapes: C channels, H and W pixels.
"""

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fastgpu.convert.reading import MAX_SKIPPED_SHARE, OnError, SkippingSource
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead
from fastgpu.rows.field import Field
from fastgpu.storage.file import not_found

Resize = Literal["shorter", "exact", "pad"]
OpenFile = Callable[[str], IO[bytes]]
"""Opens an image by its name. Any thread may call it."""
EXIF_ORIENTATION = 0x0112
EXIF_ON_ITS_SIDE = 5
"""From this EXIF orientation on, images are stored on their side."""
PROBED_FILES = 100
"""Files that are tried at most to find the size of the images."""


class Shape(NamedTuple):
    """How an image becomes (height, width) pixels."""

    size: tuple[int, int] | None = None
    """(height, width). None: the images have one size already."""
    resize: Resize = "shorter"
    """shorter: cover the size and take the centre. exact: stretch. pad: fit inside and fill up with black."""
    crop: tuple[int, int] | None = None
    """(height, width) of the centre to take before."""


class Listing(NamedTuple):
    """Image files and their labels."""

    names: list[str]
    labels: np.ndarray
    """(files,) or (files, number of attributes)"""
    lines: list[int] | None
    """The line of the CSV that names each file; None if there is no CSV."""
    attributes: dict[str, Any]

    def choose(self, rows: np.ndarray) -> "Listing":
        """The files at these places of the list."""
        names = [self.names[row] for row in rows]
        lines = None
        if self.lines is not None:
            lines = [self.lines[row] for row in rows]
        return Listing(names, self.labels[rows], lines, self.attributes)


# ---------------------------------------------------------------------------------------------- which files


def list_folder(folder: Path) -> Listing:
    """Images at any depth in the sub-folders of `folder`, one for each class. `attributes` has the class names.

    Files that are not images by their names are left out, and their number is printed.
    """
    entries = [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    classes = sorted(entry.name for entry in entries)
    if not classes:
        raise UserError(
            f"{folder} has no sub-folders, one for each class; if the files lie elsewhere, list them in a CSV of "
            "path,label"
        )
    suffixes = set(Image.registered_extensions())
    names = []
    labels = []
    n_ignored = 0
    for label, class_name in enumerate(classes):
        for parent, folders, files in os.walk(folder / class_name, followlinks=True):
            folders.sort()
            for file in sorted(files):
                if file.startswith(".") or Path(file).suffix.lower() not in suffixes:
                    n_ignored += 1
                    continue
                names.append(os.path.relpath(Path(parent) / file, folder))
                labels.append(label)
    if n_ignored:
        print(f"{n_ignored:,} files of {folder} are left out: by their names they are not images")
    return Listing(names, np.array(labels, np.int64), None, {"class_names": classes})


def list_csv(path: Path, columns: Sequence[str], n_classes: int | None) -> Listing:
    """A CSV with a file and its label in each line.

    Labels are whole numbers from 0 on, or else names, which are numbered in alphabetical order. columns: names of the
    two columns. n_classes: number of classes, if some of the numbers do not occur. Raises UserError with the line if a
    label is missing or out of range.
    """
    if len(columns) != 2:
        raise UserError(f"--columns is {','.join(columns)}; it should be two names: PATH,LABEL")
    entries = _read_csv(path, columns)
    names = [name for _, name, _ in entries]
    words = [word for _, _, word in entries]
    lines = [line for line, _, _ in entries]
    if not all(word.lstrip("-").isdecimal() for word in words):
        class_names, labels = np.unique(words, return_inverse=True)
        if n_classes and len(class_names) > n_classes:
            raise UserError(f"--classes is {n_classes}, but {path} names {len(class_names)} classes")
        return Listing(names, labels.astype(np.int64), lines, {"class_names": class_names.tolist()})
    labels = np.array([int(word) for word in words], np.int64)
    n_classes = n_classes or int(labels.max(initial=0)) + 1
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        row = wrong[0]
        raise UserError(f"{path}:{lines[row]}: label {labels[row]} is out of range; allowed are 0 to {n_classes - 1}")
    return Listing(names, labels, lines, {"class_names": [str(number) for number in range(n_classes)]})


def _read_csv(path: Path, columns: Sequence[str]) -> list[tuple[int, str, str]]:
    """(line, path, label) of each entry."""
    path_column, label_column = columns
    entries = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            present = reader.fieldnames or []
            missing = [name for name in columns if name not in present]
            if missing:
                raise UserError(
                    f"{path} has no column {missing[0]}; it has {', '.join(present) or 'none'}; name the two with "
                    "--columns PATH,LABEL"
                )
            for entry in reader:
                name = entry[path_column]
                label = (entry[label_column] or "").strip()
                if not name or not label:
                    raise UserError(f"{path}:{reader.line_num}: a path or a label is missing")
                entries.append((reader.line_num, name, label))
    except FileNotFoundError:
        raise not_found(path) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    return entries


def split_listing(listing: Listing, share: float, seed: int) -> tuple[Listing, Listing]:
    """`share` of the files of each class, drawn at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(listing.labels))
    order = order[np.argsort(listing.labels[order], kind="stable")]
    _, counts = np.unique(listing.labels, return_counts=True)
    class_starts = np.cumsum(counts) - counts
    place_in_class = np.arange(len(order)) - np.repeat(class_starts, counts)
    is_first = place_in_class < np.round(np.repeat(counts, counts) * share)
    return listing.choose(np.sort(order[is_first])), listing.choose(np.sort(order[~is_first]))


# ---------------------------------------------------------------------------------------------- rows


class ImageFiles(SkippingSource):
    """Rows `images`, uint8 (N, 3, H, W), and `labels`; each file is a block.

    on_error: `stop` raises UserError with the name of the first image that cannot be decoded. `skip` adds it to
    `failed`, and raises UserError if more than 1 % are broken.
    """

    def __init__(self, name: str, listing: Listing, open_file: OpenFile, *, shape: Shape, on_error: OnError):
        if not listing.names:
            raise UserError(f"{name} has no images")
        self.name = name
        self.attributes = listing.attributes
        self.failed = {}
        self._listing = listing
        self._open = open_file
        self._shape = shape
        self._on_error = on_error
        self._size = shape.size or self._find_size()
        self.fields = {
            "images": Field(np.dtype(np.uint8), (3, *self._size)),
            "labels": Field(listing.labels.dtype, listing.labels.shape[1:]),
        }
        self.block_rows = np.ones(len(listing.names), np.int32)

    def __len__(self) -> int:
        return len(self._listing.names)

    def column(self, name: str) -> np.ndarray:
        """The labels of all rows. Raises KeyError for the images."""
        return {"labels": self._listing.labels}[name]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, np.ndarray]) -> None:
        """Decode images to their places. Thread-safe. Raises UserError, see `on_error`."""
        for row, _, (place,) in reads:
            out["labels"][place] = self._listing.labels[row]
            try:
                out["images"][place] = self._decode(row)
            except UserError as error:
                if self._on_error == "stop":
                    raise UserError(f"{error}; --on-error skip leaves such images out") from None
                self.failed[row] = str(error)
                if len(self.failed) > max(1, MAX_SKIPPED_SHARE * len(self)):
                    raise UserError(
                        f"{len(self.failed)} of {len(self):,} images are broken, more than 1 %; the last: {error}"
                    ) from None

    def _decode(self, row: int) -> np.ndarray:
        name = self._listing.names[row]
        label = f"{self.name}: {name}"
        if self._listing.lines is not None:
            label = f"{self.name}:{self._listing.lines[row]}: {name}"
        try:
            with self._open(name) as file:
                pixels_CHW = decode(file, self._shape)
        except FileNotFoundError:
            raise UserError(f"{label} does not exist") from None
        except UnidentifiedImageError:
            raise UserError(f"{label} is not an image that Pillow knows") from None
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise UserError(f"{label} cannot be decoded: {error}") from None
        if pixels_CHW.shape[1:] != self._size:
            own_size = _format_size(pixels_CHW.shape[1:])
            raise UserError(
                f"{label} has {own_size} pixels, but the first image has {_format_size(self._size)}; give --size"
            )
        return pixels_CHW

    def _find_size(self) -> tuple[int, int]:
        """The size of the first image that can be decoded."""
        reasons = []
        for name in self._listing.names[:PROBED_FILES]:
            try:
                with self._open(name) as file:
                    _, height, width = decode(file, self._shape).shape
                    return height, width
            except Exception as error:  # a decoder may raise anything for damaged bytes
                reasons.append(f"{name}: {error}")
                if self._on_error == "stop":
                    break
        raise UserError(f"{self.name}: {reasons[0]}")


# ---------------------------------------------------------------------------------------------- one image


def decode(file: IO[bytes], shape: Shape) -> np.ndarray:
    """An image file -> uint8 (3, H, W)."""
    with Image.open(file) as opened:
        image: Image.Image = opened
        if shape.size and not shape.crop:
            _decode_small(opened, shape.size)
        ImageOps.exif_transpose(opened, in_place=True)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("its pixels are floats")
        if image.mode != "RGB":
            image = image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")
        if shape.crop:
            image = _crop_centre(image, shape.crop)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        image_CHW = pixels.view(image.height, image.width, 3).permute(2, 0, 1)
        return _fit(image_CHW, shape).contiguous().numpy()


def _decode_small(image: Image.Image, size: tuple[int, int]) -> None:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 of its size, but not below twice the size that is needed."""
    height, width = size
    if image.getexif().get(EXIF_ORIENTATION, 1) >= EXIF_ON_ITS_SIDE:
        image.draft("RGB", (2 * height, 2 * width))
    else:
        image.draft("RGB", (2 * width, 2 * height))


def _crop_centre(image: Image.Image, crop: tuple[int, int]) -> Image.Image:
    height, width = crop
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    if min(left, top) < 0:
        own_size = _format_size((image.height, image.width))
        raise ValueError(f"it is {own_size}, smaller than --crop {_format_size(crop)}")
    return image.crop((left, top, left + width, top + height))


def _fit(image_CHW: Tensor, shape: Shape) -> Tensor:
    _, height, width = image_CHW.shape
    size = shape.size or (height, width)
    if size == (height, width):
        return image_CHW
    if shape.resize == "shorter":  # the largest part of the image that has the aspect ratio of `size`
        rows = max(1, min(height, round(width * size[0] / size[1])))
        columns = max(1, min(width, round(height * size[1] / size[0])))
        top = (height - rows) // 2
        left = (width - columns) // 2
        return _resize(image_CHW[:, top : top + rows, left : left + columns], size)
    if shape.resize == "pad":
        scale = min(size[0] / height, size[1] / width)
        rows = max(1, round(height * scale))
        columns = max(1, round(width * scale))
        top = (size[0] - rows) // 2
        left = (size[1] - columns) // 2
        padded_CHW = torch.zeros((3, *size), dtype=torch.uint8)
        padded_CHW[:, top : top + rows, left : left + columns] = _resize(image_CHW, (rows, columns))
        return padded_CHW
    return _resize(image_CHW, size)


def _resize(image_CHW: Tensor, size: tuple[int, int]) -> Tensor:
    """torch's kernel for bytes gives Pillow's values, up to one level, in a fifth of the time."""
    return F.interpolate(image_CHW[None], size, mode="bilinear", antialias=True)[0]


def _format_size(size: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in size)
