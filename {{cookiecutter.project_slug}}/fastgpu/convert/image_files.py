"""Image files as rows of one shape: decoded once by Pillow and resized by torch, in the readers' threads.

Whatever Pillow opens becomes RGB, upright as its EXIF orientation says: grey, palette, CMYK and 16-bit images too; an
alpha channel is dropped.
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

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.field import Field

Resize = Literal["shorter", "exact", "pad"]
OnError = Literal["stop", "skip"]
ORIENTATION, LYING = 0x0112, 5  # EXIF: orientations from here on are stored on their side
KEEP = "keep"  # field of a source that may skip rows: whether a row is one
SKIPPED_SHARE = 0.01  # more than so many broken images, and the data is not what it should be


class Shape(NamedTuple):
    """How an image becomes (height, width) pixels.

    size: (height, width), or None for images that are of one size already. resize: `shorter` covers the size and takes
    the centre, `exact` stretches, `pad` fits inside and fills up with black. crop: (height, width) of the centre, taken
    before.
    """

    size: tuple[int, int] | None = None
    resize: Resize = "shorter"
    crop: tuple[int, int] | None = None


class Listing(NamedTuple):
    """Files, their labels and where each is named: `photos.csv:7`, or nothing."""

    names: list[str]
    labels: np.ndarray
    lines: list[int] | None
    attributes: dict[str, Any]


class ImageFiles(Source):
    """Rows `images`, uint8 (N, 3, H, W), and `labels`; a block is one file.

    open_file: name -> its bytes, from any thread. on_error: `stop` raises UserError for the first image that cannot be
    decoded, with its name; `skip` notes it in `failed` ({row: why}) and gives a row whose field `keep` is False.
    """

    def __init__(
        self, name: str, listing: Listing, open_file: Callable[[str], IO[bytes]], shape: Shape, on_error: OnError
    ):
        if not listing.names:
            raise UserError(f"{name} has no images")
        self.name, self.attributes = name, listing.attributes
        self._listing, self._open, self._shape, self._on_error = listing, open_file, shape, on_error
        self.failed: dict[int, str] = {}
        self._size = shape.size or self._size_of_first()
        labels = listing.labels
        self.fields = {
            "images": Field(np.dtype(np.uint8), (3, *self._size)),
            "labels": Field(labels.dtype, labels.shape[1:]),
        }
        if on_error == "skip":
            self.fields[KEEP] = Field(np.dtype(bool), ())
        self.block_rows = np.ones(len(listing.names), np.int32)

    def __len__(self) -> int:
        return len(self._listing.names)

    def column(self, name: str) -> np.ndarray:
        """The labels; raises KeyError for what must be decoded."""
        return {"labels": self._listing.labels}[name]

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, np.ndarray]) -> None:
        """Images -> out[field][places]. Thread-safe. Raises UserError, see `on_error`."""
        for row, _, (place,) in reads:
            out["labels"][place] = self._listing.labels[row]
            try:
                out["images"][place] = self._decode(row)
            except UserError as error:
                if self._on_error == "stop":
                    raise UserError(f"{error}; --on-error skip leaves such images out") from None
                self.failed[row] = str(error)
                out["images"][place] = 0
                if len(self.failed) > max(1, SKIPPED_SHARE * len(self)):
                    raise UserError(
                        f"{len(self.failed)} of {len(self):,} images are broken, more than 1 %; the last: {error}"
                    ) from None
            if self._on_error == "skip":
                out[KEEP][place] = row not in self.failed

    def _decode(self, row: int) -> np.ndarray:
        name = self._listing.names[row]
        where = f"{self.name}:{self._listing.lines[row]}: {name}" if self._listing.lines else f"{self.name}: {name}"
        try:
            with self._open(name) as file:
                pixels = decode(file, self._shape)
        except FileNotFoundError:
            raise UserError(f"{where} is not there") from None
        except UnidentifiedImageError:
            raise UserError(f"{where} is no image that Pillow knows") from None
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise UserError(f"{where} cannot be decoded: {error}") from None
        if pixels.shape[1:] != self._size:
            raise UserError(
                f"{where} has {_say(pixels.shape[1:])} pixels, the first image {_say(self._size)}; give --size"
            )
        return pixels

    def _size_of_first(self) -> tuple[int, int]:
        """Of the first image that is one."""
        self._size = (0, 0)
        reasons = []
        for name in self._listing.names[:100]:
            try:
                with self._open(name) as file:
                    return decode(file, self._shape).shape[1:]
            except Exception as error:
                reasons.append(f"{name}: {error}")
                if self._on_error == "stop":
                    break
        raise UserError(f"{self.name}: {reasons[0]}")


def decode(file: IO[bytes], shape: Shape) -> np.ndarray:
    """An image file -> uint8 (3, H, W)."""
    with Image.open(file) as opened:
        image: Image.Image = opened
        if shape.size and not shape.crop:  # a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where twice `size` is left
            height, width = shape.size
            side = (height, width) if opened.getexif().get(ORIENTATION, 1) >= LYING else (width, height)
            opened.draft("RGB", (2 * side[0], 2 * side[1]))
        ImageOps.exif_transpose(opened, in_place=True)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("its pixels are floats")
        if image.mode != "RGB":
            image = image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")
        if shape.crop:
            height, width = shape.crop
            left, top = (image.width - width) // 2, (image.height - height) // 2
            if min(left, top) < 0:
                raise ValueError(f"it is {_say((image.height, image.width))}, smaller than --crop {_say(shape.crop)}")
            image = image.crop((left, top, left + width, top + height))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return _fit(pixels.view(image.height, image.width, 3).permute(2, 0, 1), shape).contiguous().numpy()


def _fit(image_CHW: Tensor, shape: Shape) -> Tensor:
    """torch's kernel for bytes gives Pillow's own values, to one level, in a fifth of the time."""
    _, height, width = image_CHW.shape
    size = shape.size or (height, width)
    if size == (height, width):
        return image_CHW
    if shape.resize == "shorter":  # the largest part of the picture that has the aspect of `size`
        rows = max(1, min(height, round(width * size[0] / size[1])))
        columns = max(1, min(width, round(height * size[1] / size[0])))
        top, left = (height - rows) // 2, (width - columns) // 2
        image_CHW = image_CHW[:, top : top + rows, left : left + columns]
    elif shape.resize == "pad":
        scale = min(size[0] / height, size[1] / width)
        inner = max(1, round(height * scale)), max(1, round(width * scale))
        top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
        padded_CHW = torch.zeros((3, *size), dtype=torch.uint8)
        padded_CHW[:, top : top + inner[0], left : left + inner[1]] = _resize(image_CHW, inner)
        return padded_CHW
    return _resize(image_CHW, size)


def _resize(image_CHW: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(image_CHW[None], size, mode="bilinear", antialias=True)[0]


def _say(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


# ---------------------------------------------------------------------------------------------- which files


def list_folder(folder: Path) -> Listing:
    """One sub-folder a class, images at any depth in it. `attributes` has the class names, and how many files were left
    out because their names are not those of images."""
    names, labels, strangers = [], list[int](), 0
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise UserError(f"{folder} has no sub-folders, one for each class; a CSV of path,label names files elsewhere")
    suffixes = set(Image.registered_extensions())
    for label, name in enumerate(classes):
        for parent, folders, files in os.walk(folder / name, followlinks=True):
            folders.sort()
            for file in sorted(files):
                if Path(file).suffix.lower() not in suffixes or file.startswith("."):
                    strangers += 1
                    continue
                names.append(os.path.relpath(Path(parent) / file, folder))
                labels.append(label)
    if strangers:
        print(f"{strangers:,} files of {folder} are left out: by their names they are no images")
    return Listing(names, np.array(labels, np.int64), None, {"class_names": classes})


def list_csv(path: Path, columns: Sequence[str], classes: int | None) -> Listing:
    """A file and its label a line. Labels are whole numbers from 0 on, or else names, numbered in alphabetical order.

    columns: names of the column of paths and that of labels. classes: how many there are, if numbers may be missing.
    Raises UserError with the line of a label out of range.
    """
    names, words, lines = [], list[str](), list[int]()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or [])]:
                raise UserError(
                    f"{path} has no column {missing[0]}; it has {', '.join(reader.fieldnames or ['none'])}"
                    "; name the two with --columns PATH,LABEL"
                )
            for entry in reader:
                name, word = entry[columns[0]], entry[columns[1]]
                if not name or word is None or not word.strip():
                    raise UserError(f"{path}:{reader.line_num}: a path or a label is missing")
                names.append(name)
                words.append(word.strip())
                lines.append(reader.line_num)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist (looked in {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None
    if not all(word.lstrip("-").isdecimal() for word in words):
        class_names, labels = np.unique(words, return_inverse=True)
        if classes and len(class_names) > classes:
            raise UserError(f"{path} names {len(class_names)} classes, --classes {classes}")
        return Listing(names, labels.astype(np.int64), lines, {"class_names": class_names.tolist()})
    labels = np.array([int(word) for word in words], np.int64)
    limit = classes or int(labels.max(initial=0)) + 1
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= limit))):
        raise UserError(
            f"{path}:{lines[wrong[0]]}: label {labels[wrong[0]]} is out of range; allowed are 0 to {limit - 1}"
        )
    return Listing(names, labels, lines, {"class_names": [str(number) for number in range(limit)]})


def split(listing: Listing, share: float, seed: int) -> tuple[Listing, Listing]:
    """`share` of the files of each class, drawn at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(listing.labels))
    order = order[np.argsort(listing.labels[order], kind="stable")]
    _, counts = np.unique(listing.labels, return_counts=True)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_main = place < np.round(np.repeat(counts, counts) * share)
    return choose(listing, np.sort(order[is_main])), choose(listing, np.sort(order[~is_main]))


def choose(listing: Listing, rows: np.ndarray) -> Listing:
    """Those rows."""
    lines = [listing.lines[row] for row in rows] if listing.lines else None
    return Listing([listing.names[row] for row in rows], listing.labels[rows], lines, listing.attributes)
