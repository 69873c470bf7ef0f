"""A log of events: which user liked which item, perhaps when. Each user and item counts once."""

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
    """Where they are from."""
    users: np.ndarray
    """(events,) int32: places in `user_ids`."""
    items: np.ndarray
    """(events,) int32: places in `item_ids`."""
    user_ids: np.ndarray
    """int64, or texts."""
    item_ids: np.ndarray
    is_liked: np.ndarray
    """(events,) bool: whether the event counts, or says that the user did not like the item."""
    times: np.ndarray | None = None
    """(events,) numbers."""
    ranks: np.ndarray | None = None
    """(events,) int32: places in the order of time; at equal times, in the order of the source."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers were made of, for the attribute `events` of files."""

    def __len__(self) -> int:
        return len(self.users)

    def at(self, places: np.ndarray) -> "Log":
        """The events at some places, or of a mask."""
        columns = ("users", "items", "is_liked", "times", "ranks")
        chosen = {name: column[places] for name in columns if (column := getattr(self, name)) is not None}
        return replace(self, **chosen)

    def count_items(self) -> np.ndarray:
        """(users,) number of events of each user."""
        return np.bincount(self.users, minlength=len(self.user_ids))


def rank(times: np.ndarray) -> np.ndarray:
    """(events,) int32: the place of each event in the order of time; at equal times, in the order of the source."""
    ranks = np.empty(len(times), np.int32)
    ranks[np.argsort(times, kind="stable")] = np.arange(len(times), dtype=np.int32)
    return ranks


def number(name: str, users: np.ndarray, items: np.ndarray) -> Log:
    """A log of ids, (events,) integers, which all count."""
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
    """What is left of a log if each user and item counts once."""

    log: Log
    """The events that are liked."""
    n_repeated: int
    """Number of events that do not count, because another one of the same user and item does."""
    n_changed: int
    """Number of pairs of a user and an item with events that are liked, and others that are not."""


def settle(log: Log, repeats: Repeats) -> Settled:
    """Of the events of a user and an item, the last or the first one counts, in the order of time; or all that are
    liked. Without times, the order is that of the source."""
    pairs = log.users.astype(np.int64) << 32 | log.items
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
    """A line about events that do not count, if there are any. Warns of users who changed their mind. time: the column
    of times, or an empty text."""
    if n_repeated := sum(each.n_repeated for each in settled):
        order = (
            f"by {time}" if time else "in the order of the source; name a column of times as the fourth of --columns"
        )
        yield f"events that do not count, as the {repeats} one of a user and an item does: {n_repeated:,}, {order}"
    if n_changed := sum(each.n_changed for each in settled):
        pairs = f"{n_changed:,} pairs of a user and an item have ratings above the limit and not"
        warn(f"{pairs}; the {repeats} one counts")
