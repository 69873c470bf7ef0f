"""Limits the number of broken rows, and lists these rows beside the target.

x.h5.broken.txt     all broken rows, if there are too many: then no file of rows is written
x.h5.skipped.txt    the broken rows that were left out
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fastgpu.process.files import new_file
from fastgpu.process.launch import ESCAPES, UserError, list_first

CURE = "--on-error skip leaves out 1 % at most, skip=10% more"


def refuse_broken(reasons: Sequence[str], n_rows: int, max_broken: float | None, target: Path | None) -> None:
    """Raise UserError with the first reasons if more rows are broken than may be left out.

    reasons: one for each broken row. n_rows: number of all rows. max_broken: maximum share of broken rows; above 0, one
    row is always allowed; None is 0. target: all reasons are listed beside this file. None: no list is written.
    """
    n_allowed = max(1, int(n_rows * max_broken + 1e-6)) if max_broken else 0
    if len(reasons) <= n_allowed:
        return
    listed = ""
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_lines(broken_list(target), reasons)
        listed = f", which {broken_list(target)} lists"
    found = f"{len(reasons):,} of {n_rows:,} rows are broken{listed}; nothing else was written; {CURE}"
    raise UserError("\n  ".join([f"{found}:", list_first(reasons, "\n  ")]))


def none_whole(name: str, broken: Mapping[int, str]) -> UserError:
    """The error for a source in which all rows are broken."""
    return UserError(f"{name}: none of the rows can be read:\n  {list_first(in_order(broken), chr(10) + '  ')}")


def in_order(broken: Mapping[int, str]) -> list[str]:
    """The reasons of {row: reason}, in the order of the rows."""
    return [broken[row] for row in sorted(broken)]


def broken_list(target: Path) -> Path:
    """Path of the list that is written instead of the target if there are too many broken rows."""
    return Path(f"{target}.broken.txt")


def skipped_list(target: Path) -> Path:
    """Path of the list of the broken rows that were left out of the target."""
    return Path(f"{target}.skipped.txt")


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write lines to a file, and replace an old one. Characters that cannot be printed are escaped."""
    with new_file(path, replace=True) as partial:
        partial.write_text("\n".join([*lines, ""]).translate(ESCAPES), encoding="utf-8")
