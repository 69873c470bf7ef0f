"""Names the command that converts a folder of images, a table or a NumPy file where an HDF5 file is expected."""

import glob
import os
import re
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fastgpu.process.launch import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
TABLES = (".csv", ".tsv", ".txt")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
MAX_NAMES = 100
"""Number of names in a folder that are looked at."""
MIN_PIXEL_COLUMNS = 50
"""A table with so many columns is taken for one with a pixel in each."""


def refuse_unconverted(key: str, paths: str | Sequence[str], fields: Sequence[str]) -> None:
    """Raise UserError with the command of convert.py if `paths` names files that it can convert.

    Only names and the first line of a table are looked at. key: the config key that holds the paths. fields: names of
    the fields that are to be read.
    """
    share = " --split 0.9" if key == "data.train" else ""
    for name in [paths] if isinstance(paths, str) else paths:
        path = Path(name)
        suffix = path.suffix.lower()
        while suffix in IMAGES and (path.is_file() or glob.has_magic(str(path))):
            path = path.parent  # of an image, or of a pattern such as photos/*/*.jpg
        if not os.access(path, os.R_OK):  # it may be missing, too; whoever opens it says so
            continue
        target = shlex.quote(f"data/{path.resolve().name.split('.')[0]}.h5")
        source = shlex.quote(name if path == Path(name) else str(path))
        if path.is_dir() and _has_images(path):
            what, command = "a folder of images", f"images {source} {target}{share}"
        elif suffix in TABLES:
            what, command = _describe_table(path, fields, source)
            command += f" {target}"
        elif suffix == ".npy":
            arrays = [f"{fields[0]}={source}", *(f"{field}=FILE.npy" for field in fields[1:])]
            what, command = "a NumPy array", f"arrays {' '.join(arrays)} {target}"
        elif suffix == ".npz":
            matrix = "items=" if "items" in fields else ""
            what, command = "a file of NumPy arrays", f"arrays {matrix}{source} {target}"
        elif suffix in ARCHIVES:
            what, command = "an archive (unpack it, unless --help lists it)", "--help"
        else:
            continue
        raise UserError(f"{key} is {name}, {what}; convert it once: python convert.py {command}")


def _has_images(folder: Path) -> bool:
    """Whether images are among the first names in a folder, or in the first folder in it."""
    names = list(islice(folder.iterdir(), MAX_NAMES))
    inner = next((name for name in names if name.is_dir()), None)
    names += islice(inner.iterdir(), MAX_NAMES) if inner else []
    return any(name.suffix.lower() in IMAGES for name in names)


def _describe_table(table: Path, fields: Sequence[str], source: str) -> tuple[str, str]:
    """What a table is, and the command that reads it, judged by its first two lines and the fields to read."""
    with table.open(encoding="utf-8", errors="replace") as lines:
        header, line = lines.readline(1 << 20), lines.readline(1 << 20)
    is_of_films = "movieId" in header
    has_numbers = not is_of_films and re.fullmatch(r"[-+.\deE,;\s]+", line) is not None
    if has_numbers and not {"images", "items"} & {*fields}:
        arrays = [f"{field}=FILE.npy" for field in fields]
        return "a table (write its columns by numpy.save)", f"arrays {' '.join(arrays)}"
    has_pixels = "pixels" in header or max(map(header.count, ",;\t")) + 1 >= MIN_PIXEL_COLUMNS
    kind = "pixels" if has_pixels else "images"
    return "a table", f"{'movielens' if is_of_films or 'items' in fields else kind} {source}"
