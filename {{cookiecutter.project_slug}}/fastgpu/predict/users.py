"""Users in a CSV file: a line for each item that a user has, by the ids that the model was trained on."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError, list_first, warn

SEPARATORS = (",", ";", "\t", "|")
MAX_LISTED = 5
"""Ids that a warning lists."""


class Items(NamedTuple):
    """The items of a user."""

    liked: Sequence[int]
    """Numbers of items in the order of time: the input of the model."""
    seen: Sequence[int]
    """Numbers of all items that the file has of the user, which are not recommended."""


class Line(NamedTuple):
    """A line of the file."""

    user: str
    item: str
    is_liked: bool | None
    """None: the line has no rating, so only `seen` has the item."""
    time: float
    """0 if the file has no times."""


def read_users(path: str, n_items: int, attributes: Mapping[str, Any]) -> dict[str, Items]:
    """{id of a user: items} of a CSV file. Prints the number of lines, and warns of lines that do not count.

    attributes: of the rows that the model was trained on. `item_ids` has the ids of the items; without it, an
    id is the item's number. `events` has the columns and flags of convert.py, which apply here, too. Raises UserError
    for a file that does not fit.
    """
    facts = json.loads(attributes.get("events", "{}"))
    ids = attributes.get("item_ids") or range(n_items)
    number_of_id = {str(each): number for number, each in enumerate(ids)}
    known: dict[str, list[tuple[int, bool | None]]] = {}
    unknown: dict[str, int] = {}
    n_lines = 0
    for line in sorted(_read(path, facts), key=lambda line: line.time):
        n_lines += 1
        events = known.setdefault(line.user, [])
        if (number := number_of_id.get(line.item)) is None:
            unknown[line.item] = unknown.get(line.item, 0) + 1
        else:
            events.append((number, line.is_liked))
    print(f"{path}: {n_lines:,} lines, {len(known):,} users")
    if unknown:
        found = f"{sum(unknown.values()):,} lines of {path} do not count: the model was not trained on their items"
        warn(f"{found}, such as {list_first([*unknown][:MAX_LISTED])}")
    if not known:
        raise UserError(f"{path} has no line below its header; it should have one for each item of a user")
    rows = {user: _settle(events, facts.get("repeats", "last")) for user, events in known.items()}
    left_out = [user for user, items in rows.items() if not items.liked]
    if left_out:
        is_disliked = any(known[user] for user in left_out)
        counts = f" with {facts['columns'][2]} above {facts['above']:g}" if is_disliked else ""
        found = f"{len(left_out):,} of {len(rows):,} users of {path} have no item{counts} that the model was trained on"
        if len(left_out) == len(rows):
            raise UserError(f"{found}; ids are compared as text, such as {next(iter(number_of_id))}")
        warn(f"{found}; they are left out: {list_first(left_out[:MAX_LISTED])}")
    return {user: items for user, items in rows.items() if items.liked}


def _settle(events: Sequence[tuple[int, bool | None]], repeats: str) -> Items:
    """The items of a user. events: (item, whether it is liked), in the order of time. repeats: which event of an item
    counts, see --repeats of convert.py."""
    rated = [event for event in events if event[1] is not None]
    if repeats != "all":
        chosen: dict[int, bool | None] = {}
        for item, is_liked in rated:
            if repeats == "last":
                chosen.pop(item, None)
            chosen.setdefault(item, is_liked)
        rated = [*chosen.items()]
    return Items([item for item, is_liked in rated if is_liked], [*{item for item, _ in events}])


def _read(path: str, facts: Mapping[str, Any]) -> Iterator[Line]:
    """The lines of a file. facts: the attribute `events`; without it, the first two columns are the ids."""
    rows = _read_rows(path)
    line, names = next(rows, (0, []))
    if not names:
        raise UserError(f"{path} is empty; it should have a line for each item of a user")
    columns = facts.get("columns") or [*names[:2], "", ""]
    user, item, rating, time = columns
    if all(name.isdecimal() for name in columns if name):  # --no-header of convert.py calls them 1, 2, ...
        rows = chain([(line, names)], rows)
        names = [*map(str, range(1, len(names) + 1))]
    for name in (user, item):
        if (count := names.count(name)) != 1:
            found = f"{path} has {f'{count} columns' if count else 'no column'} {name}, of {list_first(names)}"
            raise UserError(f"{found}; it should have {user} and {item}, as the ratings that the model was trained on")
    place_of = {name: place for place, name in enumerate(names)}
    for line, row in rows:
        where = f"{path}:{line}"
        if len(row) != len(names):
            raise UserError(f"{where}: {len(row):,} columns; its header has {len(names):,}")
        if missing := [name for name in (user, item) if not row[place_of[name]]]:
            raise UserError(f"{where}: {missing[0]} is missing")
        is_liked = not rating or rating not in place_of or _is_liked(row[place_of[rating]], where, facts)
        moment = _parse_time(row[place_of[time]], where) if time in place_of else 0.0
        yield Line(row[place_of[user]], row[place_of[item]], is_liked, moment)


def _read_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    """The number of each line that is not blank, and its cells without the spaces around them."""
    try:
        with io.TextIOWrapper(open_regular(Path(path)), encoding="utf-8-sig", newline="") as text:
            separator = max(SEPARATORS, key=text.readline().count)
            text.seek(0)
            reader = csv.reader(text, delimiter=separator)
            for row in reader:
                if any(row):
                    yield reader.line_num, [cell.strip() for cell in row]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {error}") from None


def _is_liked(text: str, where: str, facts: Mapping[str, Any]) -> bool | None:
    """Whether convert.py would count a rating as a like. None if the rating is missing, or a number for "no rating"."""
    try:
        rating = float(text or "nan")
    except ValueError:
        raise UserError(f"{where}: the rating is {text[:40]!r}; it should be a number, or empty") from None
    above = facts["above"]
    if isnan(rating) or (rating < 0 <= above):
        return True if facts["unrated"] == "keep" else None
    return bool(rating > above)


def _parse_time(text: str, where: str) -> float:
    """A number, or the seconds since 1970 of a date."""
    with suppress(ValueError):
        return float(text)
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        cure = "it should be a number, or a date such as 2026-01-31 or 2026-01-31T12:00:00"
        raise UserError(f"{where}: the time is {text[:40]!r}; {cure}") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
