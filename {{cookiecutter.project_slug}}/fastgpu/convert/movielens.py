"""MovieLens as GroupLens publishes it: ratings.csv of ml-20m, ml-25m, ml-32m or latest, or the zip file that holds it.

Its licence forbids passing the data on. Fetch it from https://grouplens.org/datasets/movielens.
"""

import csv
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.convert.reading import MAX_SKIPPED_SHARE, OnError, explain_errors
from fastgpu.process.launch import UserError

PARSED_ROWS = 1_000_000
"""Lines that are parsed at a time."""
COLUMNS = ("userId", "movieId", "rating")
RATING = np.dtype([("user", np.int32), ("item", np.int32), ("rating", np.float32)])
MAX_EXPANSION = 100
"""Maximum ratio of the size of a file to its size in the zip file. Ratings reach 4 to 5; more is a decompression bomb.
"""


class NotARatingError(Exception):
    """Some line is not a rating."""


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
    blocks = []
    try:
        for block in _parse_fast(source, columns, on_progress):
            blocks.append(block[block["rating"] > above])
    except NotARatingError:
        blocks = []
        for block in _parse_by_line(source, columns, on_error, skipped):
            blocks.append(block[block["rating"] > above])
    ratings = np.concatenate(blocks)
    if not len(ratings):
        raise UserError(f"{source} has no rating above {above:g}")
    return Ratings(ratings["user"].copy(), ratings["item"].copy(), skipped)


def _parse_fast(
    source: Path, columns: Sequence[str], on_progress: Callable[[int, float], object]
) -> Iterator[np.ndarray]:
    """Blocks of ratings, (rows,) RATING. Raises NotARatingError without the line, which NumPy does not say."""
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
        try:
            block = np.loadtxt(
                lines, RATING, delimiter=",", usecols=places, max_rows=PARSED_ROWS, comments=None, ndmin=1
            )
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise NotARatingError from error
    if len(block) and (block["user"].min() < 0 or block["item"].min() < 0 or not np.isfinite(block["rating"]).all()):
        raise NotARatingError
    return block


def _parse_by_line(source: Path, columns: Sequence[str], on_error: OnError, skipped: list[str]) -> Iterator[np.ndarray]:
    """Blocks of ratings. Five times slower, but messages for the other lines are added to `skipped`."""
    with _open_text(source) as (file, _):
        places = _find_columns(source, file.readline(), columns)
        is_rating = _line_pattern(places).fullmatch
        good_lines: list[str] = []
        number = 1
        for number, line in enumerate(file, 2):
            if is_rating(line):
                good_lines.append(line)
            elif line.strip():
                skipped.append(f"{source}:{number}: {line.strip()[:80]!r} is not {','.join(columns)}")
                if on_error == "stop":
                    raise UserError(f"{skipped[0]}; --on-error skip leaves such lines out")
            if len(good_lines) == PARSED_ROWS:
                yield _parse(good_lines, places)
                good_lines = []
        yield _parse(good_lines, places)
    n_lines = number - 1
    if len(skipped) > MAX_SKIPPED_SHARE * n_lines:
        raise UserError(
            f"{len(skipped):,} of {n_lines:,} lines are not ratings, more than 1 %; the first: {skipped[0]}"
        )


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
    with explain_errors(source, "ratings.csv, or a whole zip archive with it"):
        if not zipfile.is_zipfile(source):
            with source.open(encoding="utf-8") as file:
                yield file, source.stat().st_size
            return
        with zipfile.ZipFile(source) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == "ratings.csv"]
            if len(members) != 1:
                raise UserError(
                    f"{source} has {len(members)} files ratings.csv; give a zip file of MovieLens, or the CSV itself"
                )
            (info,) = members
            if info.file_size > MAX_EXPANSION * info.compress_size:
                raise UserError(
                    f"{source}: its ratings.csv grows from {info.compress_size:,} to {info.file_size:,} bytes: this is "
                    "not MovieLens"
                )
            with archive.open(info) as member, io.TextIOWrapper(member, encoding="utf-8") as text:
                yield text, info.file_size
