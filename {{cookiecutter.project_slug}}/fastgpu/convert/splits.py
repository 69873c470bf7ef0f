"""Rows for training, validation and test: drawn at random, or as a source says."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
MAX_SPLITS = 20
"""Files that a column of splits may lead to."""
SPLIT_OF_WORD = {word: split for split, words in WORDS.items() for word in words}


def split_rows(
    source: Dataset, known: Mapping[str, np.ndarray], shares: Sequence[float] | None, seed: int
) -> dict[str, Dataset]:
    """{split: its rows}, or {"": all rows}.

    known: {split: row numbers} if the source says it. shares: of a split that is drawn at random; from each class
    alike if there are `labels` (rows,) of integers. Raises UserError for both at once.
    """
    if shares and known:
        raise UserError(f"--split is given, but {source.name} is split into {', '.join(known)}; drop one")
    if shares:
        labels = source.in_memory("labels")
        known = draw_split(np.zeros(len(source)) if labels is None else labels[:], shares, seed)
    parts: dict[str, Dataset] = {}
    for name, rows in known.items():
        is_member = np.zeros(len(source), bool)
        is_member[rows] = True
        parts[name] = source.select(Share(source.block_rows, is_member), source.name)
    return parts or {"": source}


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
    """{split: row numbers, ascending}: train, val and test first. Prints which word means which split.

    words: what `path` calls the split of each row. Raises UserError for a word that cannot be part of the name of a
    file.
    """
    names = {word: SPLIT_OF_WORD.get(word.lower(), word) for word in dict.fromkeys(words)}
    if len(names) > MAX_SPLITS:
        raise UserError(f"{path}: {len(names):,} splits, such as {list_first(list(names)[:3])}: is it another column?")
    for word, name in names.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"{path}: the split {word!r} cannot be part of the name of a file")
    print("splits:", ", ".join(word if word == name else f"{word} -> {name}" for word, name in names.items()))
    name_of_row = np.array([names[word] for word in words])
    others = sorted(set(names.values()) - set(SPLITS))
    parts = {name: np.flatnonzero(name_of_row == name) for name in (*SPLITS, *others)}
    return {name: rows for name, rows in parts.items() if len(rows)}
