"""Functions that the tools beside train.py share: set-up, checks of paths, and cells of CSV files."""

import glob
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from fastgpu.process.files import not_found
from fastgpu.process.launch import ESCAPES, UserError, end_on_interrupt, without_secrets

FORMULA = re.compile(r"[=@\t\r]|[+-](?!([\d.]+(e[+-]?\d+)?)?$)")
"""Beginning of a formula: a sign, unless only a number follows."""


class _Terminal(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(without_secrets(text.translate(ESCAPES)))


def start_tool() -> None:
    """Set up a command-line tool: clean up on SIGTERM and SIGHUP, and print untrusted names safely.

    The two signals raise SystemExit, so that incomplete files are removed. Standard output and error show control
    characters, and characters that they cannot encode, as `\\x1b`.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    end_on_interrupt()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # not closed, not of a notebook, and not a _Terminal already
            terminal = _Terminal(
                stream.buffer,
                stream.encoding,
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, terminal)


def check_exist(*paths: str | Path, cure: str = "") -> None:
    """Raise UserError unless each path, `file.h5::/group` or glob matches a file. URLs are not checked."""
    for file in (str(path).partition("::")[0] for path in paths):
        if "://" not in file and not os.path.lexists(file) and not glob.glob(file):  # noqa: PTH207 (absolute ones, too)
            raise UserError(f"{not_found(file)}; {cure}") if cure else not_found(file)


def csv_cell(value: Any) -> Any:
    """A value for a CSV file. Text is escaped, and gets a ' at its beginning if a spreadsheet would read a formula."""
    if isinstance(value, str):
        value = ("'" if FORMULA.match(value) else "") + value.translate(ESCAPES)
    return value
