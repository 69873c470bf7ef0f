"""Parquet files and archives of images, as other programs write them."""

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from PIL import Image

from support.images import image_file

IMAGE = pl.Struct({"bytes": pl.Binary, "path": pl.String})
"""The type in which the library `datasets` writes images."""


def numbered_png(number: int, size: tuple[int, int] = (4, 5)) -> bytes:
    """A PNG file whose pixels hold its number, up to 2^16."""
    return image_file(Image.fromarray(np.full((*size, 3), (number % 256, number // 256, 7), np.uint8)), "PNG")


def numbers_of_images(images: np.ndarray) -> list[int]:
    """The numbers of images that were made of `numbered_png`. images: (N, 3, H, W)."""
    assert (images == images[:, :, :1, :1]).all()
    return (images[:, 0, 0, 0] + images[:, 1, 0, 0].astype(int) * 256).tolist()


def write_parquet(path: Path, images: Sequence[Any], kind: Any = IMAGE, group_rows: int = 7, **columns: Any) -> Path:
    """A Parquet file with the column `image`, and others. images: values of this type of polars."""
    values = [{"bytes": each, "path": None} if kind is IMAGE and isinstance(each, bytes) else each for each in images]
    table = pl.DataFrame({"image": pl.Series(values, dtype=kind), **columns})
    table.write_parquet(path, row_group_size=group_rows)
    return path


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """A tar archive of {name: content}."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_zip(path: Path, files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A zip archive of {name: content}."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path
