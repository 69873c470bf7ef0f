"""Ctrl-C and SIGTERM end the process without a traceback, and context managers remove the files that are not complete.

The handler raises SystemExit. Python drops an exception that is raised while a destructor runs, so the handler also
remembers the signal, and the writing loop asks for it.
"""

import signal
import sys
from types import FrameType

_received: list[int] = []


def exit_on_signals() -> None:
    """Handle SIGINT and SIGTERM from now on. The exit code is 128 + the number of the signal, as shells have it."""
    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)


def exit_if_signalled() -> None:
    """Exit if a signal came whose exception was dropped."""
    if _received:
        sys.exit(128 + _received[0])


def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Report an exception that a destructor raised, unless it is the exit that a signal asked for."""
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)


def _handle(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    sys.exit(128 + number)
