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
from fastgpu.convert.tables import Table
from fastgpu.process.launch import UserError
from fastgpu.process.machine import free_host_bytes

COLUMNS = ("userId", "movieId", "rating")
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

    columns: names of the columns of the user, the item and the rating. Without the name of a rating, every line counts.
    has_header: see `Table`; MovieLens without one has `columns`. Raises UserError with the line of what is no event.
    """
    if len(columns) not in (2, 3):
        raise UserError(f"--columns is {','.join(columns)}; it should be USER,ITEM,RATING or USER,ITEM")
    source = Path(source)
    columns = [name.strip() for name in columns]
    content = _read(source)
    names: Sequence[str] = ()
    if has_header and (line := WITHOUT_HEADER.fullmatch(content.partition(b"\n")[0])):
        print(f"{source} has no header; its columns are taken for {', '.join(columns)}")
        content = content.replace(line[1], b"\t")
        names, has_header = columns, False
    table = Table(source, content=content, names=names, has_header=has_header)
    users, items = (table.whole_numbers(name, np.iinfo(np.int32).max).astype(np.int32) for name in columns[:2])
    if len(columns) == 3:
        texts = table.texts(columns[2])
        ratings = texts.cast(pl.Float64, strict=False)
        table.check(texts, ratings.is_finite().fill_null(False), "it should be a number")
        counts = ratings.to_numpy() > above
        users, items = users[counts], items[counts]
        if not len(users):
            raise UserError(f"{source} has no rating above {above:g}")
    return users, items


def _read(source: Path) -> bytes:
    """The text of the ratings, alone or in a zip file."""
    with explain_errors(source, "ratings.csv, or a whole zip archive with it"):
        if not zipfile.is_zipfile(source):
            return source.read_bytes()
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
