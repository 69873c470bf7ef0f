"""The commands for images."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastgpu.convert.command import PARQUET, SplitCommand
from fastgpu.process.commands import argument, flag
from fastgpu.process.launch import UserError
from fastgpu.process.tools import check_exist

MAX_SIDE = 1 << 14
"""Pixels of a side of an image."""
ARCHIVES = (".tar", ".zip")
COMPRESSED_SUFFIXES = (".gz", ".tgz", ".bz2", ".xz", ".zst")


def size(text: str) -> tuple[int, int]:
    """(height, width) of 218x178, or of 64 for both."""
    words = text.split("x")
    if len(words) > 2 or not all(word.isdecimal() and 1 <= int(word) <= MAX_SIDE for word in words):
        raise ArgumentTypeError(f"{text} should be HxW, such as 218x178, or one number for both, up to {MAX_SIDE:,}")
    return int(words[0]), int(words[-1])


@dataclass(frozen=True, kw_only=True)
class ImageCommand(SplitCommand):
    """The arguments of both commands."""

    no_header: bool = flag("the first line is a row; columns are called 1, 2, ...", default=False)


@dataclass(frozen=True, kw_only=True)
class Images(ImageCommand):
    """Write image files: of folders, a CSV, Parquet, tar or zip, or masks.

    python convert.py images photos/ data/photos.h5 --size 128 --split 0.9
    """

    source: Path = argument(
        "folder with a sub-folder for each class, CSV file, folder of the images of --masks; or a file or quoted "
        "pattern: Parquet (images in a column), tar (WebDataset, or folders of classes), zip (folders of classes)"
    )
    split_by: str = flag(
        "column, such as patient: --split puts all rows with one value into one file. Without --split, the values are "
        "train, val or test. For class folders: a regular expression for a part of the paths, such as 'p\\d+'",
        type=str.strip,
        default="",
        metavar="COLUMN",
    )
    columns: str | None = flag(
        "path or image, and its labels: of a CSV (default: path,label), of Parquet, or suffixes in a tar (jpg,cls)",
        metavar="NAMES",
    )
    size: tuple[int, int] | None = flag(
        "height and width of the rows; default: the size of the images", type=size, metavar="HxW"
    )
    resize: Literal["shorter", "exact"] | None = flag("shorter (default): centre-crop; exact: stretch")
    keep_encoded: bool = flag("keep the files; if the shorter side is above --size: smaller JPEG", default=False)
    masks: Path | None = flag("folder with a mask of the same name for each image", metavar="DIR")
    binary_masks: bool = flag("the masks hold 0 and 255, which is class 1 and not ignored", default=False)
    masks_fit: Literal["shown", "stored"] | None = flag("masks fit the images rotated by EXIF (shown), or the files")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exist(self.source)
        if not self.source.is_dir() and self.suffix in COMPRESSED_SUFFIXES:
            raise UserError(f"{self.source} is compressed, so that no file in it can be read alone; unpack it")
        idle = ["columns", "no_header"] if self.source.is_dir() else ["masks"]
        idle += ["no_header"] if self.suffix in (*ARCHIVES, *PARQUET) else []
        idle += ["masks", "resize"] if self.keep_encoded else []
        idle += [] if self.masks else ["binary_masks", "masks_fit"]
        if given := [f"--{name.replace('_', '-')}" for name in idle if getattr(self, name)]:
            raise UserError(f"{given[0]} has no meaning for {self.source} with these flags; drop it")
        if self.source.is_dir() and self.split_by and not self.split:
            raise UserError(f"--split-by is {self.split_by} for a folder; add --split, whose shares its values get")
        if self.keep_encoded and self.size and self.size[0] != self.size[1]:
            raise UserError("--size should be one number, of the shorter side, with --keep-encoded")
        if self.masks:
            check_exist(self.masks)
        if self.columns and len(self.columns.split(",")) < 2:
            raise UserError(f"--columns is {self.columns}; it should be two names or more: of the image and its labels")

    @property
    def suffix(self) -> str:
        """The suffix of the source, in lower case."""
        return self.source.suffix.lower()

    def run(self) -> None:
        from fastgpu.convert.images.readers import ImageFiles, ImageFolder, ImageReader, ImageTable, Masks
        from fastgpu.convert.program import write
        from fastgpu.images.crops import Preprocessing

        how: dict[str, Any] = {
            "encoded": self.keep_encoded,
            "prepared": Preprocessing(self.size, self.resize or "shorter"),
        }
        source: ImageReader
        columns = [name.strip() for name in (self.columns or "").split(",") if name.strip()]
        if self.masks:
            source = Masks(self.source, self.masks, is_binary=self.binary_masks, drawn_on=self.masks_fit, **how)
        elif self.source.is_dir():
            source = ImageFolder(self.source, **how)
        elif self.suffix in PARQUET:
            from fastgpu.convert.images.parquet import ParquetImages

            source = ParquetImages(self.source, columns=columns, split_by=self.split_by, **how)
        elif self.suffix in ARCHIVES:
            from fastgpu.convert.images.archives import ImageArchives

            source = ImageArchives(self.source, columns=columns, split_by=self.split_by, **how)
        else:
            columns = columns or (["1", "2"] if self.no_header else ["path", "label"])
            has_header = not self.no_header
            source = ImageTable(self.source, columns=columns, split_by=self.split_by, has_header=has_header, **how)
        if isinstance(source, ImageFiles) and self.source.is_dir() and self.split_by:
            source.split_by_pattern(self.split_by, source.paths)
        write(source, self)


@dataclass(frozen=True, kw_only=True)
class Pixels(ImageCommand):
    """Write a CSV file whose rows are square grey images.

    python convert.py pixels fer2013.csv data/fer.h5 --split-by Usage
    """

    source: Path = argument("CSV file whose rows are images: many columns of pixels, or one called pixels")
    label: str = flag("its column; default: the only one, or label", type=str.strip, default="", metavar="COLUMN")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exist(self.source)

    def run(self) -> None:
        from fastgpu.convert.images.readers import PixelTable
        from fastgpu.convert.program import write

        has_header = not self.no_header
        source = PixelTable(self.source, label=self.label, split_by=self.split_by, has_header=has_header)
        write(source, self)


COMMANDS = {"images": Images, "pixels": Pixels}
