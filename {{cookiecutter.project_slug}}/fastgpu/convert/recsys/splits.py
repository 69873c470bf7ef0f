"""Splits by time: at one moment for all users, or before the last items of each user.

In validation, the history of a user has only events before that moment, and a rating counts as it was known then.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from fastgpu.convert.recsys.interactions import Numbering, Split
from fastgpu.convert.recsys.log import Log, Repeats, describe_repeats, settle
from fastgpu.convert.recsys.times import Clock
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import ArrayDataset

LATER_PARTS = ("val", "test")


def find_cuts(log: Log, clock: Clock, asked: Sequence[float] | Sequence[str]) -> list[float]:
    """The time at which training ends, and if there is a test split, the time at which validation ends.

    asked: these times as texts; or the shares of train, val and test among the liked events. Events of one time stay
    together, so train and val may get less than their shares.
    """
    assert log.times is not None
    if isinstance(asked[0], str):
        cuts = [clock.parse(str(text)) for text in asked]
        if len(cuts) > 1 and cuts[0] >= cuts[1]:
            raise UserError(f"--split-by-time is {','.join(map(str, asked))}; the first time should be the earlier one")
        return cuts
    times = np.sort(log.times[log.is_liked])
    places = np.ceil(np.cumsum(asked)[:-1] * len(times) - 1e-6).astype(np.int64)
    return list(times[np.minimum(places, len(times) - 1)].tolist())


def split_by_time(log: Log, cuts: Sequence[float], clock: Clock, *, repeats: Repeats, min_items: int) -> Split:
    """Split the events at the times `cuts`.

    Events before cuts[0] are for training. Events from cuts[0] on, and before cuts[1], are to be found by `val`; events
    from cuts[1] on by `test`. The history of a user in val or test is the user's events before the cut.

    log: all events, liked or not. A user with fewer than min_items known items before a cut has no row after this cut.
    Raises UserError if a split would be empty.
    """
    assert log.times is not None
    for since, cut in pairwise([-np.inf, *cuts, np.inf]):
        if not np.any(log.is_liked & (log.times >= since) & (log.times < cut)):
            start, end = clock.show(since), clock.show(cut)
            span = f"before {end}" if since == -np.inf else f"from {start} on" if cut == np.inf else f"{start} to {end}"
            found = f"--split-by-time leaves no liked event {span}"
            raise UserError(f"{log.name}: {found}; {clock.name} has {clock.describe(log.times)}")
    early = settle(log.at(log.times < cuts[0]), repeats)
    users = _users_with(early.log, min_items)
    if not len(users):
        cure = "choose a later time, or a smaller --min-items"
        raise UserError(f"{log.name}: no user has {min_items} items before {clock.show(cuts[0])}; {cure}")
    train = early.log.at(np.isin(early.log.users, users))
    numbering = Numbering(train)
    parts: dict[str, ArrayDataset] = {"train": numbering.rows(users, items=train)}
    moments = " and ".join(map(clock.show, cuts))
    before = f"{len(train):,} events of {len(users):,} users with {min_items} or more"
    lines = [f"split at {moments}: before it are {before}; they have {len(numbering.item_ids):,} items"]
    settled = [early]

    for part, (first, stop) in zip(LATER_PARTS, pairwise([*cuts, np.inf]), strict=False):
        history = early.log if first == cuts[0] else settle(log.at(log.times < first), repeats).log
        later = settle(log.at((log.times >= first) & (log.times < stop)), repeats)
        settled.append(later)
        known = history.at(numbering.knows(history))
        is_user = np.isin(later.log.users, _users_with(known, min_items))
        is_known = numbering.knows(later.log)
        is_seen = np.isin(later.log.pairs(), known.pairs()) & is_known & (repeats != "all")
        wanted = later.log.at(is_user & is_known & ~is_seen)
        left_out = {
            f"users without {min_items} known items before": ~is_user,
            "items that training does not have": is_user & ~is_known,
            "items that are in the history": is_user & is_seen,
        }
        lines.append(_describe(part, wanted, left_out))
        if not len(wanted):
            raise UserError(f"{log.name}: {lines[-1]}; choose another time, or a smaller --min-items")
        parts[part] = numbering.rows(np.unique(wanted.users), items=known, held_out=wanted)
    return Split(parts, [*describe_repeats(settled, repeats, clock.name), *lines])


def leave_last_out(log: Log, *, min_items: int) -> Split:
    """Hold out the last two items of each user.

    The last item is to be found by `test`, from all earlier items. The item before the last one is to be found by
    `val`, from all earlier items. The other items are for training.

    log: each user and item once, with times. Raises UserError if no user has min_items items, and at least three.
    """
    min_items = max(min_items, 3)
    counts = log.count_items()
    users = np.flatnonzero(counts >= min_items)
    if not len(users):
        raise UserError(f"{log.name}: no user has {min_items} items; choose a smaller --min-items, of 3 or more")
    log = log.at(counts[log.users] >= min_items)

    # Number of later events of the same user, for each event.
    assert log.ranks is not None
    order = np.argsort(log.users.astype(np.int64) << 32 | log.ranks)
    n_later = np.empty(len(log), np.int64)
    n_later[order] = np.cumsum(counts[users]).repeat(counts[users]) - np.arange(len(log)) - 1
    train = log.at(n_later >= 2)
    numbering = Numbering(train)
    parts: dict[str, ArrayDataset] = {"train": numbering.rows(users, items=train)}
    known = f"{len(log):,} events of {len(users):,} users with {min_items} or more"
    found = [f"{known}; training has {len(train):,} of them, and {len(numbering.item_ids):,} items"]
    for part, place in zip(LATER_PARTS, (1, 0), strict=True):
        last = log.at(n_later == place)
        is_known = numbering.knows(last)
        wanted = last.at(is_known)
        found.append(_describe(part, wanted, {"items that training does not have": ~is_known}))
        if not len(wanted):
            raise UserError(f"{log.name}: {found[-1]}; choose a larger --min-items")
        parts[part] = numbering.rows(np.unique(wanted.users), items=log.at(n_later > place), held_out=wanted)
    return Split(parts, found)


def _users_with(log: Log, min_items: int) -> np.ndarray:
    """The users with at least min_items events, and at least one."""
    return np.flatnonzero(log.count_items() >= max(1, min_items))


def _describe(part: str, wanted: Log, left_out: Mapping[str, np.ndarray]) -> str:
    """A line about the items to be found. left_out: {reason: (events,) bool, the events that are left out for it}."""
    reasons = [f"{n:,} of {why}" for why, mask in left_out.items() if (n := np.count_nonzero(mask))]
    text = f"{part}: {len(wanted):,} items of {len(np.unique(wanted.users)):,} users to be found"
    return f"{text}; left out: {', '.join(reasons)}" if reasons else text
