"""Files that get their names together, when all of them are complete, and that one process writes at a time.

Until then, the files for x.h5 lie in the folder .x.h5.partial beside it, which a lock keeps for one process.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from fastgpu.process.atomic import flush
from fastgpu.process.launch import UserError
from fastgpu.process.lock import NAME as LOCK
from fastgpu.process.lock import FolderLock, InUseError

COMPLETE = "complete"
"""A file of this name says that the others are complete, so that they are never removed, but get their names."""


def partial_folder(target: Path) -> Path:
    """Where the files for `target` are written until they are complete."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write files in. At the end they all get their names beside `target`; after an exception, none does.

    A process that is killed leaves the folder, which `remove_unfinished` looks for. Raises UserError if another process
    writes to the same target.
    """
    folder = partial_folder(target)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FolderLock(folder, patience_s=0)
    except InUseError as error:
        raise UserError(f"{target} is being written by {error.holder}; wait for it, or choose another name") from None
    try:
        for path in _files_of(folder):
            path.unlink()
        yield folder
        for path in _files_of(folder):
            flush(path)
        (folder / COMPLETE).touch()
        flush(folder)
    finally:
        _close(folder, lock)


def remove_unfinished(parent: Path) -> None:
    """Remove what converters that were killed have left in a folder. Files that were complete get their names.

    It is printed. What another process still writes is left alone.
    """
    for path in sorted(parent.glob(f".*.partial/{LOCK}")):
        folder = path.parent
        try:
            lock = FolderLock(folder, patience_s=0)
        except (UserError, OSError):
            continue
        files = _files_of(folder)
        if folder / COMPLETE in files:
            names = ", ".join(file.name for file in files if file.name != COMPLETE)
            print(f"{names} in {parent}: complete when the converter was killed that wrote them, and named now")
        else:
            n_bytes = sum(file.stat().st_size for file in files)
            print(f"{folder} is removed: a converter that was killed has left it ({n_bytes / 1e6:,.1f} MB)")
        _close(folder, lock)


def _files_of(folder: Path) -> list[Path]:
    """All files but the lock."""
    return sorted(path for path in folder.iterdir() if path.name != LOCK)


def _close(folder: Path, lock: FolderLock) -> None:
    """Give the files their names, if all are complete, and remove the folder.

    Of several files, those that are replaced go first. If the process is killed meanwhile, a file is missing, which is
    noticed when it is opened; old and new files are never mixed.
    """
    files = _files_of(folder)
    if folder / COMPLETE in files:
        files.remove(folder / COMPLETE)
        if len(files) > 1:
            for path in files:
                (folder.parent / path.name).unlink(missing_ok=True)
        for path in files:
            path.replace(folder.parent / path.name)
        flush(folder.parent)
    for path in (*_files_of(folder), folder / LOCK):
        path.unlink()
    lock.close()
    with suppress(OSError):  # another process may have come in
        folder.rmdir()


# ---------------------------------------------------------------------------------------------- signals

_received_signals: list[int] = []


def exit_on_signals() -> None:
    """End the process at Ctrl-C and SIGTERM without a traceback; context managers remove what is not complete.

    The exit code is 128 + the number of the signal, as shells have it. Python drops an exception that is raised while
    a destructor runs, so the handler also remembers the signal, and the loop that writes asks for it.
    """
    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)


def exit_if_signalled() -> None:
    """Exit if a signal came whose exception was dropped."""
    if _received_signals:
        sys.exit(128 + _received_signals[0])


def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Report an exception that a destructor raised, unless it is the exit that a signal asked for."""
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)


def _handle(number: int, frame: FrameType | None) -> None:
    _received_signals.append(number)
    exit_if_signalled()
