"""What a model says to labelled rows: which classes it confuses, how well it finds each, and which rows to look at.

Shapes: N rows, K classes or attributes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fastgpu.predict.model import Trained
from fastgpu.rows.rows import Rows

MAX_CLASSES = 20
"""More classes make a matrix that nobody can read: this many of the worst are printed instead."""


class Answers(NamedTuple):
    """The answers to some rows: for each its class (N,), or its attributes (N, K)."""

    names: Sequence[str]
    """Of the classes or attributes."""
    labels: np.ndarray
    chosen: np.ndarray
    """The class with the highest probability, or the attributes with a probability above 0.5."""
    probability: np.ndarray
    """Of the class that was chosen, or of the attribute."""


def ask(trained: Trained, batch: Rows) -> Answers | None:
    """What the model says to a batch. None: its rows have neither classes nor attributes as `labels`."""
    if not trained.workload.inputs or "labels" not in batch.columns:
        return None
    labels = batch["labels"].numpy(force=True)
    predicted = trained.workload.predict(trained.model, batch)
    values = {name: value.float().numpy(force=True) for name, value in predicted.items()}
    if labels.ndim == 1 and labels.dtype.kind in "ui" and "probability" in values:
        probability_NK = values["probability"]
        names = trained.card["attributes"].get("class_names") or range(probability_NK.shape[1])
        return Answers(list(map(str, names)), labels.astype(int), probability_NK.argmax(1), probability_NK.max(1))
    if labels.ndim == 2 and len(values) == labels.shape[1]:
        probability_NK = np.stack([*values.values()], axis=1)
        return Answers([*values], labels > 0, probability_NK > 0.5, probability_NK)
    return None


def join(parts: Sequence[Answers]) -> Answers:
    """The answers to several batches."""
    _, *columns = zip(*parts, strict=True)
    return Answers(parts[0].names, *map(np.concatenate, columns))


def find_wrong(answers: Answers) -> dict[str, np.ndarray]:
    """{column: a value for each wrong answer}. `row` is its row; the answers that the model is surest of come first."""
    is_wrong = answers.labels != answers.chosen
    labels, chosen, probability = (each[is_wrong] for each in answers[1:])
    row, *attribute = np.nonzero(is_wrong)
    named = {"attribute": attribute[0]} if attribute else {"label_name": labels, "class_name": chosen}
    columns = {"row": row, "label": labels.astype(int), "class": chosen.astype(int), "probability": probability}
    columns |= {column: np.array(answers.names, object)[numbers] for column, numbers in named.items()}
    order = np.argsort(-abs(probability - 0.5) if attribute else -probability, kind="stable")
    return {name: column[order] for name, column in columns.items()}


def describe(answers: Answers) -> Iterator[str]:
    """A table of the classes, with the confusion matrix if they are few, or of the attributes."""
    names, labels, chosen, probability = answers
    n, quality = len(names), ("rows", "precision %", "recall %")
    if labels.ndim > 1:
        counts = labels.sum(0), chosen.sum(0), (labels & chosen).sum(0)
        thresholds = [_best_threshold(labels[:, k], probability[:, k]) for k in range(n)]
        rows = [(names[k], *_quality(*counts, k), *thresholds[k]) for k in range(n)]
        yield from _align([("attribute", *quality, "best F1 %", "from probability"), *rows])
        return
    hits = np.bincount(labels[labels == chosen], minlength=n)
    counts = np.bincount(labels, minlength=n), np.bincount(chosen, minlength=n), hits
    pairs, n_pairs = np.unique(labels * n + chosen, return_counts=True)
    if n <= MAX_CLASSES:
        matrix = np.zeros((n, n), int)
        matrix.flat[pairs] = n_pairs
        rows = [(names[k], *matrix[k], *_quality(*counts, k)) for k in range(n)]
        yield from _align([("label", *(f"as {name}" for name in names), *quality), *rows])
        return
    n_pairs[pairs // n == pairs % n] = 0
    most = np.argsort(-n_pairs, kind="stable")[:MAX_CLASSES]
    confused = [(names[pairs[k] // n], names[pairs[k] % n], n_pairs[k]) for k in most if n_pairs[k]]
    yield from _align([("most confused", "taken for", "times"), *confused])
    recall = hits / np.maximum(counts[0], 1)
    lowest = [k for k in np.argsort(recall, kind="stable") if counts[0][k]][:MAX_CLASSES]
    yield from _align([("lowest recall", *quality), *((names[k], *_quality(*counts, k)) for k in lowest)])


def _quality(n_rows: np.ndarray, n_chosen: np.ndarray, n_hits: np.ndarray, k: int) -> tuple[int, str, str]:
    """Rows of class or attribute k, its precision and its recall. The arrays (K,) hold the numbers of each."""
    precision, recall = (f"{100 * n_hits[k] / count[k]:.1f}" if count[k] else "-" for count in (n_chosen, n_rows))
    return n_rows[k], precision, recall


def _best_threshold(labels: np.ndarray, probability: np.ndarray) -> tuple[str, str]:
    """The highest F1 of an attribute, and the lowest probability that has to count as 1 for it."""
    order = np.argsort(-probability, kind="stable")
    f1 = 2 * np.cumsum(labels[order]) / (np.arange(1, len(labels) + 1) + labels.sum())
    is_last = np.append(np.diff(probability[order]) < 0, True)  # of equal probabilities, which belong together
    best = np.argmax(np.where(is_last, f1, -1))
    return f"{100 * f1[best]:.1f}", f"{probability[order[best]]:.3g}"


def _align(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table whose columns are aligned: the first one to the left, numbers to the right."""
    texts = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for first, *others in texts:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
