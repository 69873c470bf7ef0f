"""Which rows go to which file: splits that a source has, or that are drawn at random."""

from collections.abc import Iterable, Sequence

import numpy as np

from fastgpu.process.launch import UserError, list_first
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Subset

SPLITS = ("train", "val", "test")
WORDS = ("train training", "val valid validation dev publictest", "test testing privatetest")
"""What data sets call each split, in small letters. PublicTest and PrivateTest are those of Kaggle."""
SPLIT_OF_WORD = {word: number for number, words in enumerate(WORDS) for word in words.split()}


def split_rows(source: Dataset, shares: Sequence[float] | None = None, seed: int = 0) -> dict[str, Dataset]:
    """{split: its rows}, or {"": all rows}, without those that are known to be broken (see `Reader`).

    shares: of a split that is drawn at random; see `draw_splits`. Raises UserError if the source is already split, or
    if a split gets no rows.
    """
    n_rows = int(source.block_rows.sum())
    splits = getattr(source, "splits", None)
    is_whole = np.ones(n_rows, bool)
    is_whole[[*getattr(source, "broken", ())]] = False
    if shares:
        if splits is not None:
            raise UserError(f"--split is given, but {source.name} is split already; drop one")
        labels = source.stored_column("labels")
        labels = np.zeros(n_rows) if labels is None else labels
        splits = np.zeros(n_rows, np.uint8)
        splits[is_whole] = draw_splits(labels[is_whole], shares, seed)
    if splits is None:
        return {"": source if is_whole.all() else source.select(Subset(source.block_rows, is_whole))}
    parts = {
        name: source.select(Subset(source.block_rows, is_whole & (splits == number)))
        for number, name in enumerate(SPLITS)
        if number in splits[is_whole]
    }
    if shares and len(parts) < len(shares):
        raise UserError(f"--split leaves rows for {', '.join(parts)} alone: there are {is_whole.sum():,} rows")
    return parts


def draw_splits(labels: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """(rows,) uint8, places in SPLITS, drawn at random: of each class alike if the labels are integers (rows,)."""
    classes = labels if labels.ndim == 1 and labels.dtype.kind in "bui" else np.zeros(len(labels), np.int64)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    splits = np.empty(len(classes), np.uint8)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        splits[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    return splits


def read_splits(where: str, words: Iterable[str | None]) -> np.ndarray:
    """(rows,) uint8, places in SPLITS. words: what `where` calls the split of each row; None: the row is broken.

    Raises UserError for other words.
    """
    names = [word.lower() if word else SPLITS[0] for word in words]
    if unknown := sorted({*names} - SPLIT_OF_WORD.keys()):
        raise UserError(f"{where}: the splits are {list_first(unknown)}; allowed are {', '.join(SPLIT_OF_WORD)}")
    return np.array([SPLIT_OF_WORD[name] for name in names], np.uint8)
