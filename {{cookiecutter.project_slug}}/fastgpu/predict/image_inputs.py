"""Image files as rows, decoded in the reader threads by the code that decoded the training images."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fastgpu.images.files import ImageFiles, Preprocessing, format_size, list_images
from fastgpu.process.launch import RankError, UserError, warn
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import Field


def open_images(
    paths: Sequence[str], preprocessing: str | None, fields: Mapping[str, Field], on_error: str
) -> "ImageRows":
    """Image files, folders of them at any depth, and globs, in this order.

    preprocessing: the attribute of the training file. None: the images must have the size of the training images.
    Raises UserError if the model does not take images of 8 bits in 1 or 3 channels, or if there are no files.
    """
    ((name, field),) = fields.items()
    channels = field.shape[0] if len(field.shape) == 3 else 1
    if field.dtype != np.uint8 or len(field.shape) not in (2, 3) or channels not in (1, 3):
        raise UserError(f"the model takes {name}, {field}, not image files; give a .npy or an HDF5 file")
    files = list(_list_files(paths))
    if not files:
        raise UserError(f"{', '.join(paths)}: no image files")
    if channels == 1:
        warn("the model takes one channel: colors become grey (ITU-R 601)")
    prepared = Preprocessing.from_json(preprocessing) if preprocessing else Preprocessing()
    return ImageRows(ImageFiles(files, prepared), fields, on_error=on_error)


def _list_files(paths: Sequence[str]) -> Iterator[Path]:
    for path in paths:
        is_glob = glob.has_magic(path) and not Path(path).exists()
        found = sorted(glob.glob(path, recursive=True)) if is_glob else [path]  # noqa: PTH207 (absolute patterns)
        for each in map(Path, found):
            if each.is_dir():
                yield from (each / name for name in list_images(each))
            else:
                yield each


class ImageRows(Dataset):
    """Rows of one field, uint8 (C, H, W) or (H, W). Each file is a block.

    With on_error=skip, `read` adds a broken image to `failed` and leaves its place undefined.
    """

    def __init__(self, files: ImageFiles, fields: Mapping[str, Field], *, on_error: str):
        self.name = "INPUT"
        self.files = files
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}"""
        self.fields = dict(fields)
        self.attributes = {}
        self.block_rows = np.ones(len(files), np.int32)
        self._on_error = on_error

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode images to their places. Thread-safe. Raises RankError for a broken image, unless it is skipped."""
        ((name, field),) = self.fields.items()
        images = out[name]
        assert isinstance(images, np.ndarray)
        for row, (place,) in reads.ranges():
            try:
                images[place] = self._read_row(row, field.shape)
            except Exception as error:  # a decoder may raise anything for damaged bytes
                if self._on_error == "stop":
                    cure = "--on-error skip goes on without it"
                    raise RankError(f"{self.files.paths[row]} cannot be read: {error}; {cure}") from None
                self.failed[row] = str(error)

    def _read_row(self, row: int, shape: tuple[int, ...]) -> np.ndarray:
        image_CHW = self.files.read(row)
        if image_CHW.shape[1:] != shape[-2:]:
            raise ValueError(
                f"it has {format_size(image_CHW.shape[1:])} pixels, the model takes {format_size(shape[-2:])}, and its "
                "training file does not say how images were resized: resize them in the same way first"
            )
        if shape[0] == 3 and len(shape) == 3:
            return image_CHW
        return np.asarray(Image.fromarray(image_CHW.transpose(1, 2, 0)).convert("L")).reshape(shape)
