"""Which user liked which item: MovieLens as GroupLens publishes it, or any CSV of users, items and ratings.

MovieLens is ratings.csv, ratings.dat or u.data, or the zip file that holds one of them. Its licence forbids passing the
data on: fetch it from https://grouplens.org/datasets/movielens.
"""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from fastgpu.convert.reader import explain_errors
from fastgpu.convert.tables import Table, read_text
from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes

COLUMNS = ("userId", "movieId", "rating")
TIME = "timestamp"
PUBLISHED = ("ratings.csv", "ratings.dat", "u.data")
"""Names of the ratings in the zip files: of ml-20m and later ones, of ml-1m and ml-10m, and of ml-100k."""
MEMORY_PER_BYTE = 4
"""Memory that reading takes for each byte of the text: 3 for a file of zeros."""
WITHOUT_HEADER = re.compile(rb"\d+(::|\t)\d+\1\d+(\.\d+)?(\1.*)?\s*")
"""The first line of ratings.dat or u.data."""


def read_events(
    source: str | Path, columns: Sequence[str] = COLUMNS, above: float = 3.5, *, has_header: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(users, items), int32 (events,), of the ratings > `above`, in the order of the file.

    columns: names of the columns of the user, the item, the rating and its time. Without a rating, every line counts.
    Of several ratings of a user and an item, the last one counts: by its time, or `timestamp`, or else in the file.
    has_header: see `Table`; MovieLens without one has `columns`. Raises UserError with the line of what is no event.
    """
    if len(columns) not in (2, 3, 4):
        raise UserError(f"--columns is {','.join(columns)}; it should be USER,ITEM,RATING,TIME or less: USER,ITEM")
    source = Path(source)
    columns = [name.strip() for name in columns]
    content = _read(source)
    names: Sequence[str] = ()
    if has_header and (line := WITHOUT_HEADER.fullmatch(content.partition(b"\n")[0])):
        print(f"{source} has no header; its columns are taken for {', '.join(columns)}")
        content = content.replace(line[1], b"\t")
        names, has_header = [*columns, TIME][: line[0].count(line[1]) + 1], False
    table = Table(source, content=content, names=names, has_header=has_header)
    cure = "; number texts, and keep the list of them: numbers, names = pandas.factorize(column)"
    users, items = (table.whole_numbers(name, np.iinfo(np.int32).max, cure).astype(np.int32) for name in columns[:2])
    if len(columns) > 2:
        texts = table.texts(columns[2])
        ratings = texts.cast(pl.Float64, strict=False)
        table.check(texts, ratings.is_finite().fill_null(False), "it should be a number")
        counts = ratings.to_numpy() > above
        time = columns[3] if len(columns) == 4 else TIME * (TIME in table.names)
        counts &= _is_last(table, users.astype(np.int64) << 32 | items, counts, time)
        users, items = users[counts], items[counts]
        if not len(users):
            raise UserError(f"{source} has no rating above {above:g}")
    return users, items


def _is_last(table: Table, pairs: np.ndarray, counts: np.ndarray, time: str) -> np.ndarray:
    """(events,) bool: whether an event is the last one of its user and item, by a column of times, if it is named.

    pairs: (events,) int64, a number for each user and item. counts: (events,) bool, whether the rating is a good one.
    Warns of pairs whose ratings disagree.
    """
    is_last = np.ones(len(pairs), bool)
    if len(np.unique(pairs)) < len(pairs):
        times = _parse_times(table, time) if time else np.arange(len(pairs))
        order = np.lexsort((times, pairs))  # stable: of equal times, the later line is the last
        ends = np.diff(pairs[order], append=-1) != 0
        is_last[order[~ends]] = False
        pair_of = np.cumsum(ends) - ends
        n_changed = len(np.unique(pair_of[counts[order] != counts[order][ends][pair_of]]))
        rule = f"by {time}" if time else "in the file: name a column of times as the fourth of --columns"
        print(f"ratings that a later one of the same user and item replaces: {(~is_last).sum():,}, {rule}")
        if n_changed:
            warn(f"{n_changed:,} pairs of a user and an item have ratings above the limit and not; the last one counts")
    return is_last


def _parse_times(table: Table, name: str) -> np.ndarray:
    """A column of numbers, or of dates that begin with the year, which sort as text: numbers in their order."""
    texts = table.texts(name)
    if texts.str.contains(r"^\d{4}-\d\d-\d\d").all():
        return texts.rank("min").to_numpy()
    times = texts.cast(pl.Float64, strict=False)
    table.check(texts, times.is_finite().fill_null(False), "it should be a number, or a date such as 2026-01-31")
    return times.to_numpy()


def _read(source: Path) -> bytes:
    """The text of the ratings, alone or in a zip file."""
    with explain_errors(source, "ratings.csv, or a whole zip archive with it"):
        open_regular(source).close()  # is_zipfile would wait for a FIFO
        if not zipfile.is_zipfile(source):
            return read_text(source)
        with zipfile.ZipFile(source) as archive:
            members = [name for name in archive.namelist() if Path(name).name in PUBLISHED]
            if len(members) != 1:
                found = f"{source} has {len(members)} files {' or '.join(PUBLISHED)}"
                raise UserError(f"{found}; give a zip file of MovieLens, or the file itself")
            size, free = archive.getinfo(members[0]).file_size, free_host_bytes()
            if size * MEMORY_PER_BYTE > free:
                found = f"{source} holds {size / 1e9:,.1f} GB of text, and {free / 1e9:,.1f} GB of memory are free"
                raise UserError(f"{found}, of which it takes {MEMORY_PER_BYTE} times as much; convert a part of it")
            return archive.read(members[0])
