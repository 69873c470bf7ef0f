"""Recognises photos, tables, arrays and archives that are not HDF5 files yet, and names the command that converts them.

Only names and the first line of a table are looked at.
"""

import glob
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fastgpu.process.launch import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
TABLES = (".csv", ".tsv", ".txt")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
MAX_NAMES = 100
"""Number of names that are looked at in a folder and in each of its first folders."""
MIN_PIXEL_COLUMNS = 50
"""A table with so many columns is taken for one with a pixel in each."""


def refuse_unconverted(key: str, paths: str | Sequence[str], fields: Sequence[str]) -> None:
    """Raise UserError with the command of convert.py if `paths` names files that it can convert.

    key: the config key that holds the paths. fields: names of the fields that are to be read.
    """
    for path in [paths] if isinstance(paths, str) else paths:
        advice = _advise(path, fields)
        if advice:
            raise UserError(f"{key} is {path}, {advice}")


def _advise(name: str, fields: Sequence[str]) -> str:
    """What a path is, and what to do with it; empty if it may be an HDF5 file."""
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix in IMAGES:  # an image, or a pattern such as photos/*/*.jpg
        while glob.has_magic(str(path)) or path.is_file():
            path = path.parent
    if not path.exists():
        return ""
    stem = path.resolve().name.split(".")[0]
    source = shlex.quote(str(path) if suffix in IMAGES else name)
    target = shlex.quote(f"data/{stem}.h5")
    parts = shlex.quote(f"data.train=data/{stem}-train.h5") + " " + shlex.quote(f"data.val=data/{stem}-val.h5")
    whole = f"{shlex.quote(f'data.train=data/{stem}.h5')} data.val=10%"
    run = "convert it once: python convert.py"
    if path.is_dir():
        names = _names_in(path)
        if any(each.startswith("img_align_celeba") for each in names):
            return f"CelebA as published; {run} celeba {source} {target}, then use {parts}"
        if any(each.startswith("data_batch_") for each in names):
            return f"CIFAR-10 as published; {run} cifar10 {source} {target}, then use {whole}"
        if any(each.lower().endswith(IMAGES) for each in names):
            return f"a folder of images; {run} images {source} {target} --split 0.9, then use {parts}"
    elif suffix in TABLES:
        columns = _columns_of(path)
        if {"userId", "movieId"} <= set(columns):
            return f"a table of ratings; {run} movielens {source} {target}, then use {parts}"
        if "pixels" in columns or len(columns) >= MIN_PIXEL_COLUMNS:
            return f"a table of pixels; {run} pixels {source} {target}, then use {whole}"
        return f"a table; if it lists images and labels, {run} images {source} {target} --split 0.9, then use {parts}"
    elif suffix == ".npy":
        arrays = " ".join([f"{fields[0]}={source}", *(f"{field}=FILE.npy" for field in fields[1:])])
        return f"a NumPy array; {run} arrays {arrays} {target}, then use {whole}"
    elif suffix == ".npz":
        return f"a file of NumPy arrays; {run} arrays {source} {target}, then use {whole}"
    elif suffix in ARCHIVES:
        if path.name.startswith("cifar-10-"):
            return f"CIFAR-10 as published; {run} cifar10 {source} {target}, then use {whole}"
        if path.name.startswith("ml-"):
            return f"MovieLens as published; {run} movielens {source} {target}, then use {parts}"
        return "an archive; unpack it, then convert what is in it: python convert.py --help"
    return ""


def _names_in(folder: Path) -> list[str]:
    """Some names in a folder, and in some of the folders in it."""
    entries = list(islice(folder.iterdir(), MAX_NAMES))
    names = [entry.name for entry in entries]
    for entry in entries[:5]:
        if entry.is_dir():
            names += [each.name for each in islice(entry.iterdir(), MAX_NAMES)]
    return names


def _columns_of(table: Path) -> list[str]:
    """The fields of the first line of a table."""
    with table.open(encoding="utf-8", errors="replace") as lines:
        line = lines.readline(1 << 20)
    separator = max(",;\t", key=line.count)
    return [column.strip().strip('"') for column in line.split(separator)]
