"""Files and folders that are complete or absent, whatever ends the process; and files that are no links to others."""

import os
import shutil
from pathlib import Path
from typing import Literal, TextIO


def atomic_replace(partial: Path, target: Path) -> None:
    """Flush a file, or a folder of files, to disk and rename it to `target`, which may exist.

    Raises OSError if the disk refuses; an existing `target` is then unchanged.
    """
    if partial.is_dir():
        for path in partial.iterdir():
            flush(path)
    flush(partial)
    if target.is_dir():
        shutil.rmtree(target)
    partial.replace(target)
    flush(target.parent)


def open_own(path: Path, mode: Literal["a", "w"]) -> TextIO:
    """Open a text file in the folder of a run to write to it.

    Raises OSError for a symbolic link: whoever may write to the folder could lead the run to any file of its user.
    """
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def write_own(path: Path, text: str) -> None:
    """Write a text file as a whole, as `open_own` does."""
    with open_own(path, "w") as file:
        file.write(text)


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
