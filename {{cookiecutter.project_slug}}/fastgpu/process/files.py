"""Atomic writes, which leave a complete file or none if the process is killed; locks of folders; missing paths."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from fastgpu.process.launch import UserError


def not_found(path: str | Path, where: str = "") -> UserError:
    """The error for a path that does not exist. where: the name of the path in the message."""
    place = "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"
    return UserError(f"{where or path} does not exist{place}")


def rename_folder(partial: Path, target: Path) -> None:
    """Flush a folder to disk and rename it to `target`. Raises OSError if the disk refuses."""
    for path in (*partial.iterdir(), partial):
        flush(path)
    partial.replace(target)
    flush(target.parent)


def check_target(target: Path, *, replace: bool) -> None:
    """Raise UserError if `target` cannot be written: it is a folder, its folder is missing, or it exists and `replace`
    is false."""
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file in it, or another one")
    if not target.parent.is_dir():
        raise UserError(f"{target} cannot be written: there is no folder {target.parent}")
    if os.path.lexists(target) and not (target.is_file() or target.is_symlink()):
        raise UserError(f"{target} is a device or a pipe; name a file")
    if os.path.lexists(target) and not replace:
        raise UserError(f"{target} exists; --force replaces a file")


@contextmanager
def new_file(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Write a file atomically: yields an empty temporary file beside `target`, to which the block writes.

    After the block, the temporary file replaces `target`. After an exception it is removed, and `target` is unchanged.
    Raises UserError like `check_target`, or if `target` cannot be created; OSError if the disk refuses later.
    """
    check_target(target, replace=replace)
    partial = target.with_name(f".{target.stem[:200]}.{uuid4().hex}{target.suffix}")
    try:  # a signal may come as soon as the file is there
        try:
            partial.touch(exist_ok=False)
        except OSError as error:  # its message names the temporary file
            raise UserError(f"{target} cannot be written: {error.strerror}") from None
        yield partial
        flush(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    flush(target.parent)


def open_to_append(path: Path) -> TextIO:
    """Open a text file to append. Raises OSError if the path is no regular file, such as a link to another file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "a", encoding="utf-8")


def flush(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """The lock of a folder. Raises UserError if another process holds it, and OSError if the disk refuses.

    It is a POSIX record lock: worker processes are forks, which would inherit a lock of `flock` and keep it alive.
    """

    def __init__(self, folder: Path):
        self._path = folder / "lock"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 512, 0).decode(errors="replace")
            os.close(self._descriptor)
            raise UserError(f"{folder} is in use by {holder}; stop it, or use another run.name") from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._holder = f"process {os.getpid()} on {socket.gethostname()} since {since}".encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._holder, 0)

    def check(self) -> None:
        """Raise UserError if the lock file was removed or replaced, or the folder was moved."""
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except OSError:
            is_same = False
        if not is_same or os.pread(self._descriptor, 512, 0) != self._holder:
            raise UserError(
                f"{self._path} is no longer the lock of this process: it was removed, or the folder was moved; "
                "run.resume=auto continues from the last checkpoint"
            )

    def close(self) -> None:
        """Release the lock. Call it once."""
        os.close(self._descriptor)
