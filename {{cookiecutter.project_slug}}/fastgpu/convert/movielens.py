"""MovieLens as GroupLens publishes it: ratings.csv of ml-20m, ml-25m, ml-32m or latest, or the zip file that holds it.

Its licence forbids passing it on: fetch it yourself, https://grouplens.org/datasets/movielens.
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
from typing import IO, Literal, NamedTuple

import numpy as np

from fastgpu.process.launch import UserError

PARSED_ROWS = 1_000_000  # at a time
COLUMNS = ("userId", "movieId", "rating")
RATING = np.dtype([("user", np.int32), ("item", np.int32), ("rating", np.float32)])
MAX_SKIPPED = 0.01
MAX_EXPANSION = 100  # of a zip file's member; ratings take a quarter to a fifth


class Ratings(NamedTuple):
    """Those above the threshold, in the file's order."""

    users: np.ndarray
    """(events,) int32"""
    items: np.ndarray
    skipped: list[str]
    """A line for each that cannot be understood."""


def read_ratings(
    source: Path,
    above: float = 3.5,
    columns: Sequence[str] = COLUMNS,
    on_error: Literal["stop", "skip"] = "stop",
    tick: Callable[[int, float], object] = lambda rows, done: None,
) -> Ratings:
    """The events of ratings.csv: users and items of each rating > `above`.

    columns: names of the user's, the item's and the rating's. tick: called with the rows read and the share of the file
    that is done. Raises UserError with file and line for one that is no rating, or with "skip" if more than 1 % are.
    """
    skipped = list[str]()
    try:
        liked = [block[block["rating"] > above] for block in _blocks(source, columns, tick)]
    except UserError:  # which is a ValueError, too
        raise
    except ValueError:  # which line was it?
        found, skipped = _read_carefully(source, columns, on_error)
        liked = [block[block["rating"] > above] for block in found]
    if not sum(map(len, liked)):
        raise UserError(f"{source} has no rating above {above:g}")
    users, items = (np.concatenate([block[name] for block in liked]) for name in ("user", "item"))
    return Ratings(users, items, skipped)


def _blocks(source: Path, columns: Sequence[str], tick: Callable[[int, float], object]) -> Iterator[np.ndarray]:
    """(rows,) RATING at a time. Raises ValueError for what is none."""
    with _opened(source) as (file, size):
        where = _places(source, file.readline(), columns)
        while True:
            block = _parse(file, where)
            tick(len(block), file.buffer.tell() / size)  # type: ignore[attr-defined]
            yield block
            if len(block) < PARSED_ROWS:
                return


def _parse(lines: IO[str] | list[str], where: list[int]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "input contained no data"
        block = np.loadtxt(lines, RATING, delimiter=",", usecols=where, max_rows=PARSED_ROWS, comments=None, ndmin=1)
    if len(block) and (block["user"].min() < 0 or block["item"].min() < 0 or not np.isfinite(block["rating"]).all()):
        raise ValueError("no rating")
    return block


def _read_carefully(source: Path, columns: Sequence[str], on_error: str) -> tuple[list[np.ndarray], list[str]]:
    """The same line by line: five times slower, but it knows which line is wrong."""
    found, skipped, rows = list[np.ndarray](), list[str](), 0
    with _opened(source) as (file, _):
        where = _places(source, file.readline(), columns)
        patterns = dict.fromkeys(where[:2], r"\d{1,9}") | {where[2]: r"\d+(\.\d+)?"}
        line_of = re.compile(",".join(patterns.get(column, "[^,]*") for column in range(max(where) + 1)) + r"(,.*)?\s*")
        good: list[str] = []
        for number, line in enumerate(file, 2):
            rows += 1
            if line_of.fullmatch(line):
                good.append(line)
            elif line.strip():
                skipped.append(f"{source}:{number}: {line.strip()[:80]!r} is no {','.join(columns)}")
                if on_error == "stop":
                    raise UserError(f"{skipped[0]}; --on-error skip leaves such lines out")
            if len(good) == PARSED_ROWS:
                found.append(_parse(good, where))
                good = []
        found.append(_parse(good, where))
    if len(skipped) > MAX_SKIPPED * rows:
        raise UserError(f"{len(skipped):,} of {rows:,} lines are no ratings, more than 1 %; the first: {skipped[0]}")
    return found, skipped


def _places(source: Path, header: str, columns: Sequence[str]) -> list[int]:
    names = next(csv.reader([header.lstrip("\ufeff")]), [])
    if len(columns) != 3 or (missing := [name for name in columns if name not in names]):
        wanted = missing[0] if len(columns) == 3 else ",".join(columns)
        raise UserError(
            f"{source} has the columns {', '.join(names) or 'none'}, and not {wanted}; "
            "--columns names those of user, item and rating"
        )
    return [names.index(name) for name in columns]


@contextmanager
def _opened(source: Path) -> Iterator[tuple[IO[str], int]]:
    """The text of ratings.csv, alone or in a zip file, and its bytes."""
    try:
        if not zipfile.is_zipfile(source):
            with source.open(encoding="utf-8", newline=None) as file:
                yield file, max(1, source.stat().st_size)
            return
        with zipfile.ZipFile(source) as archive:
            members = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "ratings.csv"]
            if len(members) != 1:
                raise UserError(
                    f"{source} has {len(members)} files ratings.csv; give one of MovieLens, or the CSV itself"
                )
            info = members[0]
            if info.file_size > MAX_EXPANSION * max(1, info.compress_size):
                raise UserError(
                    f"{source}: its ratings.csv grows from {info.compress_size:,} to {info.file_size:,} "
                    "bytes: it is not what it should be"
                )
            with archive.open(info) as member, io.TextIOWrapper(member, encoding="utf-8") as text:
                yield text, max(1, info.file_size)
    except FileNotFoundError:
        raise UserError(f"{source} does not exist (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"{source} is a folder; name ratings.csv in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{source} is not text: give ratings.csv, or the zip file that holds it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source} is not a whole zip archive: {error}; fetch it again") from None
