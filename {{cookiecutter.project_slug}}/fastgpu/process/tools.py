"""What the tools beside train.py share: their start, and the cells of the CSV files that they write."""

import io
import re
import signal
import sys
from typing import Any

from fastgpu.process.launch import ESCAPES, end_on_interrupt, without_secrets

FORMULA = re.compile(r"[=@\t\r]|[+-](?!([\d.]+(e[+-]?\d+)?)?$)")
"""Beginning of a formula: a sign, unless only a number follows."""


class _Terminal(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(without_secrets(text.translate(ESCAPES)))


def start_tool() -> None:
    """Set up a program that writes files, and shows names of files and classes, whatever these hold.

    SIGTERM and SIGHUP end it by an exception, so that files that are not complete are removed. Standard output and
    error show what terminals obey or cannot encode as `\\x1b`.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    end_on_interrupt()
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None: it was closed
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, _Terminal(stream.buffer, stream.encoding, "backslashreplace", **how))


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: escaped text, with a ' before what a spreadsheet would take for a formula."""
    if isinstance(value, str):
        value = ("'" if FORMULA.match(value) else "") + value.translate(ESCAPES)
    return value
