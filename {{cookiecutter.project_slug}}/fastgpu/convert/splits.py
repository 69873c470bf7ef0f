"""Rows for training, validation and test: drawn at random, or as a source says."""

from collections.abc import Sequence

import numpy as np

from fastgpu.convert.messages import list_first
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Share

WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "publictest"),
    "test": ("test", "testing", "privatetest"),
}
"""{split: what data sets call it, in small letters}. PublicTest and PrivateTest are those of Kaggle."""
SPLITS = tuple(WORDS)
SPLIT_OF_WORD = {word: number for number, words in enumerate(WORDS.values()) for word in words}
"""{word: the place of its split in SPLITS}"""


def split_rows(source: Dataset, shares: Sequence[float] | None, seed: int) -> dict[str, Dataset]:
    """{split: its rows}, or {"": all rows}.

    shares: of a split that is drawn at random, from each class alike if there are classes. Raises UserError if the
    source is already split, or if a split gets no rows.
    """
    splits = getattr(source, "splits", None)
    if shares:
        if splits is not None:
            raise UserError(f"--split is given, but {source.name} is split already; drop one")
        labels = source.column("labels")
        splits = draw_splits(np.zeros(len(source)) if labels is None else labels, shares, seed)
    if splits is None:
        return {"": source}
    counts = np.bincount(splits, minlength=len(SPLITS))
    if shares and not counts[: len(shares)].all():
        raise UserError(f"--split leaves no rows for {SPLITS[int(counts.argmin())]}: there are {len(source):,} rows")
    shares_of = {
        name: Share(source.block_rows, splits == number) for number, name in enumerate(SPLITS) if counts[number]
    }
    return {name: source.select(share, source.name) for name, share in shares_of.items()}


def draw_splits(labels: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """(rows,) uint8, places in SPLITS, drawn at random.

    labels: (rows, ...). If they are integers (rows,), each class is split by these shares.
    """
    is_class = labels.ndim == 1 and labels.dtype.kind in "bui"
    classes = labels if is_class else np.zeros(len(labels), np.int64)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    splits = np.empty(len(classes), np.uint8)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        splits[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    return splits


def read_splits(where: str, words: Sequence[str]) -> np.ndarray:
    """(rows,) uint8, places in SPLITS. words: what `where` calls the split of each row. Raises UserError for others."""
    if unknown := sorted({word for word in words if word.lower() not in SPLIT_OF_WORD}):
        known = ", ".join(SPLIT_OF_WORD)
        raise UserError(f"{where}: the splits are {list_first(unknown)}; allowed are {known}, in any case")
    return np.array([SPLIT_OF_WORD[word.lower()] for word in words], np.uint8)
