"""Events (user, item) -> rows of items, split as recommenders are compared: users held out, part of theirs hidden.

The protocol of Liang et al. (arXiv:1802.05814): users with few items go; of the rest, two groups are held out, for
validation and test; the items are those of the training users; of each held-out user's, a fifth is to be found from
the others. Its random numbers are drawn as the paper's own code draws them, so the users and items are the same.
"""

from typing import Any, NamedTuple

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.arrays import Arrays

PUBLISHED_SEED = 98765
HELD_OUT_SHARE = 0.2
MIN_ITEMS = 5  # of a user, to count at all; of a held-out user, to hide any


class Split(NamedTuple):
    """What became of the events."""

    parts: dict[str, Arrays]
    """train: `items`; val, test: `items`, `held_out`; all: `user`, its number in the source."""
    events: int
    users: int
    items: int
    """The three before the split, users with few items gone."""


def split(name: str, users: np.ndarray, items: np.ndarray, held_users: int, seed: int = PUBLISHED_SEED) -> Split:
    """The protocol. users, items: (events,) int32, in the source's order; a pair that comes again does not count.

    held_users: in each of val and test. Raises UserError if too few are left to train on.
    """
    _, once = np.unique(users.astype(np.int64) << 32 | items, return_index=True)
    if len(once) < len(users):
        users, items = users[np.sort(once)], items[np.sort(once)]
    found, of_event, counts = np.unique(users, return_inverse=True, return_counts=True)
    enough = counts >= MIN_ITEMS
    keep = enough[of_event]
    users, items, found = users[keep], items[keep], found[enough]
    order = np.random.RandomState(seed).permutation(len(found))  # the paper's generator; NumPy keeps its stream
    trained = len(found) - 2 * held_users
    if trained < 1:
        raise UserError(
            f"{name}: {len(found):,} users have {MIN_ITEMS} items or more, and 2 x {held_users:,} are to "
            f"be held out; use --held-out {max(1, len(found) // 10)}"
        )
    row_of = np.empty(len(found), np.int64)
    row_of[order] = np.arange(len(found))
    rows = row_of[np.searchsorted(found, users)]
    known, first, numbers = np.unique(items[rows < trained], return_index=True, return_inverse=True)
    number_of = np.empty(len(known), np.int64)  # in the order in which they appear
    number_of[np.argsort(first)] = np.arange(len(known))
    item_ids = known[np.argsort(first)]
    attributes = {"item_ids": item_ids}
    n_items = len(known)
    train = csr(rows[rows < trained], number_of[numbers], trained)
    parts = {"train": rows_of(name, {"items": train, "user": found[order[:trained]]}, n_items, attributes)}
    place = np.minimum(np.searchsorted(known, items), len(known) - 1)
    is_known = known[place] == items
    for part, start in (("val", trained), ("test", trained + held_users)):
        mine = np.flatnonzero(is_known & (rows >= start) & (rows < start + held_users))
        mine = mine[np.argsort(users[mine], kind="stable")]  # users in the order of the source's numbers
        held = hide(rows[mine], seed)
        numbers_of = number_of[place[mine]]
        columns: dict[str, Any] = {
            field: csr(rows[mine][which] - start, numbers_of[which], held_users)
            for field, which in (("items", ~held), ("held_out", held))
        }
        columns["user"] = found[order[start : start + held_users]]
        parts[part] = rows_of(name, columns, n_items, attributes)
    return Split(parts, len(users), len(found), len(np.unique(items)))


def hide(rows: np.ndarray, seed: int) -> np.ndarray:
    """(events,) bool: a fifth of each row's events, of those rows that have enough. rows: equal ones lie together."""
    rng, hidden = np.random.RandomState(seed), np.zeros(len(rows), bool)
    borders = np.flatnonzero(np.diff(rows, prepend=-1, append=-1))
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if stop - start >= MIN_ITEMS:
            chosen = rng.choice(stop - start, size=int(HELD_OUT_SHARE * (stop - start)), replace=False)
            hidden[start + chosen] = True
    return hidden


def csr(rows: np.ndarray, items: np.ndarray, count: int) -> RaggedArray:
    """Pairs (row, item) as `count` rows of items, ascending in each."""
    keys = np.sort(rows.astype(np.int64) << 32 | items.astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    return RaggedArray((keys & 0xFFFFFFFF).astype(np.int32), offsets)


def rows_of(name: str, columns: dict[str, Any], n_items: int, attributes: dict[str, Any]) -> Arrays:
    """Rows whose ragged fields are of `n_items` items."""
    ragged = {field: n_items for field, column in columns.items() if isinstance(column, RaggedArray)}
    return Arrays(name, columns, attributes, n_items=ragged)
