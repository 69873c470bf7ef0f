"""Image files as map-style Datasets: folders of classes, and images with masks; table_readers.py has tables.

Each gives {"images": uint8 (3, H, W), "labels": ...} for a row. `convert.py` writes them to a file; as `data.dataset`
they are trained on as they are. Copy one to read data of your own.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fastgpu.convert.images.masks import decode_pair
from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import SPLIT_OF_WORD, group_splits
from fastgpu.images import files
from fastgpu.images.decode import EXIF_ORIENTATION, EncodedImage, open_image
from fastgpu.images.files import IGNORED_CLASS, SIXTEEN_BITS, format_size, list_images
from fastgpu.images.parts import Box, Preprocessing
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
        self._kept = prepared if isinstance(prepared, Kept) else None
        self._files = files.ImageFiles(
            [root / path for path in paths], Preprocessing() if isinstance(prepared, Kept) else prepared
        )
        if not self.encoded:
            self._size = self._files.prepared.size or self._find_size()
            self.attributes["preprocessing"] = self._files.prepared._replace(size=self._size).to_json()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises an exception of any kind if the file is damaged."""
        if self._kept:
            with self._files.open(row) as file:
                item: dict[str, Any] = {"images": np.frombuffer(keep(file.read(), self._kept), np.uint8)}
        else:
            item = self._decode(row)
            size = item["images"].shape[1:]
            if size != self._size:
                first = format_size(self._size)
                raise ValueError(f"it has {format_size(size)} pixels, but the first image has {first}; give --size")
            if SIXTEEN_BITS in self._files.changes[row] and item["images"].max() < DARK:
                self._files.changes[row].append(TWELVE_BITS)
        if self.labels is not None:
            item["labels"] = self.labels[row]
        return item

    def where(self, row: int) -> str:
        return f"{self.name}: {self.paths[row]}"

    def remarks(self, rows: np.ndarray) -> list[str]:
        return self._files.count_changes(rows.tolist())

    def _decode(self, row: int) -> dict[str, np.ndarray]:
        return {"images": self._files.read(row)}

    def _find_size(self) -> tuple[int, int]:
        """That of the first image that can be decoded. Raises UserError if there is none among the first."""
        reasons = []
        for row in range(min(PROBED_FILES, len(self))):
            try:
                _, height, width = self._files.read(row).shape
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

    def _decode(self, row: int) -> dict[str, np.ndarray]:
        with self._files.open(row) as file, self._masks[row].open("rb") as mask_file:
            image_CHW, mask_HW = decode_pair(file, mask_file, self._files.prepared, is_binary=self._is_binary)
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
    image = EncodedImage(np.frombuffer(data, np.uint8), obeys_exif=True)
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
