"""What the commands for images do."""

from typing import Any

from fastgpu.convert.images.command import Images, Pixels
from fastgpu.convert.images.readers import ImageFiles, ImageFolder, ImageTable, Masks, PixelTable
from fastgpu.convert.program import write
from fastgpu.images.parts import Preprocessing


def write_images(asked: Images) -> None:
    """Decode image files: of a folder for each class, of a CSV, or with masks."""
    source: ImageFiles
    how: dict[str, Any] = {"encoded": asked.keep_encoded}
    how["prepared"] = Preprocessing(asked.size, asked.resize or "shorter")
    if asked.masks:
        source = Masks(asked.source, asked.masks, is_binary=asked.binary_masks, drawn_on=asked.masks_fit, **how)
    elif asked.source.is_dir():
        source = ImageFolder(asked.source, **how)
    else:
        columns = (asked.columns or ("1,2" if asked.no_header else "path,label")).split(",")
        how["has_header"] = not asked.no_header
        source = ImageTable(asked.source, columns=columns, split_by=asked.split_by, **how)
    write(source, asked, split=asked.split, max_broken=asked.on_error)


def write_pixels(asked: Pixels) -> None:
    """Read a CSV whose rows are images."""
    source = PixelTable(asked.source, label=asked.label, split_by=asked.split_by, has_header=not asked.no_header)
    write(source, asked, split=asked.split)
