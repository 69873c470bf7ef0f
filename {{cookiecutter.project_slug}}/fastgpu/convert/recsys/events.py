"""Reads which user liked which item: from MovieLens, or any table of users, items, ratings and times.

MovieLens is ratings.csv, ratings.dat or u.data, or the zip file with one of these. Its licence forbids passing the data
on: download it from https://grouplens.org/datasets/movielens.
"""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.convert.broken import none_whole
from fastgpu.convert.command import is_parquet
from fastgpu.convert.reader import explain_errors
from fastgpu.convert.recsys.columns import ParquetTable, Unrated, read_ids, read_likes, read_times
from fastgpu.convert.recsys.log import Log, rank
from fastgpu.convert.recsys.times import Clock
from fastgpu.convert.tables import Table, read_text
from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError
from fastgpu.process.machine import free_host_bytes

COLUMNS = ("userId", "movieId", "rating")
TIME = "timestamp"
PUBLISHED = ("ratings.csv", "ratings.dat", "u.data")
"""Names of the file of ratings in the zip files: ml-20m and later; ml-1m and ml-10m; ml-100k."""
MEMORY_PER_BYTE = 4
"""Bytes of memory that reading takes for each byte of text. Measured: 3, for a file of zeros."""
WITHOUT_HEADER = re.compile(rb"\d+(::|\t)\d+\1\d+(\.\d+)?(\1.*)?\s*")
"""The first line of ratings.dat or u.data."""


class Events(NamedTuple):
    """The events of a table."""

    log: Log
    clock: Clock | None
    """The unit of the times. None: the table has no times."""
    found: list[str]
    """Lines of text about the events, to be printed."""
    n_rows: int
    """Number of rows of the table, including broken ones."""


def read_events(
    source: str | Path,
    columns: Sequence[str] = COLUMNS,
    above: float = 3.5,
    *,
    unrated: Unrated = "refuse",
    has_header: bool = True,
    broken: dict[int, str] | None = None,
) -> Events:
    """The events of a table. Events with a rating > `above` are liked.

    columns: names of the columns of user, item, rating and time. An empty or missing name says that there is no such
    column. Without ratings, all events are liked. If the fourth name is missing, a column `timestamp` is the time.
    unrated: what to do with events without a rating. has_header, broken: see `Table`; MovieLens without a header gets
    the names in `columns`.
    """
    user, item, rating, time = name_columns(columns)
    names = (user, item, rating or COLUMNS[2], time or TIME)
    table = open_table(Path(source), names, has_header=has_header, broken=broken)
    if len(columns) < 4 and TIME in table.names:
        time = TIME
    texts = [read_ids(table, name) for name in (user, item)]
    times, clock = read_times(table, time) if time else (None, None)
    likes = read_likes(table, rating, above, unrated) if rating else None
    is_whole = table.is_whole
    del table  # its text takes more memory than all numbers
    if broken and not is_whole.any():
        raise none_whole(str(source), broken)

    users, items = (each.number(is_whole) for each in texts)
    counts = ((users, user, "users"), (items, item, "items"))
    kinds = ", ".join(f"{len(ids.ids):,} {what} ({name}: {ids.kind})" for ids, name, what in counts)
    found = [f"{source}: {len(users.numbers):,} events, {kinds}"]
    log = Log(
        name=str(source),
        users=users.numbers,
        items=items.numbers,
        user_ids=users.ids,
        item_ids=items.ids,
        is_liked=np.ones(len(users.numbers), bool) if likes is None else likes.is_liked[is_whole],
        facts={"columns": [user, item, rating, time], "above": above if rating else None, "unrated": unrated},
    )
    if times is not None and clock:
        times = times[is_whole]
        found.append(f"time is {time}: {clock.describe(times)}")
        log = replace(log, times=times, ranks=rank(times))
    if likes:
        is_unrated = likes.is_unrated[is_whole]
        if n_unrated := np.count_nonzero(is_unrated):
            verb = "count as liked" if unrated == "keep" else "are left out"
            found.append(f"{n_unrated:,} events have no rating{' or one below 0' * (above >= 0)}, and {verb}")
        found.append(f"{np.count_nonzero(log.is_liked & ~is_unrated):,} ratings are above {above:g}")
        if not log.is_liked.any():
            raise UserError(f"{source} has no rating above {above:g}")
        if unrated == "drop" and n_unrated:
            log = log.at(~is_unrated)
    return Events(log, clock, found, len(is_whole))


def name_columns(columns: Sequence[str]) -> tuple[str, str, str, str]:
    """The columns of user, item, rating and time. The name of a missing column is empty."""
    names = [name.strip() for name in columns]
    user, item, rating, time = [*names, "", "", "", ""][:4]
    if len(names) not in (2, 3, 4) or not user or not item:
        allowed = "USER,ITEM or USER,ITEM,RATING or USER,ITEM,RATING,TIME, or USER,ITEM,,TIME"
        raise UserError(f"--columns is {','.join(columns)}; it should be {allowed}")
    if repeated := [name for name in (user, item, rating, time) if name and names.count(name) > 1]:
        raise UserError(f"--columns is {','.join(columns)}; it has {repeated[0]} twice")
    return user, item, rating, time


def open_table(
    source: Path, names: Sequence[str], *, has_header: bool, broken: dict[int, str] | None
) -> Table | ParquetTable:
    """A table of any format. names: of the columns, if it is MovieLens without a header. broken: see `Table`."""
    if is_parquet(str(source)):
        return ParquetTable(str(source), broken)
    content = _read(source)
    known: Sequence[str] = ()
    if has_header and (line := WITHOUT_HEADER.fullmatch(content.partition(b"\n")[0])):
        known, has_header = names[: line[0].count(line[1]) + 1], False
        print(f"{source} has no header; its columns are taken for {', '.join(known)}")
        content = content.replace(line[1], b"\t")
    return Table(source, content=content, names=known, has_header=has_header, broken=broken)


def _read(source: Path) -> bytes:
    """The text of the ratings: a file, or a member of a zip file."""
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
                raise UserError(f"{found}, and it takes {MEMORY_PER_BYTE} times its size; convert a part of it")
            return archive.read(members[0])
