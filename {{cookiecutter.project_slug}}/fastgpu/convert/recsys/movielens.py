"""MovieLens as GroupLens publishes it: ratings.csv, ratings.dat or u.data, or the zip file that holds it.

Its licence forbids passing the data on. Fetch it from https://grouplens.org/datasets/movielens.
"""

import csv
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.convert.reading import MAX_SKIPPED_SHARE, OnError, explain_errors
from fastgpu.process.launch import UserError

PARSED_ROWS = 1_000_000
"""Lines that are parsed at a time."""
COLUMNS = ("userId", "movieId", "rating")
PUBLISHED = ("ratings.csv", "ratings.dat", "u.data")
"""Names of the ratings in the zip files: of ml-20m and later ones, of ml-1m and ml-10m, and of ml-100k."""
WITHOUT_HEADER = re.compile(r"\d+(::|\t)\d+\1\d+(\.\d+)?(\1.*)?\s*")
"""A line of ratings.dat or u.data."""
RATING = [("user", np.int32), ("item", np.int32), ("rating", np.float32)]
ID_CURE = (
    "users and items should be whole numbers (12, not 12.0) from 0 below 2^31: pandas.factorize makes them of other ids"
)
MAX_HEADER_CHARS = 1 << 16
MAX_EXPANSION = 100
"""Maximum ratio of the size of a file to its size in the zip file. Ratings reach 4 to 5; more is a decompression bomb.
"""


class Ratings(NamedTuple):
    """The ratings above the threshold, or all events without ratings, in the order of the file."""

    users: np.ndarray
    """(events,) int32"""
    items: np.ndarray
    """(events,) int32"""
    skipped: list[str]
    """A message for each line that is not a rating."""


def read_ratings(
    source: Path,
    above: float = 3.5,
    *,
    columns: Sequence[str] = COLUMNS,
    on_error: OnError = "stop",
    on_progress: Callable[[int, float], object] = lambda n_rows, share_done: None,
) -> Ratings:
    """Users and items of the ratings > `above` in a file of ratings.

    columns: names of the columns of the user, the item and the rating, separated by a comma, `;` or a tab; without a
    header, they are the first ones. Without the name of a rating, every line counts. on_progress: called with the
    number of rows that were read since the last call, and the share of the file that is done. Raises UserError with
    file and line for a line that is not a rating; or with on_error="skip", if more than 1 % of the lines are not.
    """
    blocks = []
    skipped: list[str] = []
    with _open_text(source) as (file, n_bytes):
        header = file.readline(MAX_HEADER_CHARS)
        places, delimiter = _find_columns(source, header, columns)
        n_columns = len(next(csv.reader([header], delimiter=delimiter)))
        is_usual_rating = _line_pattern(places, delimiter, n_columns).fullmatch

        def is_rating(line: str) -> bool:
            """Whether a line alone is what NumPy takes among others, such as 4e0 or -1."""
            is_whole = line.count(delimiter) == n_columns - 1
            return bool(is_usual_rating(line) or (is_whole and _parse([line], places, delimiter) is not None))

        n_lines = n_headers = 0 if WITHOUT_HEADER.fullmatch(header) else 1
        if not n_headers:
            file.seek(0)
        while lines := list(islice(file, PARSED_ROWS)):
            widths = set(map(str.count, lines, repeat(delimiter)))  # NumPy does not count the columns
            block = _parse(lines, places, delimiter) if widths <= {0, n_columns - 1} else None
            if block is None:  # NumPy does not say which line is not a rating
                for number, line in enumerate(lines, n_lines + 1):
                    if line.strip() and not is_rating(line):
                        width = len(next(csv.reader([line], delimiter=delimiter)))
                        fault = f": {width} columns, not {n_columns} (a decimal comma?)" if width != n_columns else ""
                        skipped.append(f"{source}:{number}: {line.strip()[:80]!r} is not {','.join(columns)}{fault}")
                        if on_error == "stop":
                            raise UserError(f"{skipped[0]}; --on-error skip leaves such lines out; {ID_CURE}")
                block = _parse(list(filter(is_rating, lines)), places, delimiter)
                assert block is not None
            n_lines += len(lines)
            blocks.append(block[block["rating"] > above] if len(places) == 3 else block)
            on_progress(len(block), file.buffer.tell() / n_bytes)  # type: ignore[attr-defined]
    n_lines -= n_headers
    if len(skipped) > MAX_SKIPPED_SHARE * n_lines:
        counts = f"{len(skipped):,} of {n_lines:,} lines are not ratings, more than 1 %"
        raise UserError(f"{counts}; the first: {skipped[0]}; {ID_CURE}")
    if not sum(map(len, blocks)):
        raise UserError(f"{source} has no rating above {above:g}" if len(places) == 3 else f"{source} has no events")
    ratings = np.concatenate(blocks)
    return Ratings(ratings["user"].copy(), ratings["item"].copy(), skipped)


def _parse(lines: list[str], places: list[int], delimiter: str) -> np.ndarray | None:
    """(rows,) RATING, or its first two fields if there are no ratings. None if a line is not a rating."""
    dtype = np.dtype(RATING[: len(places)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "input contained no data"
        warnings.simplefilter("error", DeprecationWarning)  # NumPy before 2.4 would take 4.7 for the item 4
        try:
            block = np.loadtxt(lines, dtype, delimiter=delimiter, usecols=places, comments=None, ndmin=1)
        except (ValueError, DeprecationWarning):
            return None
    is_rating = (block["user"] >= 0) & (block["item"] >= 0)
    if len(places) == 3:
        is_rating &= np.isfinite(block["rating"])
    return block if is_rating.all() else None


def _line_pattern(places: list[int], delimiter: str, n_columns: int) -> re.Pattern[str]:
    """Matches a line of `n_columns` with two whole numbers and a number. Quoted text behind may hold the delimiter."""
    patterns = dict(zip(places, ["[0-9]{1,9}", "[0-9]{1,9}", r"[0-9]{1,9}(\.[0-9]+)?"], strict=False))
    separator = re.escape(delimiter)
    columns = [patterns.get(place, f"[^{separator}]*") for place in range(max(places) + 1)]
    other = rf'{separator}(?>(?:"[^"]*")+(?={separator}|\s*$)|[^{separator}]*)'
    return re.compile(separator.join(columns) + f"(?:{other}){{{n_columns - len(columns)}}}" + r"\s*")


def _find_columns(source: Path, header: str, columns: Sequence[str]) -> tuple[list[int], str]:
    """The place of each column in the lines of the file, and the character that separates them."""
    if len(columns) not in (2, 3):
        raise UserError(f"--columns is {','.join(columns)}; it should be USER,ITEM,RATING or USER,ITEM")
    if line := WITHOUT_HEADER.fullmatch(header):
        meaning = "user, item and rating" if len(columns) == 3 else "user and item"
        print(f"{source} has no header; its columns are taken for {meaning}")
        places, delimiter = ([0, 2, 4], ":") if line[1] == "::" else ([0, 1, 2], "\t")  # an empty column between colons
        return places[: len(columns)], delimiter
    delimiter = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header.lstrip("\ufeff")], delimiter=delimiter), [])]
    if names and all(re.fullmatch(r"[\d.]+", name) for name in names):
        raise UserError(
            f"{source} has no header, but begins with {header.strip()}; write one, such as user,item,rating"
        )
    if missing := [name for name in columns if names.count(name) != 1]:
        found = f"{source} has the columns {', '.join(names) or 'none'}, and not one {missing[0]}"
        raise UserError(f"{found}; --columns names those of user, item and rating, or of user and item alone")
    return [names.index(name) for name in columns], delimiter


@contextmanager
def _open_text(source: Path) -> Iterator[tuple[io.TextIOWrapper, int]]:
    """The text of the ratings, alone or in a zip file, and its size in bytes."""
    with explain_errors(source, "ratings.csv, or a whole zip archive with it"):
        if not zipfile.is_zipfile(source):
            with source.open(encoding="utf-8") as file:
                yield file, source.stat().st_size
            return
        with zipfile.ZipFile(source) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name in PUBLISHED]
            if len(members) != 1:
                found = f"{source} has {len(members)} files {' or '.join(PUBLISHED)}"
                raise UserError(f"{found}; give a zip file of MovieLens, or the file itself")
            (info,) = members
            n_packed_bytes = min(info.compress_size, source.stat().st_size)
            if info.file_size > MAX_EXPANSION * n_packed_bytes:  # zipfile unpacks no more than the size it claims
                growth = f"its {info.filename} grows from {n_packed_bytes:,} to {info.file_size:,} bytes"
                raise UserError(f"{source}: {growth}: this is not MovieLens")
            with archive.open(info) as member, io.TextIOWrapper(member, encoding="utf-8") as text:
                yield text, info.file_size
