"""Decides which rows go to which file: by the splits of the source, or at random."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastgpu.convert.broken import none_whole
from fastgpu.process.launch import UserError, list_first
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Subset

SPLITS = ("train", "val", "test")
WORDS = ("train training", "val valid validation dev publictest", "test testing privatetest")
"""Names of train, val and test in data sets, in lower case. Kaggle has PublicTest and PrivateTest."""
SPLIT_OF_WORD = {word: number for number, words in enumerate(WORDS) for word in words.split()}

MIN_OBTAINED = 0.5
"""Minimum rows of a split in a group split, as a part of the share that was asked for."""


class Split(NamedTuple):
    """The flags of convert.py that choose rows."""

    shares: Sequence[float] | None = None
    """Shares of train, val and, if given, test in a random split. None: no random split."""
    by: str = ""
    """Name of the column of --split-by. Empty: none."""
    seed: int = 0
    limit: int | None = None
    """Maximum number of rows, for a first look. None: all rows."""
    is_in_order: bool = False
    """Whether `limit` takes the first rows of each split instead of random ones."""


def split_rows(source: Dataset, asked: Split = Split()) -> dict[str, Dataset]:  # noqa: B008 (immutable)
    """{split: its rows}, or {"": all rows}, without rows that are known to be broken (see `Reader`).

    Raises UserError if a random split is asked for and the source is split already, or if a split gets no rows.
    """
    # A reader reads some rows to know its fields, and may find broken ones: now, before a limit leaves rows out.
    source.fields  # noqa: B018
    broken = getattr(source, "broken", {})
    is_split = any(getattr(source, name, None) is not None for name in ("splits", "split_by"))
    if not (broken or is_split or asked.shares or asked.limit):
        return {"": source}
    n_rows = int(source.block_rows.sum())
    is_whole = np.ones(n_rows, bool)
    is_whole[[*broken]] = False
    if not is_whole.any():
        raise none_whole(source.name, broken)
    splits = np.zeros(n_rows, np.uint8)
    found = _find_splits(source, asked, is_whole)
    if found is not None:
        splits[is_whole] = found
    numbers = np.unique(splits[is_whole]).tolist()
    if asked.shares and len(numbers) < len(asked.shares):
        names = ", ".join(SPLITS[number] for number in numbers)
        raise UserError(f"--split leaves rows for {names} alone: there are {is_whole.sum():,} rows")
    if asked.limit and asked.limit < n_rows:
        is_whole &= _limit_rows(source, asked, splits)
        if not is_whole.any():
            raise none_whole(source.name, broken)
    if found is None:
        return {"": source if is_whole.all() else source.select(Subset(source.block_rows, is_whole))}
    members = {SPLITS[number]: is_whole & (splits == number) for number in numbers}
    _refuse_empty(members, asked)
    return {name: source.select(Subset(source.block_rows, rows)) for name, rows in members.items()}


def _find_splits(source: Dataset, asked: Split, is_whole: np.ndarray) -> np.ndarray | None:
    """The split of each row that is not broken: (whole rows,) uint8, places in SPLITS. None: there is no split."""
    splits: np.ndarray | None = getattr(source, "splits", None)
    column: np.ndarray | None = getattr(source, "split_by", None)
    if column is not None:
        column = column[is_whole]
        words = {str(value).lower() for value in np.unique(column)}
        if not asked.shares or words <= SPLIT_OF_WORD.keys():
            splits = read_splits(f"{source.name}, --split-by {asked.by}", column.astype(str))
    if not asked.shares:
        return splits if splits is None or column is not None else splits[is_whole]
    if splits is not None:
        raise UserError(f"--split is given, but {source.name} is split already; drop one")
    if column is not None:
        return draw_groups(asked.by, column, asked.shares, asked.seed)
    labels = source.stored_column("labels")
    return draw_splits(np.zeros(is_whole.sum()) if labels is None else labels[is_whole], asked.shares, asked.seed)


def _limit_rows(source: Dataset, asked: Split, splits: np.ndarray) -> np.ndarray:
    """(rows,) bool: the rows that --limit takes. Broken rows among the others are removed from `broken`."""
    assert asked.limit
    classes = np.zeros(1, np.int64)
    if asked.is_in_order and not splits.any():
        # The first rows, without an array of row numbers: a series may have billions of rows.
        is_taken = np.zeros(len(splits), bool)
        is_taken[: asked.limit] = True
    else:
        labels = None if asked.is_in_order else source.stored_column("labels")
        classes = _classes_of(np.zeros(len(splits)) if labels is None else labels)
        strata = splits.astype(np.int64) * (classes.max() + 1) + classes
        is_taken = draw_rows(strata, asked.limit, None if asked.is_in_order else asked.seed)
    for reasons in (getattr(source, "broken", {}), getattr(source, "known_broken", {})):
        for row in [row for row in reasons if not is_taken[row]]:
            del reasons[row]
    _print_limit(asked, len(splits), ", of each class alike" if classes.any() else "")
    return is_taken


def limit_parts(parts: Mapping[str, Dataset], asked: Split) -> Mapping[str, Dataset]:
    """The splits of a source that is split already, limited to `limit` rows in proportion to their sizes."""
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
    if not asked.limit or asked.limit >= len(numbers):
        return parts
    is_taken = draw_rows(numbers, asked.limit, None if asked.is_in_order else asked.seed)
    _print_limit(asked, len(numbers))
    taken = {name: is_taken[numbers == number] for number, name in enumerate(parts)}
    _refuse_empty(taken, asked)
    return {name: part.select(Subset(part.block_rows, taken[name])) for name, part in parts.items()}


def _refuse_empty(rows_of: Mapping[str, np.ndarray], asked: Split) -> None:
    """Raise UserError if a split gets no rows. rows_of: {split: (rows,) bool}"""
    if empty := [name for name, rows in rows_of.items() if not rows.any()]:
        raise UserError(f"--limit {asked.limit} leaves no row for {', '.join(empty)}; take more")


def _print_limit(asked: Split, n_rows: int, of_classes: str = "") -> None:
    how = "the first ones, in the order of the source" if asked.is_in_order else f"drawn at random{of_classes}"
    print(f"--limit: {asked.limit:,} of {n_rows:,} rows, {how}")


def draw_rows(strata: np.ndarray, n_rows: int, seed: int | None) -> np.ndarray:
    """(rows,) bool: `n_rows` rows, from each stratum in proportion to its size. strata: (rows,) integers.

    seed: of the random choice. None: the first rows of each stratum.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    order = np.arange(len(strata)) if rng is None else rng.permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    _, counts = np.unique(strata, return_counts=True)
    # The rows of a stratum are at even distances from 0 to 1. A random start gives small strata their chance.
    starts = np.zeros(len(counts)) if rng is None else rng.random(len(counts))
    firsts = np.cumsum(counts) - counts
    within = (np.arange(len(strata)) + np.repeat(starts - firsts, counts)) / np.repeat(counts, counts)
    is_taken = np.zeros(len(strata), bool)
    is_taken[order[np.argsort(within, kind="stable")[:n_rows]]] = True
    return is_taken


def draw_splits(labels: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """(rows,) uint8, random places in SPLITS, with the same shares in each class if labels are integers (rows,)."""
    classes = _classes_of(labels)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    splits = np.empty(len(classes), np.uint8)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        splits[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    return splits


def _classes_of(labels: np.ndarray) -> np.ndarray:
    """(rows,) the class of each row, numbered from 0; all 0 if the labels are not classes."""
    if labels.ndim == 1 and labels.dtype.kind in "bui" and len(labels):
        return np.unique(labels, return_inverse=True)[1]
    return np.zeros(len(labels), np.int64)


def draw_groups(name: str, values: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """(rows,) uint8, random places in SPLITS: a group split, in which all rows with one value get the same split.

    name: of the column. values: (rows,). Raises UserError if a split gets less than MIN_OBTAINED of its share.
    """
    names, group_of_row, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(names) < len(shares):
        values_of = f"{len(names)} values, for {len(shares)} files"
        raise UserError(
            f"--split-by {name} has {values_of}: name a column with more of them, or give --split fewer shares"
        )
    # The largest groups come first, equal ones in a random order; each goes to the split that it fills least.
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-counts[order], kind="stable")]
    n_filled = [0] * len(shares)
    split_of_group = np.empty(len(names), np.uint8)
    for n_left, group in zip(range(len(names), 0, -1), order.tolist(), strict=True):
        count = int(counts[group])
        empty = [split for split, n_rows in enumerate(n_filled) if not n_rows]
        allowed = empty if n_left <= len(empty) else range(len(shares))
        split = min(allowed, key=lambda split: (n_filled[split] + count) / shares[split])
        split_of_group[group] = split
        n_filled[split] += count
    n_groups = np.bincount(split_of_group, minlength=len(shares)).tolist()
    splits = zip(SPLITS, n_groups, n_filled, strict=False)
    found = ", ".join(f"{split} {n:,} with {n_rows / len(values):.1%}" for split, n, n_rows in splits)
    if any(n_rows < MIN_OBTAINED * share * len(values) for n_rows, share in zip(n_filled, shares, strict=True)):
        largest = f"{str(names[order[0]])[:40]!r} alone has {counts.max():,} of {len(values):,} rows"
        raise UserError(f"--split-by {name}: {largest}, so the splits would be {found} of the rows; change the shares")
    print(f"split by {name}, whose values stay together: {found} of the rows")
    return split_of_group[group_of_row]


def read_splits(where: str, words: Iterable[str]) -> np.ndarray:
    """(rows,) uint8, places in SPLITS. words: the name of each row's split. Raises UserError for unknown names."""
    names = [word.lower() for word in words]
    if unknown := sorted({*names} - SPLIT_OF_WORD.keys()):
        cure = "or add --split 0.8,0.1,0.1, which keeps the rows of each value together"
        raise UserError(
            f"{where}: the splits are {list_first(unknown)}; allowed are {', '.join(SPLIT_OF_WORD)}, {cure}"
        )
    return np.array([SPLIT_OF_WORD[name] for name in names], np.uint8)
