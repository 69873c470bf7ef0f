"""Rows for training, validation and test: drawn at random, or as a source says."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Part, Reader
from fastgpu.process.launch import UserError

WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "publictest"),
    "test": ("test", "testing", "privatetest"),
}
"""{split: what data sets call it, in small letters}. PublicTest and PrivateTest are those of Kaggle."""
SPLITS = tuple(WORDS)
SPLIT_OF_WORD = {word: split for split, words in WORDS.items() for word in words}


def split_rows(reader: Reader, shares: Sequence[float] | None, seed: int) -> dict[str, Part]:
    """{split: its rows}, or {"": all rows}.

    shares: of a split that is drawn at random, from each class alike if there are classes. Raises UserError if the
    source is already split.
    """
    known = reader.splits
    if shares and known:
        raise UserError(f"--split is given, but {reader.name} is split into {', '.join(known)}; drop one")
    if shares:
        labels = reader.labels
        known = draw_split(np.zeros(len(reader)) if labels is None else labels, shares, seed)
    return {name: Part(reader, rows) for name, rows in known.items()} or {"": Part(reader)}


def draw_split(labels: np.ndarray, shares: Sequence[float], seed: int) -> dict[str, np.ndarray]:
    """{"train": row numbers, "val": ..., "test": ...}, ascending, drawn at random.

    labels: (rows, ...). If they are integers (rows,), each class is split by these shares. Raises UserError if a split
    gets no rows.
    """
    is_class = labels.ndim == 1 and labels.dtype.kind in "bui"
    classes = labels if is_class else np.zeros(len(labels), np.int64)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    split_of_row = np.empty(len(classes), np.int64)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        split_of_row[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    parts = {name: np.flatnonzero(split_of_row == number) for number, name in enumerate(SPLITS[: len(shares)])}
    for name, rows in parts.items():
        if not len(rows):
            raise UserError(f"--split leaves no rows for {name}: {len(classes):,} rows of {len(counts):,} classes")
    return parts


def group_splits(path: Path, words: Sequence[str]) -> dict[str, np.ndarray]:
    """{split: row numbers, ascending} of those of train, val and test that have rows.

    words: what `path` calls the split of each row. Raises UserError for a word that is none of WORDS.
    """
    if unknown := sorted({word for word in words if word.lower() not in SPLIT_OF_WORD}):
        known = ", ".join(SPLIT_OF_WORD)
        raise UserError(f"{path}: the splits are {list_first(unknown)}; allowed are {known}, in any case")
    split_of_row = np.array([SPLIT_OF_WORD[word.lower()] for word in words])
    parts = {name: np.flatnonzero(split_of_row == name) for name in SPLITS}
    return {name: rows for name, rows in parts.items() if len(rows)}
