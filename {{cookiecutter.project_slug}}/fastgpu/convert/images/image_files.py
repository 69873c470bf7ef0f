"""Image files as rows of one shape: lists of files with their labels or masks, decoded in the reader threads."""

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fastgpu.convert.images.masks import decode_pair
from fastgpu.convert.reading import (
    SPLIT_OF_WORD,
    BrokenRowError,
    DecodedRows,
    OnError,
    draw_split,
    group_splits,
    list_first,
)
from fastgpu.images.decode import EncodedImage
from fastgpu.images.files import (
    EXIF_ORIENTATION,
    IGNORED_CLASS,
    SIXTEEN_BITS,
    Preprocessing,
    decode,
    describe_changes,
    format_size,
    is_image,
    open_file,
    open_image,
)
from fastgpu.images.parts import Box
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import CODECS, Field

PROBED_FILES = 100
"""Files that are tried at most to find the size of the images."""
PROBED_SIZES = 32
"""Files that are looked at to estimate the bytes of encoded rows."""
DARK = 4096 >> 8
"""Images of 16 bits are below this, once they have 8, if they only use values of 12 bits."""
TWELVE_BITS = "values below 4096 (12 bits?) to 0 to 15, nearly black (scale them, save .npy, `convert.py arrays`)"


class Listing(NamedTuple):
    """Image files and what belongs to them."""

    source: str
    """The folder or CSV, for messages."""
    names: Sequence[str]
    labels: np.ndarray | None
    """(files,) or (files, K); None if there are masks."""
    attributes: dict[str, Any]
    lines: Sequence[int] = ()
    """The line of the CSV that names each file; empty if there is no CSV."""
    masks: Sequence[Path] = ()
    """The mask of each file."""
    is_binary: bool = False
    """Whether the masks hold 0 and 255, which is class 1."""
    splits: Mapping[str, np.ndarray] = MappingProxyType({})
    """{split: row numbers}, if the source says it."""
    root: Path = Path()
    """The folder that names start from."""

    def where(self, row: int) -> str:
        """The place of a file in the folder or CSV, for messages."""
        line = f":{self.lines[row]}" if self.lines else ""
        return f"{self.source}{line}: {self.names[row]}"

    def choose(self, rows: np.ndarray) -> "Listing":
        """The files at these places of the list."""

        def take(values: Sequence[Any]) -> Sequence[Any]:
            return [values[row] for row in rows] if values else ()

        labels = None if self.labels is None else self.labels[rows]
        chosen = self._replace(names=take(self.names), lines=take(self.lines), masks=take(self.masks))
        return chosen._replace(labels=labels, splits={})

    def parts(self, shares: Sequence[float] | None = None, seed: int = 0) -> dict[str, "Listing"]:
        """{split: its files}, or {"": all files}. All have the same dict of attributes.

        shares: of a split that is drawn at random. Raises UserError if the source says the split already.
        """
        splits = self.splits
        if shares and splits:
            raise UserError(f"--split is given, but {self.source} is split into {', '.join(splits)}; drop one")
        if shares:
            splits = draw_split(np.zeros(len(self.names)) if self.labels is None else self.labels, shares, seed)
        return {name: self.choose(rows) for name, rows in splits.items()} or {"": self}


# ---------------------------------------------------------------------------------------------- which files


def list_folder(folder: Path) -> Listing:
    """Images at any depth in the sub-folders of `folder`, one for each class. `attributes` has the class names.

    If all sub-folders have names of splits (train, val, ...), their sub-folders are the classes. Files that are left
    out are counted and printed, and so are folders without images.
    """
    folders = _list_sub_folders(folder)
    is_split = all(name.lower() in SPLIT_OF_WORD for name in folders)
    if is_split:
        folders = [f"{split}/{name}" for split in folders for name in _list_sub_folders(folder / split)]
    names: list[str] = []
    linked: set[str] = set()
    for name in folders:
        images = list_images(folder, name, linked)
        if not images:
            print(f"{folder / name} has no images and is not a class")
        names += images
    class_of = [name.split("/")[1 if is_split else 0] for name in names]
    classes, labels = np.unique(class_of, return_inverse=True)
    splits = {}
    if is_split:
        splits = group_splits(folder, [name.split("/")[0] for name in names], range(len(names)))
    return Listing(str(folder), names, labels.astype(np.int64), {"class_names": classes.tolist()}, splits=splits)


def _list_sub_folders(folder: Path) -> list[str]:
    """Names of sub-folders, sorted. Prints the images that lie beside them."""
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        cure = "if the files lie elsewhere, list them in a CSV of path,label"
        raise UserError(f"{folder} has no sub-folders, one for each class; {cure}")
    if loose := sorted(path.name for path in folder.iterdir() if path.is_file() and is_image(path.name)):
        print(f"images beside the class folders of {folder}, which are left out: {len(loose):,} ({list_first(loose)})")
    return folders


def list_images(root: Path, folder: str = "", linked: set[str] | None = None) -> list[str]:
    """Paths, relative to `root`, of the image files at any depth in root/folder, in the order of their names.

    Links to folders are followed, but not back into `root`, and not twice to one folder. linked: where links have led
    so far; the call adds to it. Prints what is left out. Raises UserError if a folder cannot be read.
    """
    top = os.path.realpath(root)
    linked = set() if linked is None else linked
    images: list[str] = []
    left_out: list[str] = []
    n_others = 0
    start = Path(root, folder)
    folders = [start]
    while folders:
        path = folders.pop()
        if path.is_symlink() and path != root:
            target = os.path.realpath(path)
            if target in linked or os.path.commonpath([top, target]) == top:
                left_out.append(str(path))
                continue
            linked.add(target)
        try:
            inside = sorted(path.iterdir())
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        names = [os.path.relpath(each, root) for each in inside if not each.is_dir()]
        images += [name for name in names if is_image(Path(name).name)]
        n_others += sum(not is_image(Path(name).name) for name in names)
        folders += reversed([each for each in inside if each.is_dir()])
    if n_others:
        print(f"files of {start} that are left out, because by their names they are not images: {n_others:,}")
    if left_out:
        print(f"links to folders that are read without them, which are left out: {', '.join(left_out)}")
    return images


def list_pairs(folder: Path, mask_folder: Path, on_error: OnError, *, is_binary: bool = False) -> Listing:
    """Images at any depth in `folder`, and for each the mask of the same name (without the suffix) in `mask_folder`.

    Names are compared with their sub-folders only if they are not unique without. Raises UserError with the images that
    have no mask, or with on_error="skip" prints them; masks without an image are printed. is_binary: the masks hold 0
    and 255, which is class 1.
    """
    for path in (folder, mask_folder):
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; --masks is for a folder of images and one of masks")
    images = list_images(folder)
    masks = list_images(mask_folder)

    def key(name: str) -> str:
        return Path(name).stem if has_unique_stems else str(Path(name).with_suffix(""))

    has_unique_stems = all(len({Path(name).stem for name in names}) == len(names) for names in (images, masks))
    mask_of = {key(name): name for name in masks}
    if len({key(name) for name in images}) < len(images) or len(mask_of) < len(masks):
        raise UserError(f"{folder} or {mask_folder} has files that differ in their suffixes alone; remove one of each")
    if lonely := [name for name in images if key(name) not in mask_of]:
        text = f"{len(lonely):,} of {len(images):,} images have no mask in {mask_folder}: {list_first(lonely)}"
        if on_error == "stop" or len(lonely) == len(images):
            raise UserError(f"{text}; --on-error skip leaves them out")
        print(f"{text}; they are left out")
    names = [name for name in images if key(name) in mask_of]
    used_masks = [mask_of[key(name)] for name in names]
    if unused := sorted(set(masks) - set(used_masks)):
        print(f"masks without an image in {folder}, which are left out: {len(unused):,} ({list_first(unused)})")
    return Listing(str(folder), names, None, {}, masks=[mask_folder / name for name in used_masks], is_binary=is_binary)


# ---------------------------------------------------------------------------------------------- rows


class Kept(NamedTuple):
    """How image files become encoded rows."""

    side: int | None = None
    """Images whose shorter side is longer become so small. None: all stay as they are."""
    quality: int = 92
    """Of the JPEG files that smaller images become."""


def keep(data: bytes, kept: Kept) -> bytes:
    """The bytes of an image file as they are, or of a smaller JPEG file.

    Files that are not upright, or of other colors than RGB and grey, are written anew: JPEG files as such, others as
    PNG. Raises an exception of any kind if the file is damaged.
    """
    image = EncodedImage(np.frombuffer(data, np.uint8))
    height, width = image.height, image.width
    whole = Box(0, 0, height, width)
    if kept.side and min(height, width) > kept.side:
        scale = kept.side / min(height, width)
        smaller_CHW = image.decode(whole, (round(height * scale), round(width * scale)))
        return _save(smaller_CHW, "JPEG", quality=kept.quality)
    with open_image(io.BytesIO(data)) as opened:
        is_jpeg = opened.format in ("JPEG", "MPO")
        is_upright_rgb = opened.mode in ("RGB", "L") and opened.getexif().get(EXIF_ORIENTATION, 1) == 1
    if not is_upright_rgb or data[0] not in CODECS:
        pixels_CHW = image.decode(whole, (height, width))
        return _save(pixels_CHW, "JPEG", quality=kept.quality) if is_jpeg else _save(pixels_CHW, "PNG")
    image.decode(whole, (1, 1))  # in full, as far as damage goes
    return data


def _save(image_CHW: np.ndarray, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image_CHW.transpose(1, 2, 0))).save(file, kind, **options)
    return file.getvalue()


def open_images(
    parts: Mapping[str, Listing], preprocessing: Preprocessing | Kept, on_error: OnError
) -> Mapping[str, DecodedRows]:
    """The rows of each split. All have the size of the first image that can be decoded, if --size is not given; or any
    size, if they are kept encoded."""
    if isinstance(preprocessing, Kept):
        return {split: EncodedFiles(listing, preprocessing, on_error) for split, listing in parts.items()}
    size = preprocessing.size
    sources: dict[str, ImageFiles] = {}
    for split, listing in parts.items():
        sources[split] = ImageFiles(listing, preprocessing, on_error, size=size)
        size = sources[split].size
        listing.attributes["preprocessing"] = preprocessing._replace(size=size).to_json()
    return sources


class ListedRows(DecodedRows):
    """The image files of a listing, and their labels if it has any."""

    def __init__(self, listing: Listing, on_error: OnError):
        if not listing.names:
            raise UserError(f"{listing.source} has no images")
        labels = {} if listing.labels is None else {"labels": listing.labels}
        super().__init__(listing.source, len(listing.names), labels, on_error=on_error)
        self.attributes = listing.attributes
        self._listing = listing
        self._changes_of_row: dict[int, list[str]] = {}

    @property
    def remarks(self) -> list[str]:
        rows = sorted(self._changes_of_row.keys() - self.failed.keys())
        counts = Counter(change for row in rows for change in self._changes_of_row[row])
        return [f"changed  {change}: {count:,} of {len(self):,} images" for change, count in counts.items()]


class ImageFiles(ListedRows):
    """Rows `images`, uint8 (N, 3, H, W), and `labels`; or `masks`, uint8 (N, H, W), in their place.

    If there are masks, the attribute `n_classes` grows while they are read: it is the highest value + 1.
    """

    def __init__(
        self, listing: Listing, preprocessing: Preprocessing, on_error: OnError, *, size: tuple[int, int] | None
    ):
        """size: of the rows. None: that of the first image that can be decoded."""
        super().__init__(listing, on_error)
        self._preprocessing = preprocessing
        self._lock = Lock()
        self._mask_pixels = np.zeros(IGNORED_CLASS + 1, np.int64)  # that were read, of each value
        self.size = size or self._find_size()
        images = {"images": Field(np.dtype(np.uint8), (3, *self.size))}
        masks = {"masks": Field(np.dtype(np.uint8), self.size)} if listing.masks else {}
        self.fields = images | masks | self.fields

    @property
    def remarks(self) -> list[str]:
        lines = super().remarks
        if self._mask_pixels.any():
            present = np.flatnonzero(self._mask_pixels[:IGNORED_CLASS]).astype(str).tolist()
            classes = f"{len(present)} of {self.attributes['n_classes']} classes occur: {list_first(present)}"
            ignored_pct = 100 * self._mask_pixels[IGNORED_CLASS] / self._mask_pixels.sum()
            lines.append(f"masks    {classes}; {ignored_pct:.3g} % of the pixels are 255 (ignored)")
            if present == ["0"] and ignored_pct:
                lines.append("warning: the masks hold 0 and 255 only; if 255 is a class, give --binary-masks")
        return lines

    def decode(self, row: int) -> Mapping[str, np.ndarray]:
        """The image and its mask. Thread-safe. Raises BrokenRowError if one cannot be decoded; UserError if the
        image has another size, unless broken rows are to be skipped."""
        decoded = self._decode(row)
        if decoded["images"].shape[1:] != self.size:
            size = format_size(decoded["images"].shape[1:])
            kind = BrokenRowError if self.on_error == "skip" else UserError  # without --size, there are many of them
            where = self._listing.where(row)
            raise kind(f"{where} has {size} pixels, but the first image has {format_size(self.size)}; give --size")
        if "masks" in decoded:
            n_pixels = np.bincount(decoded["masks"].ravel(), minlength=IGNORED_CLASS + 1)
            highest = int(np.flatnonzero(n_pixels[:IGNORED_CLASS]).max(initial=0))
            with self._lock:
                self._mask_pixels += n_pixels
                self.attributes["n_classes"] = max(self.attributes.get("n_classes", 1), highest + 1)
        return decoded

    def _decode(self, row: int) -> dict[str, np.ndarray]:
        listing = self._listing
        with explain_broken(listing.where(row)), open_file(listing.root / listing.names[row]) as file:
            changes = describe_changes(file)
            file.seek(0)
            decoded = {}
            if listing.masks:
                with open_file(listing.masks[row]) as mask_file:
                    image_CHW, mask_HW = decode_pair(file, mask_file, self._preprocessing, is_binary=listing.is_binary)
                decoded["masks"] = mask_HW
            else:
                image_CHW = decode(file, self._preprocessing)
            if SIXTEEN_BITS in changes and image_CHW.max() < DARK:
                changes.append(TWELVE_BITS)
            self._changes_of_row[row] = changes
            return {"images": image_CHW, **decoded}

    def _find_size(self) -> tuple[int, int]:
        for row in range(min(PROBED_FILES, len(self))):
            try:
                _, height, width = self._decode(row)["images"].shape
                return height, width
            except BrokenRowError as error:
                self.failed[row] = str(error)
        raise UserError(f"{self.name}: none of these images can be decoded:\n  " + list_first(self.reasons, "\n  "))


class EncodedFiles(ListedRows):
    """Rows `images`, the bytes of image files, and `labels`. Each file is decoded once, to find the broken ones."""

    def __init__(self, listing: Listing, kept: Kept, on_error: OnError):
        super().__init__(listing, on_error)
        self._kept = kept
        self.fields = {"images": _estimate_field(self)} | self.fields

    def decode(self, row: int) -> Mapping[str, np.ndarray]:
        """The bytes of an image. Thread-safe. Raises BrokenRowError if it cannot be decoded."""
        listing = self._listing
        with explain_broken(listing.where(row)), open_file(listing.root / listing.names[row]) as file:
            data = keep(file.read(), self._kept)
            file.seek(0)
            self._changes_of_row[row] = [f"{change}, when it is decoded" for change in describe_changes(file)]
            return {"images": np.frombuffer(data, np.uint8)}


def _estimate_field(source: EncodedFiles) -> Field:
    """The field of encoded images, whose mean size is that of a few rows. Raises BrokenRowError if all are broken."""
    sizes = []
    for row in np.linspace(0, len(source) - 1, min(PROBED_SIZES, len(source))).astype(int).tolist():
        with suppress(BrokenRowError):
            sizes.append(source.decode(row)["images"].nbytes)
    if not sizes:
        source.decode(0)
    return Field(np.dtype(np.uint8), (), float(np.mean(sizes)), codec="encoded")


@contextmanager
def explain_broken(where: str) -> Iterator[None]:
    """Turn the errors of an image into a BrokenRowError. where: its place, for the message."""
    try:
        yield
    except FileNotFoundError:
        raise BrokenRowError(f"{where} does not exist") from None
    except UnidentifiedImageError:
        raise BrokenRowError(f"{where} is not an image that Pillow knows") from None
    except Exception as error:  # a decoder may raise anything for damaged bytes
        raise BrokenRowError(f"{where} cannot be decoded: {error}") from None
