"""Finds the image files in a folder and its sub-folders."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from fastgpu.images.decode import FORMATS
from fastgpu.process.launch import UserError


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of an image, and the file is not hidden."""
    kind = Image.registered_extensions().get(Path(name).suffix.lower())
    return kind in (*FORMATS, "MPO") and not name.startswith(".")


def list_images(root: Path) -> list[str]:
    """Paths, relative to `root`, of the image files in it at any depth, sorted within each folder.

    Links to folders are followed, but not back into `root`, and not twice to one folder. Prints how
    many hidden folders, and files of other kinds, are left out. Raises UserError if `root` is no
    folder, OSError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    seen: set[Path] = set()
    paths: list[str] = []
    others: Counter[str] = Counter()
    for place, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        # Hidden folders, such as .ipynb_checkpoints, are counted and not entered.
        others.update(name for name in folders if name.startswith("."))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in [Path(place, name) for name in folders]:
            target = path.resolve()
            if path.is_symlink() and (target in seen or target.is_relative_to(root.resolve())):
                folders.remove(path.name)
            seen.add(target)
        images = [name for name in sorted(files) if is_image(name)]
        paths += [os.path.relpath(Path(place, name), root) for name in images]
        others.update(kind_of(name) for name in files if not is_image(name))
    tell_left_out(root, others)
    return paths


def select_images(paths: Iterable[str], others: Counter[str]) -> list[str]:
    """The image files among paths, such as those in an archive. Counts the others by kind, as `list_images` does."""
    images: list[str] = []
    for path in paths:
        *folders, name = path.split("/")
        hidden = next((folder for folder in folders if folder.startswith(".")), "")
        if is_image(name) and not hidden:
            images.append(path)
        else:
            others[hidden or kind_of(name)] += 1
    return images


def tell_left_out(source: str | Path, others: Counter[str]) -> None:
    """Print how many files of each kind are left out, if any."""
    if others:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(10))
        taken = "formats that Pillow reads by itself, such as JPEG and PNG, are taken"
        print(f"left out of {source}: {kinds} ({taken})")


def kind_of(name: str) -> str:
    """What files of this name are called where they are counted."""
    return "hidden files" if name.startswith(".") else Path(name).suffix.lower() or name
