"""MovieLens as GroupLens publishes it: ratings.csv of ml-20m, ml-25m, ml-32m or latest, or the zip file that holds it.

Its licence forbids passing the data on. Fetch it from https://grouplens.org/datasets/movielens.
"""

import csv
import io
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.convert.reading import MAX_SKIPPED_SHARE, OnError
from fastgpu.process.launch import UserError
from fastgpu.storage.file import not_found

PARSED_ROWS = 1_000_000
"""Lines that are parsed at a time."""
COLUMNS = ("userId", "movieId", "rating")
RATING = np.dtype([("user", np.int32), ("item", np.int32), ("rating", np.float32)])
MAX_EXPANSION = 100
"""Maximum ratio of the size of a file to its size in the zip file. Ratings reach 4 to 5; more is a decompression bomb.
"""


class Ratings(NamedTuple):
    """The ratings above the threshold, in the order of the file."""

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
    """Users and items of the ratings > `above` in ratings.csv.

    columns: names of the columns of the user, the item and the rating. on_progress: called with the number of rows that
    were read since the last call, and the share of the file that is done. Raises UserError with file and line for a
    line that is not a rating; or with on_error="skip", if more than 1 % of the lines are not.
    """
    skipped: list[str] = []
    try:
        blocks = [block[block["rating"] > above] for block in _parse_fast(source, columns, on_progress)]
    except UserError:  # which is a ValueError, too
        raise
    except ValueError:  # NumPy does not say in which line
        all_blocks, skipped = _parse_by_line(source, columns, on_error)
        blocks = [block[block["rating"] > above] for block in all_blocks]
    if not sum(len(block) for block in blocks):
        raise UserError(f"{source} has no rating above {above:g}")
    ratings = np.concatenate(blocks)
    return Ratings(ratings["user"].copy(), ratings["item"].copy(), skipped)


def _parse_fast(
    source: Path, columns: Sequence[str], on_progress: Callable[[int, float], object]
) -> Iterator[np.ndarray]:
    """Blocks of ratings, (rows,) RATING. Raises ValueError if a line is not a rating."""
    with _open_text(source) as (file, n_bytes):
        places = _find_columns(source, file.readline(), columns)
        while True:
            block = _parse(file, places)
            on_progress(len(block), file.buffer.tell() / n_bytes)  # type: ignore[attr-defined]
            yield block
            if len(block) < PARSED_ROWS:
                return


def _parse(lines: io.TextIOWrapper | list[str], places: list[int]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "input contained no data"
        block = np.loadtxt(lines, RATING, delimiter=",", usecols=places, max_rows=PARSED_ROWS, comments=None, ndmin=1)
    if len(block) and (block["user"].min() < 0 or block["item"].min() < 0 or not np.isfinite(block["rating"]).all()):
        raise ValueError("not a rating")
    return block


def _parse_by_line(source: Path, columns: Sequence[str], on_error: OnError) -> tuple[list[np.ndarray], list[str]]:
    """(blocks of ratings, messages for the other lines). Five times slower, but it knows which line is wrong."""
    blocks = []
    skipped: list[str] = []
    n_lines = 0
    with _open_text(source) as (file, _):
        places = _find_columns(source, file.readline(), columns)
        is_rating = _line_pattern(places).fullmatch
        good_lines: list[str] = []
        for number, line in enumerate(file, 2):
            n_lines += 1
            if is_rating(line):
                good_lines.append(line)
            elif line.strip():
                skipped.append(f"{source}:{number}: {line.strip()[:80]!r} is not {','.join(columns)}")
                if on_error == "stop":
                    raise UserError(f"{skipped[0]}; --on-error skip leaves such lines out")
            if len(good_lines) == PARSED_ROWS:
                blocks.append(_parse(good_lines, places))
                good_lines = []
        blocks.append(_parse(good_lines, places))
    if len(skipped) > MAX_SKIPPED_SHARE * n_lines:
        raise UserError(
            f"{len(skipped):,} of {n_lines:,} lines are not ratings, more than 1 %; the first: {skipped[0]}"
        )
    return blocks, skipped


def _line_pattern(places: list[int]) -> re.Pattern[str]:
    """Matches a line with whole numbers in the first two places and a number in the third."""
    user, item, rating = places
    patterns = {user: r"\d{1,9}", item: r"\d{1,9}", rating: r"\d+(\.\d+)?"}
    columns = [patterns.get(place, "[^,]*") for place in range(max(places) + 1)]
    return re.compile(",".join(columns) + r"(,.*)?\s*")


def _find_columns(source: Path, header: str, columns: Sequence[str]) -> list[int]:
    """The place of each column in the lines of the file."""
    names = next(csv.reader([header.lstrip("\ufeff")]), [])
    missing = [name for name in columns if name not in names]
    if len(columns) != 3:
        missing = [",".join(columns)]
    if missing:
        raise UserError(
            f"{source} has the columns {', '.join(names) or 'none'}, and not {missing[0]}; --columns names those of "
            "user, item and rating"
        )
    return [names.index(name) for name in columns]


@contextmanager
def _open_text(source: Path) -> Iterator[tuple[io.TextIOWrapper, int]]:
    """The text of ratings.csv, alone or in a zip file, and its size in bytes."""
    try:
        if not zipfile.is_zipfile(source):
            with source.open(encoding="utf-8", newline=None) as file:
                yield file, max(1, source.stat().st_size)
            return
        with zipfile.ZipFile(source) as archive:
            info = _find_member(source, archive)
            with archive.open(info) as member, io.TextIOWrapper(member, encoding="utf-8") as text:
                yield text, max(1, info.file_size)
    except FileNotFoundError:
        raise not_found(source) from None
    except IsADirectoryError:
        raise UserError(f"{source} is a folder; name the file ratings.csv in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{source} is not text; give ratings.csv, or the zip file that holds it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source} is not a whole zip archive: {error}; fetch it again") from None


def _find_member(source: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "ratings.csv"]
    if len(members) != 1:
        raise UserError(
            f"{source} has {len(members)} files ratings.csv; give a zip file of MovieLens, or the CSV itself"
        )
    info = members[0]
    if info.file_size > MAX_EXPANSION * max(1, info.compress_size):
        raise UserError(
            f"{source}: its ratings.csv grows from {info.compress_size:,} to {info.file_size:,} bytes: this is not "
            "MovieLens"
        )
    return info
