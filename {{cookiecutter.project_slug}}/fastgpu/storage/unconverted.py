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
        elif suffix in TABLES and not {"images", "items"} & {*fields} and _has_numbers(path):
            arrays = [f"{field}=FILE.npy" for field in fields]
            what, command = "a table (write its columns by numpy.save)", f"arrays {' '.join(arrays)} {target}"
        elif suffix in TABLES:
            what, command = "a table", f"{_command_for(path, fields)} {source} {target}"
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


def _has_numbers(table: Path) -> bool:
    """Whether the second line of a table has numbers only, which are not those of users and films."""
    with table.open(encoding="utf-8", errors="replace") as lines:
        header, line = lines.readline(1 << 20), lines.readline(1 << 20)
    return "movieId" not in header and re.fullmatch(r"[-+.\deE,;\s]+", line) is not None


def _command_for(table: Path, fields: Sequence[str]) -> str:
    """The command of convert.py that reads such a table, judged by its first line and the fields to read."""
    with table.open(encoding="utf-8", errors="replace") as lines:
        line = lines.readline(1 << 20)
    if "movieId" in line or "items" in fields:
        return "movielens"
    n_columns = 1 + max(map(line.count, ",;\t"))
    return "pixels" if "pixels" in line or n_columns >= MIN_PIXEL_COLUMNS else "images"
