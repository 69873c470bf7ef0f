"""The predictions of a model as a table: a line for each row; or for each class of labelled rows, with its errors.

Shapes: N rows, K classes or attributes.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from fastgpu.predict.model import Trained
from fastgpu.process.launch import UserError
from fastgpu.process.tools import csv_cell
from fastgpu.rows.rows import Rows

MAX_CLASSES = 20
"""More classes make a matrix that nobody can read: this many of the worst are printed instead."""
RANKED = {"probability": ("class", "class_name", "class_names", 1), "scores": ("items", "item_ids", "item_ids", 10)}
"""{what `predict` of a workload gives, (B, n): (column of the numbers of the best ones, column of their names,
attribute of model.json with all names, default number to write)}"""
Column = tuple[str, Iterable[object]]
"""A column of a table: its title and its cells."""

# ---------------------------------------------------------------------------------------------- a line for each row


def to_columns(values: dict[str, Any], attributes: dict[str, Any], top: int | None, *, every: bool) -> dict[str, Any]:
    """The tensors that `predict` gives for a batch as {column: a number, a text, None or a list of these for each row}.

    attributes: of model.json. top: number of classes or items, best first; None: one class, or ten items. A class or
    item with the value NaN or -inf has the number -1. every: add the values of all. Raises UserError if top or every is
    given and nothing is ranked.
    """
    ranked = [name for name, value in values.items() if name in RANKED and value.ndim == 2]
    if (top or every) and not ranked:
        raise UserError("--top and --all are for classes or items, but `predict` of this workload ranks nothing")
    columns = {name: to_list(value) for name, value in values.items() if name not in ranked}
    for name in ranked:
        number_column, name_column, attribute, default = RANKED[name]
        n_all = values[name].shape[1]
        names = attributes.get(attribute, ())
        names = names if len({*names}) == n_all else ()
        best, numbers = values[name].topk(min(top or default, n_all))
        numbers = numbers.masked_fill(~(best > -torch.inf), -1)
        columns[number_column] = numbers.squeeze(1).tolist()  # squeezed if each row has one
        if names:  # the last name, None, is for the number -1
            columns[name_column] = np.array([*names, None], object)[columns[number_column]].tolist()
        columns[name] = to_list(best.squeeze(1))
        if every:
            columns |= {f"{name}_{label}": to_list(values[name][:, n]) for n, label in enumerate(names or range(n_all))}
    return columns


def to_list(values: torch.Tensor) -> list[Any]:
    """Numbers as Python has them. Floats are as short as a float32 can be, or None if not finite."""
    if not values.is_floating_point():
        return list(values.tolist())
    numbers = values.float().numpy(force=True).astype(str).astype(float)  # 0.9 instead of 0.8999999761581421
    return list(np.where(np.isfinite(numbers), numbers, np.array(None)).tolist())


def write_rows(
    file: IO[str], columns: dict[str, Any], which: Iterable[bool], *, is_csv: bool, titles: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Write rows of a batch, as CSV or JSON lines. In CSV, a list becomes columns such as `scores_0`.

    which: whether to write each row. titles: of the CSV, as the call for the last batch returned them. Empty: nothing
    was written. Raises UserError if this batch has other titles.
    """
    if not is_csv:
        rows = compress(zip(*columns.values(), strict=True), which)
        file.writelines(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
        return ()
    cells: dict[str, Any] = {}
    for name, column in columns.items():
        if column and isinstance(column[0], list):
            cells |= {f"{name}_{place}": each for place, each in enumerate(zip(*column, strict=True))}
        else:
            cells[name] = column
    found = tuple(cells)
    if titles and found != titles:
        (name, *_) = sorted({*found} ^ {*titles})
        raise UserError(
            f"the first rows have {len(titles)} columns, and later ones {len(found)}, such as {name} in some only: "
            "`predict` of the workload should give equally many values for all rows; -o FILE.jsonl takes any number"
        )
    writer = csv.writer(file, lineterminator="\n")
    for row in [*([] if titles else [found]), *compress(zip(*cells.values(), strict=True), which)]:
        writer.writerow(map(csv_cell, row))
    return found


# ---------------------------------------------------------------------------------------------- labelled rows


class Answers(NamedTuple):
    """Names of the classes or attributes; and for each row its class (N,), or its attributes (N, K)."""

    names: list[str]
    labels: np.ndarray
    chosen: np.ndarray  # the class with the highest probability, or the attributes with one above 0.5
    probability: np.ndarray  # of the class that was chosen, or of the attribute


def ask(trained: Trained, batch: Rows) -> Answers | None:
    """The predictions for a labelled batch. None: `labels` of the batch are neither classes nor attributes."""
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
    """{column: a value for each wrong answer}, the most confident first. places: columns that name all rows."""
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
    probabilities = to_list(torch.from_numpy(probability[wrong]))
    return {name: values.tolist() for name, values in columns.items()} | {"probability": probabilities}


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
    """The columns for each class or attribute: number of rows, precision, recall."""

    def percent(of: np.ndarray) -> list[str]:
        return [f"{100 * hits / n:.1f}" if n else "-" for hits, n in zip(n_hits, of, strict=True)]

    return [("rows", n_rows), ("precision %", percent(n_chosen)), ("recall %", percent(n_rows))]


def _best_threshold(labels: np.ndarray, probability: np.ndarray) -> tuple[str, str]:
    """The highest F1 of an attribute, and the threshold of the probability that gives this F1."""
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
