"""Turns events (user, item) into rows of items, and holds out users for evaluation.

The protocol of Liang et al. (arXiv:1802.05814): users with few items are left out. Two groups of the remaining users
are held out, for validation and test. Only items of the training users are known. A fifth of the items of each held-out
user is hidden, to be found from the rest. Random numbers are drawn as in the authors' code, so the split has the same
users and items.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fastgpu.convert.recsys.log import Log
from fastgpu.dataset.items import Columns
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import OFFSET_DTYPE, Field, RaggedArray
from fastgpu.storage.arrays import ArrayDataset

PUBLISHED_SEED = 98765
HIDDEN_SHARE = 0.2
MIN_ITEMS = 5
"""Minimum items of a user that is kept, and of a held-out user that has hidden items."""


class Split(NamedTuple):
    """Rows for training, validation and, if asked for, test."""

    parts: dict[str, ArrayDataset]
    """{split: rows}. train: `items`. val, test: `items`, `held_out`. All: `user`, the same number in all splits."""
    found: list[str]
    """Lines of text about the split, to be printed."""


class UserRows(ArrayDataset):
    """A row for each user. The ragged columns hold item numbers in range(n_items)."""

    def __init__(
        self,
        name: str,
        columns: Columns,
        n_items: int,
        attributes: Mapping[str, Any],
        *,
        user_ids: np.ndarray | None = None,
    ):
        """user_ids: (rows,). None: users have no ids."""
        items = Field(OFFSET_DTYPE, (), n_items=n_items)
        super().__init__(name, columns, attributes, fields=dict.fromkeys(columns, items))
        self.user_ids = user_ids

    def origins(self, row_ids: np.ndarray) -> list[str]:
        """The ids of the users of these rows, as text. Empty if users have no ids."""
        return [] if self.user_ids is None else [*map(str, self.user_ids[row_ids].tolist())]


class Numbering:
    """Numbers the items of the training events, in the order in which they appear, and makes rows of these numbers."""

    def __init__(self, log: Log):
        """log: events of training."""
        codes, first = np.unique(log.items, return_index=True)
        codes = codes[np.argsort(first)]
        self._number_of_item = np.full(len(log.item_ids), -1, np.int32)  # -1: not known
        self._number_of_item[codes] = np.arange(len(codes), dtype=np.int32)
        self.item_ids = log.item_ids[codes]

    def knows(self, log: Log) -> np.ndarray:
        """(events,) bool: whether training knows the item of each event."""
        return self._number_of_item[log.items] >= 0

    def rows(self, users: np.ndarray, **events: Log) -> UserRows:
        """A row for each of `users`, which are places in `user_ids`.

        events: {field: log with the items of these users}. Events of other users, and events with items that training
        does not know, are left out.
        """
        log = next(iter(events.values()))
        row_of_user = np.full(len(log.user_ids), -1, np.int64)
        row_of_user[users] = np.arange(len(users))
        columns: Columns = {}
        for name, each in events.items():
            mine = each.at((row_of_user[each.users] >= 0) & self.knows(each))
            rows, numbers = row_of_user[mine.users], self._number_of_item[mine.items]
            columns[name] = make_csr(rows, numbers, len(users), mine.ranks)
        ids = log.user_ids[users]
        columns["user"] = ids if ids.dtype.kind == "i" else users.astype(np.int64)
        attributes: dict[str, Any] = {"item_ids": self.item_ids}
        if log.facts:
            attributes["events"] = json.dumps(dict(log.facts), ensure_ascii=False)
        return UserRows(log.name, columns, len(self.item_ids), attributes, user_ids=ids)


def hold_out_users(log: Log, n_held_out: int, *, min_items: int = MIN_ITEMS, seed: int = PUBLISHED_SEED) -> Split:
    """Split the users by the protocol. log: each user and item once, in the order of the source.

    n_held_out: number of users in val, and in test. Raises UserError if no user is left to train on.
    """
    counts = log.count_items()
    kept = np.flatnonzero(counts >= max(1, min_items))
    log = log.at(counts[log.users] >= min_items)

    # A random order of the users: first training, then val, then test.
    n_train = len(kept) - 2 * n_held_out
    if n_train < 1:
        too_few = f"{len(kept):,} users have {min_items} items or more, and 2 x {n_held_out:,} are to be held out"
        raise UserError(f"{log.name}: {too_few}; use a smaller --held-out, such as {max(1, len(kept) // 10)}")
    order = np.random.RandomState(seed).permutation(len(kept))  # the authors' generator; NumPy keeps its stream
    users = kept[order]
    row_of_user = np.zeros(len(log.user_ids), np.int64)
    row_of_user[users] = np.arange(len(users))
    rows = row_of_user[log.users]

    train = log.at(rows < n_train)
    numbering = Numbering(train)
    parts: dict[str, ArrayDataset] = {"train": numbering.rows(users[:n_train], items=train)}
    n_items = len(numbering.item_ids)
    found = [
        f"{len(log):,} events of {len(kept):,} users with {min_items} or more; training users have {n_items:,} items"
    ]

    # A fifth of the items of each user of val and test is hidden.
    is_known = numbering.knows(log)
    for part, start in (("val", n_train), ("test", n_train + n_held_out)):
        stop = start + n_held_out
        events = np.flatnonzero(is_known & (rows >= start) & (rows < stop))
        events = events[np.argsort(log.users[events], kind="stable")]  # the authors draw in the order of the users
        hidden = draw_hidden(rows[events], seed)
        visible = {"items": log.at(events[~hidden]), "held_out": log.at(events[hidden])}
        parts[part] = numbering.rows(users[start:stop], **visible)
        lengths = parts[part].lengths["held_out"]
        n_without = np.count_nonzero(lengths == 0)
        found.append(f"{part}: {lengths.sum():,} items to be found; {n_without:,} of {n_held_out:,} users have none")
    return Split(parts, found)


def draw_hidden(rows: np.ndarray, seed: int) -> np.ndarray:
    """(events,) bool: a fifth of the events of each row with MIN_ITEMS or more. rows: (events,), grouped by row."""
    rng = np.random.RandomState(seed)
    hidden = np.zeros(len(rows), bool)
    borders = np.flatnonzero(np.diff(rows, prepend=-1, append=-1))
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        count = stop - start
        if count >= MIN_ITEMS:
            chosen = rng.choice(count, size=int(HIDDEN_SHARE * count), replace=False)
            hidden[start + chosen] = True
    return hidden


def make_csr(rows: np.ndarray, items: np.ndarray, n_rows: int, ranks: np.ndarray | None = None) -> RaggedArray:
    """Pairs (row, item) as `n_rows` rows of items, each sorted by rank, or by number if there are no ranks."""
    order = items if ranks is None else ranks
    keys = np.sort(rows.astype(np.int64) << 32 | order.astype(np.int64))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    values = (keys & 0xFFFFFFFF).astype(np.int32)
    if ranks is not None and len(ranks):
        item_of_rank = np.empty(int(ranks.max()) + 1, np.int32)
        item_of_rank[ranks] = items
        values = item_of_rank[values]
    return RaggedArray(values, offsets)
