"""A log of events: which user liked which item, and when. `settle` counts each pair of a user and an item once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fastgpu.process.launch import warn

Repeats = Literal["last", "first", "all"]


@dataclass(frozen=True, kw_only=True)
class Log:
    """Events in the order of their source. Users and items are numbered in the order of their ids."""

    name: str
    """The source of the events, for messages."""
    users: np.ndarray
    """(events,) int32: places in `user_ids`."""
    items: np.ndarray
    """(events,) int32: places in `item_ids`."""
    user_ids: np.ndarray
    """(users,) int64, or texts."""
    item_ids: np.ndarray
    """(items,) int64, or texts."""
    is_liked: np.ndarray
    """(events,) bool: whether the user liked the item."""
    times: np.ndarray | None = None
    """(events,) int64 or float64."""
    ranks: np.ndarray | None = None
    """(events,) int32: see `rank`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The columns and flags of the conversion, for the attribute `events` of files."""

    def __len__(self) -> int:
        return len(self.users)

    def at(self, places: np.ndarray) -> "Log":
        """Some of the events. places: their numbers, or a mask (events,)."""
        columns = ("users", "items", "is_liked", "times", "ranks")
        chosen = {name: column[places] for name in columns if (column := getattr(self, name)) is not None}
        return replace(self, **chosen)

    def count_items(self) -> np.ndarray:
        """(users,) number of events of each user."""
        return np.bincount(self.users, minlength=len(self.user_ids))

    def pairs(self) -> np.ndarray:
        """(events,) int64: a number for each pair of a user and an item."""
        return self.users.astype(np.int64) << 32 | self.items


def rank(times: np.ndarray) -> np.ndarray:
    """(events,) int32: the place of each event in the order of time; at equal times, in the order of the source."""
    ranks = np.empty(len(times), np.int32)
    ranks[np.argsort(times, kind="stable")] = np.arange(len(times), dtype=np.int32)
    return ranks


def number(name: str, users: np.ndarray, items: np.ndarray) -> Log:
    """A log in which all events are liked. users, items: (events,) integer ids."""
    user_ids, users = np.unique(users, return_inverse=True)
    item_ids, items = np.unique(items, return_inverse=True)
    return Log(
        name=name,
        users=users.astype(np.int32),
        items=items.astype(np.int32),
        user_ids=user_ids.astype(np.int64),
        item_ids=item_ids.astype(np.int64),
        is_liked=np.ones(len(users), bool),
    )


class Settled(NamedTuple):
    """A log in which each pair of a user and an item counts once."""

    log: Log
    """The liked events that count."""
    n_repeated: int
    """Number of events that do not count, because another event of the same user and item counts."""
    n_changed: int
    """Number of pairs of a user and an item that have both liked events and others."""


def settle(log: Log, repeats: Repeats) -> Settled:
    """Keep the last or the first event of each user and item, if it is liked; or all liked events.

    The order is the order of time, or of the source if there are no times.
    """
    pairs = log.pairs()
    ordered = np.sort(pairs)  # np.unique takes ten times as long for many different numbers
    if repeats == "all" or (ordered[1:] != ordered[:-1]).all():
        return Settled(log if log.is_liked.all() else log.at(log.is_liked), 0, 0)
    order = np.argsort(pairs, kind="stable") if log.ranks is None else np.lexsort((log.ranks, pairs))
    starts = np.diff(pairs[order], prepend=-1) != 0
    ends = np.roll(starts, -1)
    pair_of = np.cumsum(starts) - 1
    chosen = order[starts if repeats == "first" else ends]
    is_other = log.is_liked[order] != log.is_liked[chosen][pair_of]
    n_changed = int(np.count_nonzero(np.bincount(pair_of[is_other])))
    chosen.sort()
    return Settled(log.at(chosen[log.is_liked[chosen]]), len(log) - len(chosen), n_changed)


def describe_repeats(settled: Sequence[Settled], repeats: Repeats, time: str) -> Iterator[str]:
    """A line about events that do not count, if there are any. Warns of pairs whose ratings disagree.

    time: name of the column of times, or an empty text.
    """
    if n_repeated := sum(each.n_repeated for each in settled):
        order = (
            f"by {time}" if time else "in the order of the source; name a column of times as the fourth of --columns"
        )
        yield f"events that do not count, as the {repeats} one of a user and an item does: {n_repeated:,}, {order}"
    if n_changed := sum(each.n_changed for each in settled):
        pairs = f"{n_changed:,} pairs of a user and an item have ratings above the limit and not"
        warn(f"{pairs}; the {repeats} one counts")
