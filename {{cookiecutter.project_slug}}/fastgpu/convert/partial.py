"""Files that get their names together, when all of them are complete. Until then they lie in a folder beside them."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType

from fastgpu.process.atomic import flush


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write files in. At the end they all get their names beside `target`; after an exception, none does.

    A process that is killed by SIGKILL leaves the folder, which may be removed by hand.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        paths = sorted(folder.iterdir())
        for path in paths:
            flush(path)
        for path in paths:
            path.replace(target.parent / path.name)
        flush(target.parent)
    finally:
        shutil.rmtree(folder)


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
