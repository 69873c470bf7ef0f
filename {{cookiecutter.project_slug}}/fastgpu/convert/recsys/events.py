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

from fastgpu.convert.messages import explain_errors
from fastgpu.convert.tables import Table
from fastgpu.process.launch import UserError
from fastgpu.process.machine import format_bytes, free_host_bytes

COLUMNS = ("userId", "movieId", "rating")
PUBLISHED = ("ratings.csv", "ratings.dat", "u.data")
"""Names of the ratings in the zip files: of ml-20m and later ones, of ml-1m and ml-10m, and of ml-100k."""
WITHOUT_HEADER = re.compile(rb"\d+(::|\t)\d+\1\d+(\.\d+)?(\1.*)?\s*")
"""The first line of ratings.dat or u.data."""
MAX_ID = np.iinfo(np.int32).max


def read_events(source: Path, columns: Sequence[str] = COLUMNS, above: float = 3.5) -> tuple[np.ndarray, np.ndarray]:
    """(users, items), int32 (events,), of the ratings > `above`, in the order of the file.

    columns: names of the columns of the user, the item and the rating; without a header, they are the first ones.
    Without the name of a rating, every line counts. Raises UserError with the line of what is
    no event.
    """
    if len(columns) not in (2, 3):
        raise UserError(f"--columns is {','.join(columns)}; it should be USER,ITEM,RATING or USER,ITEM")
    content = _read(source)
    header = content.partition(b"\n")[0]
    names: list[str] = []
    if line := WITHOUT_HEADER.fullmatch(header):
        print(f"{source} has no header; its columns are taken for {', '.join(columns)}")
        content = content.replace(line[1], b"\t")
        n_columns = header.count(line[1]) + 1
        names = [*columns, *(f"column {number}" for number in range(len(columns), n_columns))]
    table = Table(source, content=content, names=names)
    if table.names and all(re.fullmatch(r"[\d.]+", name) for name in table.names):
        first = ",".join(table.names)
        raise UserError(f"{source} has no header, but begins with {first}; write one, such as {','.join(columns)}")
    events = table.read(dict(zip(columns, (pl.UInt32, pl.UInt32, pl.Float64), strict=False)))
    for name in columns[:2]:
        if int(events[name].max()) > MAX_ID:  # type: ignore[arg-type]
            row = int(events[name].arg_max() or 0)
            cure = "ids are below 2^31; number them anew, such as by polars' rank('dense')"
            raise table.error(row, f"{name} is {events[name][row]}; {cure}")
    if len(columns) == 3:
        rating = events[columns[2]]
        if not rating.is_finite().all():
            raise table.error(int((~rating.is_finite()).arg_max() or 0), f"{columns[2]} is not a number")
        events = events.filter(rating > above)
        if not len(events):
            raise UserError(f"{source} has no rating above {above:g}")
    users, items = (events[name].to_numpy().astype(np.int32) for name in columns[:2])
    return users, items


def _read(source: Path) -> bytes:
    """The text of the ratings, alone or in a zip file."""
    with explain_errors(source, "ratings.csv, or a whole zip archive with it"):
        if not zipfile.is_zipfile(source):
            return source.read_bytes()
        with zipfile.ZipFile(source) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name in PUBLISHED]
            if len(members) != 1:
                found = f"{source} has {len(members)} files {' or '.join(PUBLISHED)}"
                raise UserError(f"{found}; give a zip file of MovieLens, or the file itself")
            size, free = members[0].file_size, free_host_bytes()
            if size > free // 4:  # zipfile unpacks no more than the size it claims; polars needs as much again
                needed = f"its {members[0].filename} has {format_bytes(size)}, {format_bytes(free)} of memory are free"
                raise UserError(f"{source}: {needed}; unpack it, and keep the columns that you need")
            return archive.read(members[0])
