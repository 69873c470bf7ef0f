"""What a model says to labelled rows: which classes it confuses, how well it finds each, and which rows to look at.

Shapes: N rows, K classes or attributes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fastgpu.predict.model import Trained
from fastgpu.rows.rows import Rows

MAX_CLASSES = 20
"""More classes make a matrix that nobody can read: this many of the worst are printed instead."""
Column = tuple[str, Iterable[object]]
"""Of a table: its title and its cells."""


class Answers(NamedTuple):
    """Names of the classes or attributes; and for each row its class (N,), or its attributes (N, K)."""

    names: list[str]
    labels: np.ndarray
    chosen: np.ndarray  # the class with the highest probability, or the attributes with one above 0.5
    probability: np.ndarray  # of the class that was chosen, or of the attribute


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
        return Answers([*map(str, names)], labels.astype(int), probability_NK.argmax(1), probability_NK.max(1))
    if labels.ndim == 2 and len(values) == labels.shape[1]:
        probability_NK = np.stack([*values.values()], axis=1)
        return Answers([*values], (labels > 0).astype(int), (probability_NK > 0.5).astype(int), probability_NK)
    return None


def find_wrong(answers: Answers, places: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """{column: a value for each wrong answer}, those first that the model is surest of. places: columns of all rows."""
    names, labels, chosen, probability = np.array(answers.names, object), *answers[1:]
    sureness = abs(probability - 0.5) if labels.ndim > 1 else probability
    wrong = np.nonzero(labels != chosen)
    row, *attribute = wrong = tuple(each[np.argsort(-sureness[wrong], kind="stable")] for each in wrong)
    columns = {name: values[row] for name, values in places.items()}
    shown = zip(("label", "class", "probability"), answers[1:], strict=True)
    columns |= {name: values[wrong] for name, values in shown}
    if attribute:
        columns["attribute"] = names[attribute[0]]
    else:
        columns |= {"label_name": names[labels[wrong]], "class_name": names[chosen[wrong]]}
    return {name: values.tolist() for name, values in columns.items()}


def describe(answers: Answers) -> Iterator[str]:
    """A table of the attributes; of few classes, with the confusion matrix; or of the worst of many."""
    names, labels, chosen, probability = np.array(answers.names, object), *answers[1:]
    n = len(names)
    if labels.ndim > 1:
        f1, thresholds = zip(*map(_best_threshold, labels.T, probability.T), strict=True)
        quality = _quality(labels.sum(0), chosen.sum(0), (labels & chosen).sum(0))
        yield from _align(("attribute", names), *quality, ("best F1 %", f1), ("from probability", thresholds))
        return
    pairs, times = np.unique(labels * n + chosen, return_counts=True)
    label, other = np.divmod(pairs, n)
    counts = np.stack([np.bincount(each, minlength=n) for each in (labels, chosen, labels[labels == chosen])])
    if n <= MAX_CLASSES:
        matrix = np.zeros((n, n), int)
        matrix[label, other] = times
        columns = ((f"as {name}", column) for name, column in zip(names, matrix.T, strict=True))
        yield from _align(("label", names), *columns, *_quality(*counts))
        return
    wrong = np.flatnonzero(label != other)
    most = wrong[np.argsort(-times[wrong], kind="stable")][:MAX_CLASSES]
    yield from _align(("most confused", names[label[most]]), ("taken for", names[other[most]]), ("times", times[most]))
    seen = np.flatnonzero(counts[0])
    lowest = seen[np.argsort(counts[2, seen] / counts[0, seen], kind="stable")][:MAX_CLASSES]
    yield from _align(("lowest recall", names[lowest]), *_quality(*counts[:, lowest]))


def _quality(n_rows: np.ndarray, n_chosen: np.ndarray, n_hits: np.ndarray) -> list[Column]:
    """How many rows have each class or attribute, its precision and its recall."""

    def percent(of: np.ndarray) -> list[str]:
        return [f"{100 * hits / n:.1f}" if n else "-" for hits, n in zip(n_hits, of, strict=True)]

    return [("rows", n_rows), ("precision %", percent(n_chosen)), ("recall %", percent(n_rows))]


def _best_threshold(labels: np.ndarray, probability: np.ndarray) -> tuple[str, str]:
    """The highest F1 of an attribute, and the lowest probability that has to count as 1 for it."""
    thresholds = np.unique(probability)
    n_hits, n_chosen = (
        len(of) - np.searchsorted(np.sort(of), thresholds) for of in (probability[labels > 0], probability)
    )
    f1 = 2 * n_hits / (n_chosen + labels.sum())
    return f"{100 * f1.max():.1f}", f"{thresholds[f1.argmax()]:.3g}"


def _align(*columns: Column) -> Iterator[str]:
    """The lines of a table: the first column to the left, numbers to the right."""
    texts = [[title, *map(str, cells)] for title, cells in columns]
    line = "  ".join(f"{{:>{max(map(len, each))}}}" for each in texts).replace(">", "<", 1)
    return map(line.format, *texts)
