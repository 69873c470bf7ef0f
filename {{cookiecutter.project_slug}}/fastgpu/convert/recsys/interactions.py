"""Events (user, item) -> rows of items, split as recommenders are compared: some users are held out for evaluation.

The protocol of Liang et al. (arXiv:1802.05814): users with few items are dropped. Two groups of the others are held
out, for validation and test. The items are those of the training users. A fifth of the items of each held-out user is
hidden, to be found from the rest. Random numbers are drawn as the authors' code draws them, so users and items are the
same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fastgpu.dataset.items import Columns
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import OFFSET_DTYPE, Field, RaggedArray
from fastgpu.storage.arrays import ArrayDataset

PUBLISHED_SEED = 98765
HIDDEN_SHARE = 0.2
MIN_ITEMS = 5
"""Items of a user, to count at all; of a held-out user, to have any hidden."""


class HeldOutSplit(NamedTuple):
    """Users for training, validation and test."""

    parts: dict[str, ArrayDataset]
    """train: `items`. val, test: `items`, `held_out`. All: `user`, the number of the user in the source."""
    n_events: int
    """Number of events of all parts, before items without training users were dropped."""
    n_users: int
    """Number of users of all parts."""
    n_repeated: int
    """Number of events of the source that repeat an earlier one of the same user and item, and were dropped."""


def hold_out_users(
    name: str, users: np.ndarray, items: np.ndarray, n_held_out: int, *, seed: int = PUBLISHED_SEED
) -> HeldOutSplit:
    """The protocol. users, items: (events,) int32, in the order of the source; repeated pairs count once.

    n_held_out: users in each of val and test. Raises UserError if too few users are left to train on.
    """
    # Each pair once, and the users with enough items.
    _, first = np.unique(users.astype(np.int64) << 32 | items, return_index=True)
    n_repeated = len(users) - len(first)
    first.sort()
    users, items = users[first], items[first]
    user_ids, user_of_event, counts = np.unique(users, return_inverse=True, return_counts=True)
    is_kept = counts >= MIN_ITEMS
    users, items = users[is_kept[user_of_event]], items[is_kept[user_of_event]]
    user_ids = user_ids[is_kept]

    # A random order of the users: those to train on first, then val, then test.
    n_train = len(user_ids) - 2 * n_held_out
    if n_train < 1:
        found = f"{len(user_ids):,} users have {MIN_ITEMS} items or more, and 2 x {n_held_out:,} are to be held out"
        raise UserError(f"{name}: {found}; use a smaller --held-out, such as {len(user_ids) // 10}")
    order = np.random.RandomState(seed).permutation(len(user_ids))  # the authors' generator; NumPy keeps its stream
    row_of_user = np.empty(len(user_ids), np.int64)
    row_of_user[order] = np.arange(len(user_ids))
    rows = row_of_user[np.searchsorted(user_ids, users)]

    # The items of the training users, numbered in the order in which they appear.
    is_train = rows < n_train
    known_items, first = np.unique(items[is_train], return_index=True)
    item_ids = known_items[np.argsort(first)]
    number_of_known = np.argsort(np.argsort(first))
    places = np.minimum(np.searchsorted(known_items, items), len(known_items) - 1)
    is_known = known_items[places] == items
    numbers = number_of_known[places]  # of each event; meaningless where the item is not known

    # A fifth of the items of each user of val and test is hidden.
    attributes = {"item_ids": item_ids}
    columns: Columns = {"items": make_csr(rows[is_train], numbers[is_train], n_train)}
    columns["user"] = user_ids[order[:n_train]]
    parts = {"train": make_arrays(name, columns, len(item_ids), attributes)}
    for part, start in (("val", n_train), ("test", n_train + n_held_out)):
        stop = start + n_held_out
        events = np.flatnonzero(is_known & (rows >= start) & (rows < stop))
        events = events[np.argsort(users[events], kind="stable")]  # the authors draw in the order of the user numbers
        part_rows = rows[events] - start
        columns = split_hidden(part_rows, numbers[events], draw_hidden(part_rows, seed), n_held_out)
        columns["user"] = user_ids[order[start:stop]]
        parts[part] = make_arrays(name, columns, len(item_ids), attributes)
    return HeldOutSplit(parts, len(users), len(user_ids), n_repeated)


def draw_hidden(rows: np.ndarray, seed: int) -> np.ndarray:
    """(events,) bool: a fifth of the events of each row that has enough. rows: (events,), equal ones side by side."""
    rng = np.random.RandomState(seed)
    hidden = np.zeros(len(rows), bool)
    borders = np.flatnonzero(np.diff(rows, prepend=-1, append=-1))
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        count = stop - start
        if count >= MIN_ITEMS:
            chosen = rng.choice(count, size=int(HIDDEN_SHARE * count), replace=False)
            hidden[start + chosen] = True
    return hidden


def split_hidden(rows: np.ndarray, items: np.ndarray, hidden: np.ndarray, n_rows: int) -> Columns:
    """The visible events as `items` and the hidden ones as `held_out`. rows, items, hidden: (events,)."""
    masks = {"items": ~hidden, "held_out": hidden}
    return {name: make_csr(rows[mask], items[mask], n_rows) for name, mask in masks.items()}


def make_csr(rows: np.ndarray, items: np.ndarray, n_rows: int) -> RaggedArray:
    """Pairs (row, item) as `n_rows` rows of items, ascending in each row."""
    keys = np.sort(rows.astype(np.int64) << 32 | items.astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    return RaggedArray((keys & 0xFFFFFFFF).astype(np.int32), offsets)


def make_arrays(name: str, columns: Columns, n_items: int, attributes: Mapping[str, Any]) -> ArrayDataset:
    """These columns as rows. The ragged ones hold item numbers in range(n_items)."""
    items = Field(OFFSET_DTYPE, (), n_items=n_items)
    return ArrayDataset(name, columns, attributes, fields=dict.fromkeys(columns, items))
