"""Files and folders that are either complete or absent, whatever ends the process or the machine."""

import os
import shutil
from pathlib import Path


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


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
