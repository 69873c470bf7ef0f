"""Files and folders that are whole or absent, whatever ends the process or the machine."""

import os
import shutil
from pathlib import Path


def put_in_place(partial: Path, target: Path) -> None:
    """Flush a file, or a folder of files, to the disk, then give it its name, which may have another bearer.

    Raises OSError if the disk refuses; whatever had the name still has it then.
    """
    for path in (*(partial.iterdir() if partial.is_dir() else ()), partial):
        _flush(path)
    if target.is_dir():
        shutil.rmtree(target)
    partial.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """To the disk; for a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
