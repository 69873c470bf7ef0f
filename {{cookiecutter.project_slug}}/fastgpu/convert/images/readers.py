"""Image files as map-style Datasets: folders of classes, and images with masks; table_readers.py has tables.

Each gives {"images": uint8 (3, H, W), "labels": ...} for a row. `convert.py` writes them to a file; as `data.dataset`
they are trained on as they are. Copy one to read data of your own.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageOps

from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Reader
from fastgpu.convert.splits import SPLIT_OF_WORD, group_splits
from fastgpu.images import files
from fastgpu.images.decode import EXIF_ORIENTATION, EncodedImage, open_image
from fastgpu.images.files import IGNORED_CLASS, fit, format_size, list_images
from fastgpu.images.parts import Box, Preprocessing
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.rows import CODECS

JPEG_QUALITY = 92
"""Of images that are made smaller and stay encoded."""


class ImageFiles(Reader):
    """Image files, and their labels if they have any.

    prepared: Preprocessing() stands for the size of the first image that can be decoded, which all others must have.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        paths: Sequence[str],
        prepared: Preprocessing,
        *,
        labels: np.ndarray | None = None,
        encoded: bool = False,
    ):
        """name: of the source, for messages. paths: of the files, from `root` on.

        encoded: rows are the bytes of the files, for each epoch to decode. If `prepared` has a size, images whose
        shorter side is longer become JPEG files of that size.
        """
        if not paths:
            raise UserError(f"{name} has no images")
        self.name = name
        self.paths = paths
        self.labels = labels
        self.attributes = {}
        self.encoded = encoded
        self._files = files.ImageFiles([root / path for path in paths], prepared)
        if not encoded:
            _, height, width = self.fields["images"].shape
            self.attributes["preprocessing"] = prepared._replace(size=(height, width)).to_json()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Raises an exception of any kind if the file is damaged."""
        item = self._item(row)
        if self.labels is not None:
            item["labels"] = self.labels[row]
        return item

    def _item(self, row: int) -> dict[str, Any]:
        if not self.encoded:
            return {"images": self._files.read(row)}
        size = self._files.prepared.size
        with self._files.open(row) as file:
            return {"images": np.frombuffer(keep(file.read(), size and size[0]), np.uint8)}

    def where(self, row: int) -> str:
        return f"{self.name}: {self.paths[row]}"

    def remarks(self, rows: np.ndarray) -> list[str]:
        return self._files.count_changes(rows.tolist())


class ImageFolder(ImageFiles):
    """root/<class>/**, or root/{train,val,test}/<class>/**: `labels` are the places of the classes by name."""

    def __init__(
        self,
        root: str | Path,
        prepared: Preprocessing = Preprocessing(),  # noqa: B008 (immutable)
        *,
        encoded: bool = False,
    ):
        root = Path(root)
        paths = list_images(root)
        folders = {path.split("/")[0] for path in paths if "/" in path}
        is_split = bool(folders) and all(name.lower() in SPLIT_OF_WORD for name in folders)
        depth = 2 if is_split else 1
        inside = [path for path in paths if path.count("/") >= depth]
        if not inside:
            cure = "if the files lie elsewhere, list them in a CSV of path,label"
            raise UserError(f"{root} has no images in sub-folders, one for each class; {cure}")
        places = [place for place in root.iterdir() if place.is_dir() and not place.is_symlink()]
        empty = sorted({place.name for place in places if not place.name.startswith(".")} - folders)
        if empty:
            warn(f"{root} has folders without images, which are no classes: {', '.join(empty)}")
        if len(inside) < len(paths):
            print(f"images beside the class folders of {root}, which are left out: {len(paths) - len(inside):,}")
        classes, labels = np.unique([path.split("/")[depth - 1] for path in inside], return_inverse=True)
        super().__init__(str(root), root, inside, prepared, labels=labels.astype(np.int64), encoded=encoded)
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
        self._masks = [Path(masks, mask_of[name]) for name in images]
        self._is_binary = is_binary
        self._lock = Lock()
        super().__init__(str(root), Path(root), list(images.values()), prepared)

    def _item(self, row: int) -> dict[str, Any]:
        with self._files.open(row) as file, self._masks[row].open("rb") as mask_file:
            image_CHW, mask_HW = decode_pair(file, mask_file, self._files.prepared, is_binary=self._is_binary)
        highest = int(mask_HW.max(initial=0, where=mask_HW != IGNORED_CLASS))
        with self._lock:
            self.attributes["n_classes"] = max(self.attributes.get("n_classes", 1), highest + 1)
        return {"images": image_CHW, "masks": mask_HW}


def decode_pair(
    image_file: IO[bytes], mask_file: IO[bytes], preprocessing: Preprocessing, *, is_binary: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """An image file and its mask -> uint8 (3, H, W), uint8 (H, W): a class for each pixel, or IGNORED_CLASS.

    The classes are the indices of a palette image, or the values of a grey one. is_binary: if they are not 0 and 1,
    they are 0 and 255, which is class 1. Raises ValueError if the mask has another size than the image.
    """
    image = EncodedImage(np.frombuffer(image_file.read(), np.uint8), obeys_exif=True)
    values = read_mask(mask_file, is_binary=is_binary)
    if values.shape != (image.height, image.width):
        sizes = f"{format_size(values.shape)} pixels, the image {format_size((image.height, image.width))}"
        raise ValueError(f"its mask has {sizes}")
    mask_HW = fit(torch.from_numpy(values)[None], preprocessing, is_mask=True)[0].contiguous().numpy()
    image_file.seek(0)
    return files.decode(image_file, preprocessing), mask_HW


def read_mask(file: IO[bytes], *, is_binary: bool) -> np.ndarray:
    """The values of a grey image or the indices of a palette image: uint8 (H, W). Raises ValueError for others."""
    with open_image(file) as mask:
        ImageOps.exif_transpose(mask, in_place=True)
        values = np.array(mask)
        if values.ndim != 2 or values.dtype.kind not in "bui" or values.min() < 0 or values.max() > 255:
            raise ValueError(f"its mask has the mode {mask.mode}; allowed are grey values or a palette, 0 to 255")
    if is_binary and values.max() > 1:
        if not np.isin(values, (0, 255)).all():
            raise ValueError("its mask has other values than 0 and 255, which --binary-masks allows alone")
        values = values // 255
    return values.astype(np.uint8)


def keep(data: bytes, side: int | None = None) -> bytes:
    """The bytes of an image file as they are, or of a smaller JPEG file if its shorter side is longer than `side`.

    Files that are not upright, or of other colors than RGB and grey, are written anew: JPEG files as such, others as
    PNG. Raises an exception of any kind if the file is damaged.
    """
    image = EncodedImage(np.frombuffer(data, np.uint8), obeys_exif=True)
    height, width = image.height, image.width
    whole = Box(0, 0, height, width)
    if side and min(height, width) > side:
        scale = side / min(height, width)
        return _save(image.decode(whole, (round(height * scale), round(width * scale))), "JPEG")
    with open_image(io.BytesIO(data)) as opened:
        kind = "JPEG" if opened.format in ("JPEG", "MPO") else "PNG"
        is_upright_rgb = opened.mode in ("RGB", "L") and opened.getexif().get(EXIF_ORIENTATION, 1) == 1
    if not is_upright_rgb or data[0] not in CODECS:
        return _save(image.decode(whole, (height, width)), kind)
    image.decode(whole, (1, 1))  # in full, as far as damage goes
    return data


def _save(image_CHW: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image_CHW.transpose(1, 2, 0))).save(file, kind, quality=JPEG_QUALITY)
    return file.getvalue()
