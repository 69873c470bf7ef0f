"""Image files as rows of one shape: lists of files with their labels, decoded in the reader threads."""

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fastgpu.convert.reading import MAX_SKIPPED_SHARE, OnError, SkippingSource, explain_errors
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead
from fastgpu.rows.field import Field
from fastgpu.storage.images import Preprocessing, decode, format_size

OpenFile = Callable[[str], IO[bytes]]
"""Opens an image by its name. Any thread may call it."""
PROBED_FILES = 100
"""Files that are tried at most to find the size of the images."""


class Listing(NamedTuple):
    """Image files and their labels."""

    names: Sequence[str]
    labels: np.ndarray
    """(files,) or (files, number of attributes)"""
    attributes: dict[str, Any]
    lines: Sequence[int] = ()
    """The line of the CSV that names each file; empty if there is no CSV."""

    def choose(self, rows: np.ndarray) -> "Listing":
        """The files at these places of the list."""
        lines = [self.lines[row] for row in rows] if self.lines else ()
        return Listing([self.names[row] for row in rows], self.labels[rows], self.attributes, lines)


# ---------------------------------------------------------------------------------------------- which files


def list_folder(folder: Path) -> Listing:
    """Images at any depth in the sub-folders of `folder`, one for each class. `attributes` has the class names.

    Files that are not images by their names are left out, and their number is printed.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
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
    return Listing(names, np.array(labels, np.int64), {"class_names": classes})


def list_csv(path: Path, columns: Sequence[str], n_classes: int | None) -> Listing:
    """A CSV with a file and its label in each line.

    Labels are whole numbers from 0 on, or else names, which are numbered in alphabetical order. columns: names of the
    two columns. n_classes: number of classes, if some of the numbers do not occur. Raises UserError with the line if a
    label is missing or out of range.
    """
    if len(columns) != 2:
        raise UserError(f"--columns is {','.join(columns)}; it should be two names: PATH,LABEL")
    names = []
    words = []
    lines = []
    with explain_errors(path, "a CSV file of UTF-8 text"), path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        present = reader.fieldnames or []
        missing = [name for name in columns if name not in present]
        if missing:
            raise UserError(
                f"{path} has no column {missing[0]}; it has {', '.join(present) or 'none'}; name the two with "
                "--columns PATH,LABEL"
            )
        for entry in reader:
            name, word = (entry[column] for column in columns)
            if not name or not word or not word.strip():
                raise UserError(f"{path}:{reader.line_num}: a path or a label is missing")
            names.append(name)
            words.append(word.strip())
            lines.append(reader.line_num)
    if not all(word.lstrip("-").isdecimal() for word in words):
        classes, labels = np.unique(words, return_inverse=True)
        if n_classes and len(classes) > n_classes:
            raise UserError(f"--classes is {n_classes}, but {path} names {len(classes)} classes")
        return Listing(names, labels.astype(np.int64), {"class_names": classes.tolist()}, lines)
    labels = np.array([int(word) for word in words], np.int64)
    n_classes = n_classes or int(labels.max(initial=0)) + 1
    for line, label in zip(lines, labels.tolist(), strict=True):
        if not 0 <= label < n_classes:
            raise UserError(f"{path}:{line}: label {label} is out of range; allowed are 0 to {n_classes - 1}")
    return Listing(names, labels, {"class_names": [str(number) for number in range(n_classes)]}, lines)


def split_listing(listing: Listing, share: float, seed: int) -> tuple[Listing, Listing]:
    """`share` of the files of each class, drawn at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(listing.labels))
    order = order[np.argsort(listing.labels[order], kind="stable")]
    _, counts = np.unique(listing.labels, return_counts=True)
    is_first = np.zeros(len(order), bool)
    for files in np.split(order, np.cumsum(counts)[:-1]):
        is_first[files[: round(len(files) * share)]] = True
    return listing.choose(np.flatnonzero(is_first)), listing.choose(np.flatnonzero(~is_first))


# ---------------------------------------------------------------------------------------------- rows


class ImageFiles(SkippingSource):
    """Rows `images`, uint8 (N, 3, H, W), and `labels`; each file is a block.

    on_error: `stop` raises UserError with the name of the first image that cannot be decoded. `skip` adds it to
    `failed`, and raises UserError if more than 1 % are broken.
    """

    def __init__(
        self, name: str, listing: Listing, open_file: OpenFile, *, preprocessing: Preprocessing, on_error: OnError
    ):
        if not listing.names:
            raise UserError(f"{name} has no images")
        self.name = name
        self.attributes = listing.attributes
        self.failed = {}
        self._listing = listing
        self._open = open_file
        self._preprocessing = preprocessing
        self._on_error = on_error
        self._size = preprocessing.size or self._find_size()
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
                image_CHW = self._decode(row)
                if image_CHW.shape[1:] != self._size:
                    size = format_size(image_CHW.shape[1:])
                    raise UserError(
                        f"{self._where(row)} has {size} pixels, but the first image has {format_size(self._size)}; "
                        "give --size"
                    )
                out["images"][place] = image_CHW
            except UserError as error:
                if self._on_error == "stop":
                    raise UserError(f"{error}; --on-error skip leaves such images out") from None
                self.failed[row] = str(error)
                if len(self.failed) > max(1, MAX_SKIPPED_SHARE * len(self)):
                    raise UserError(
                        f"{len(self.failed)} of {len(self):,} images are broken, more than 1 %; the last: {error}"
                    ) from None

    def _where(self, row: int) -> str:
        line = f":{self._listing.lines[row]}" if self._listing.lines else ""
        return f"{self.name}{line}: {self._listing.names[row]}"

    def _decode(self, row: int) -> np.ndarray:
        try:
            with self._open(self._listing.names[row]) as file:
                return decode(file, self._preprocessing)
        except FileNotFoundError:
            raise UserError(f"{self._where(row)} does not exist") from None
        except UnidentifiedImageError:
            raise UserError(f"{self._where(row)} is not an image that Pillow knows") from None
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise UserError(f"{self._where(row)} cannot be decoded: {error}") from None

    def _find_size(self) -> tuple[int, int]:
        """The size of the first image that can be decoded."""
        n_probed = 1 if self._on_error == "stop" else PROBED_FILES
        errors = []
        for row in range(min(n_probed, len(self))):
            try:
                _, height, width = self._decode(row).shape
                return height, width
            except UserError as error:
                errors.append(error)
        raise errors[0]
