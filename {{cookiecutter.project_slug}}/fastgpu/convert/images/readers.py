"""Image files as map-style Datasets: folders of classes, and images with masks; table_readers.py has tables.

Each gives {"images": uint8 (3, H, W), "labels": ...} for a row. `convert.py` writes them to a file; as `data.dataset`
they are trained on as they are. Copy one to read data of your own.
"""

import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fastgpu.convert.images.masks import decode_pair
from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import SPLIT_OF_WORD, group_splits
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
from fastgpu.rows.rows import CODECS

PROBED_FILES = 100
"""Files that are tried at most to find the size of the images."""
DARK = 4096 >> 8
"""Images of 16 bits are below this, once they have 8, if they only use values of 12 bits."""
TWELVE_BITS = "values below 4096 (12 bits?) to 0 to 15, nearly black (scale them, save .npy, `convert.py arrays`)"


class Kept(NamedTuple):
    """Image files become encoded rows, which each epoch decodes."""

    side: int | None = None
    """Images whose shorter side is longer become so small. None: all stay as they are."""
    quality: int = 92
    """Of the JPEG files that smaller images become."""


class ImageFiles(Reader):
    """Image files, and their labels if they have any.

    prepared: Preprocessing() stands for the size of the first image that can be decoded, which all others must have.
    """

    def __init__(self, name: str, root: Path, paths: Sequence[str], prepared: Preprocessing | Kept):
        """paths: of the files, from `root` on. name: of the source, for messages."""
        if not paths:
            raise UserError(f"{name} has no images")
        self.name = name
        self.paths = paths
        self.attributes = {}
        self.encoded = isinstance(prepared, Kept)
        self._root = root
        self._prepared = prepared
        self._changes_of_row: dict[int, list[str]] = {}
        if isinstance(prepared, Preprocessing):
            self._size = prepared.size or self._find_size()
            self.attributes["preprocessing"] = prepared._replace(size=self._size).to_json()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises an exception of any kind if the file is damaged."""
        item: dict[str, Any] = {}
        with open_file(self._root / self.paths[row]) as file:
            try:
                changes = describe_changes(file)
            except UnidentifiedImageError:
                raise ValueError("it is not an image that Pillow knows") from None
            file.seek(0)
            if isinstance(self._prepared, Kept):
                item["images"] = np.frombuffer(keep(file.read(), self._prepared), np.uint8)
                changes = [f"{change}, when it is decoded" for change in changes]
            else:
                item |= self._decode(row, file)
                size = item["images"].shape[1:]
                if size != self._size:
                    first = format_size(self._size)
                    raise ValueError(f"it has {format_size(size)} pixels, but the first image has {first}; give --size")
                if SIXTEEN_BITS in changes and item["images"].max() < DARK:
                    changes.append(TWELVE_BITS)
        self._changes_of_row[row] = changes
        if self.labels is not None:
            item["labels"] = self.labels[row]
        return item

    def where(self, row: int) -> str:
        return f"{self.name}: {self.paths[row]}"

    def remarks(self, rows: np.ndarray) -> list[str]:
        counts = Counter(change for row in rows.tolist() for change in self._changes_of_row.get(row, ()))
        return [f"changed  {change}: {count:,} of {len(rows):,} images" for change, count in counts.items()]

    def _decode(self, row: int, file: IO[bytes]) -> dict[str, np.ndarray]:
        assert isinstance(self._prepared, Preprocessing)
        return {"images": decode(file, self._prepared)}

    def _find_size(self) -> tuple[int, int]:
        """That of the first image that can be decoded. Raises UserError if there is none among the first."""
        reasons = []
        for row in range(min(PROBED_FILES, len(self))):
            try:
                with open_file(self._root / self.paths[row]) as file:
                    _, height, width = decode(file, Preprocessing()).shape
                return height, width
            except Exception as error:  # a decoder may raise anything for damaged bytes
                reasons.append(f"{self.where(row)}: {error}")
        raise UserError(f"{self.name}: none of these images can be decoded:\n  " + list_first(reasons, "\n  "))


class ImageFolder(ImageFiles):
    """root/<class>/**, or root/{train,val,test}/<class>/**: `labels` are the places of the classes by name."""

    def __init__(self, root: str | Path, prepared: Preprocessing | Kept = Preprocessing()):  # noqa: B008 (immutable)
        root = Path(root)
        paths = list_images(root)
        folders = {path.split("/")[0] for path in paths if "/" in path}
        is_split = bool(folders) and all(name.lower() in SPLIT_OF_WORD for name in folders)
        depth = 2 if is_split else 1
        inside = [path for path in paths if path.count("/") >= depth]
        if not inside:
            cure = "if the files lie elsewhere, list them in a CSV of path,label"
            raise UserError(f"{root} has no images in sub-folders, one for each class; {cure}")
        if len(inside) < len(paths):
            print(f"images beside the class folders of {root}, which are left out: {len(paths) - len(inside):,}")
        super().__init__(str(root), root, inside, prepared)
        classes, labels = np.unique([path.split("/")[depth - 1] for path in inside], return_inverse=True)
        self.labels = labels.astype(np.int64)
        self.attributes["class_names"] = classes.tolist()
        if is_split:
            self.splits = group_splits(root, [path.split("/")[0] for path in inside])


def list_images(root: Path) -> list[str]:
    """Paths, relative to `root`, of the image files in it at any depth, in the order of their names.

    Links to folders are followed, but not back into `root`, and not twice to one folder. Prints how many files and
    links are left out. Raises UserError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None

    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    top = root.resolve()
    seen: set[Path] = set()
    paths: list[str] = []
    n_others = 0
    for place, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        for name in sorted(folders):
            path = Path(place, name)
            target = path.resolve()
            if path.is_symlink() and (target in seen or target.is_relative_to(top)):
                folders.remove(name)
                n_others += 1
            seen.add(target)
        folders.sort()
        images = [name for name in sorted(files) if is_image(name)]
        paths += [os.path.relpath(Path(place, name), root) for name in images]
        n_others += len(files) - len(images)
    if n_others:
        print(f"left out of {root}: {n_others:,} files without the name of an image, or links to folders seen before")
    return paths


class Masks(ImageFiles):
    """Images in a folder, and for each the mask of the same name, without the suffix, in another: `masks`, (H, W).

    is_binary: the masks hold 0 and 255, which is class 1. The attribute `n_classes` is the highest value of the masks
    that were read + 1. Raises UserError with the images that have no mask.
    """

    def __init__(
        self,
        root: str | Path,
        masks: str | Path,
        prepared: Preprocessing = Preprocessing(),  # noqa: B008 (immutable)
        *,
        is_binary: bool = False,
    ):
        images = {path.rpartition(".")[0]: path for path in list_images(Path(root))}
        mask_of = {path.rpartition(".")[0]: path for path in list_images(Path(masks))}
        if lonely := [path for name, path in images.items() if name not in mask_of]:
            raise UserError(f"{len(lonely):,} of {len(images):,} images have no mask in {masks}: {list_first(lonely)}")
        if n_unused := len(mask_of) - len(images):
            print(f"masks without an image in {root}, which are left out: {n_unused:,}")
        super().__init__(str(root), Path(root), list(images.values()), prepared)
        self._masks = [Path(masks, mask_of[name]) for name in images]
        self._is_binary = is_binary
        self._lock = Lock()
        self._n_pixels = np.zeros(IGNORED_CLASS + 1, np.int64)  # that were read, of each value

    def remarks(self, rows: np.ndarray) -> list[str]:
        present = np.flatnonzero(self._n_pixels[:IGNORED_CLASS]).astype(str).tolist()
        classes = f"{len(present)} of {self.attributes.get('n_classes', 1)} classes occur: {list_first(present)}"
        ignored_pct = 100 * self._n_pixels[IGNORED_CLASS] / max(1, self._n_pixels.sum())
        lines = [*super().remarks(rows), f"masks    {classes}; {ignored_pct:.3g} % of the pixels are 255 (ignored)"]
        if present == ["0"] and ignored_pct:
            lines.append("warning: the masks hold 0 and 255 only; if 255 is a class, give --binary-masks")
        return lines

    def _decode(self, row: int, file: IO[bytes]) -> dict[str, np.ndarray]:
        assert isinstance(self._prepared, Preprocessing)
        with open_file(self._masks[row]) as mask_file:
            image_CHW, mask_HW = decode_pair(file, mask_file, self._prepared, is_binary=self._is_binary)
        n_pixels = np.bincount(mask_HW.ravel(), minlength=IGNORED_CLASS + 1)
        highest = int(np.flatnonzero(n_pixels[:IGNORED_CLASS]).max(initial=0))
        with self._lock:
            self._n_pixels += n_pixels
            self.attributes["n_classes"] = max(self.attributes.get("n_classes", 1), highest + 1)
        return {"images": image_CHW, "masks": mask_HW}


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
