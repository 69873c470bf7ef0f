"""Predictions as CSV or JSON lines, one line for each row, in the order of the input."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fastgpu.predict.inputs import Inputs
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError, stop_at_closed_pipe

NAMES = {"class": ("class_name", "class_names"), "items": ("item_ids", "item_ids")}
"""{column of numbers: (column of their names, attribute of model.json that has the names)}"""


RANKED = {"probability": ("class", 1), "scores": ("items", 10)}
"""{column of `predict`, (B, n): (column of the numbers of the best ones, how many of them)}"""


def best_of(values: Mapping[str, Tensor], top: int | None) -> dict[str, Tensor]:
    """Predictions with the best `top` classes or items, best first, in place of the values of all: (B,) or (B, top).

    top: None stands for one class, or ten items. An item of score -inf becomes -1. Raises UserError if nothing is
    ranked, or if there are fewer than `top`.
    """
    ranked = [name for name in RANKED if name in values and values[name].ndim == 2]
    if top and not ranked:
        raise UserError(f"--top is {top}, but `predict` of the workload ranks nothing")
    chosen = dict(values)
    for name in ranked:
        index_name, default = RANKED[name]
        n_all = values[name].shape[1]
        if top and top > n_all:
            raise UserError(f"--top is {top}, but this model has {n_all:,} to rank; allowed is 1 to {n_all}")
        best = chosen.pop(name).topk(top or min(default, n_all))
        indices = best.indices.masked_fill(best.values == -torch.inf, -1)
        is_one = indices.shape[1] == 1
        chosen |= {index_name: indices.squeeze(1) if is_one else indices}
        chosen |= {name: best.values.squeeze(1) if is_one else best.values}
    return chosen


def all_of(values: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> dict[str, Tensor]:
    """The ranked values of all classes or items, each in a column of its own, such as `probability_cat`.

    attributes: of model.json, which may have their names. Raises UserError if nothing is ranked.
    """
    columns: dict[str, Tensor] = {}
    for name, value in values.items():
        if name not in RANKED or value.ndim != 2:
            continue
        _, attribute = NAMES[RANKED[name][0]]
        labels = attributes.get(attribute, ())
        if len(set(labels)) != value.shape[1]:
            labels = range(value.shape[1])
        columns |= {f"{name}_{label}": column for label, column in zip(labels, value.unbind(1), strict=True)}
    if not columns:
        raise UserError("--all is given, but `predict` of the workload ranks nothing")
    return columns


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes text for a formula by, if it begins with it."""


def _as_text(value: Any) -> Any:
    """A cell of a CSV. Text that a spreadsheet would take for a formula gets a `'` before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


class PredictionWriter:
    """Writes lines to an open file.

    A value that is not finite is null in JSON and empty in CSV. Several values a row are a list in JSON; in CSV they
    are columns such as `scores_0` and `scores_1`.
    """

    def __init__(self, file: IO[str], inputs: Inputs, attributes: Mapping[str, Any], *, is_csv: bool):
        """attributes: of model.json."""
        self.n_failed = 0
        self.n_nan = 0
        """Rows for which the model gave NaN."""
        self._file = file
        self._inputs = inputs
        self._attributes = attributes
        self._is_csv = is_csv
        self._csv: csv.DictWriter | None = None

    def write(self, row_ids: Sequence[int], ids: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Write a batch. ids: {column: (B,)} of the input. values: {column: (B,), (B, k) or, for JSON, any shape}."""
        _, files, failed, _ = self._inputs
        is_nan = torch.zeros(len(row_ids), dtype=torch.bool)
        values = {name: value.cpu() for name, value in values.items()}  # once: each copy waits for the device
        for value in values.values():
            is_nan |= value.isnan().reshape(len(value), -1).any(1)
        self.n_nan += int(is_nan.sum())
        columns: dict[str, list[Any]] = {"file": [files[row] for row in row_ids]} if files else {"row": list(row_ids)}
        errors = ["error"] * (failed is not None)
        for name, value in [*ids.items(), *values.items()]:
            made = self._columns_of(name, value)
            taken = sorted(made.keys() & {*columns, *errors})
            if taken:
                raise UserError(f"two columns of the output would be called {taken[0]}; rename it in `predict`")
            columns |= made
        lines = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
        for place, row in enumerate(row_ids):
            if failed and row in failed:
                lines[place] = {"file": files[row], "error": failed.pop(row)}
                self.n_failed += 1
        if not self._is_csv:
            self._file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            return
        if self._csv is None:
            self._csv = csv.DictWriter(self._file, [*columns, *errors], lineterminator="\n")
            self._csv.writeheader()
        self._csv.writerows({name: _as_text(value) for name, value in line.items()} for line in lines)

    def _columns_of(self, name: str, value: Tensor) -> dict[str, list[Any]]:
        numbers = np.array(value.tolist())  # NumPy knows no bfloat16
        columns = {name: _shorten(numbers) if value.is_floating_point() else numbers}
        title, attribute = NAMES.get(name, ("", ""))
        labels = self._attributes.get(attribute)
        if labels and not value.is_floating_point():
            is_known = (numbers >= 0) & (numbers < len(labels))
            columns[title] = np.array([*labels, None], object)[np.where(is_known, numbers, -1)]
        if not self._is_csv or value.ndim < 2:
            return {key: rows.tolist() for key, rows in columns.items()}
        return {f"{key}_{place}": each.tolist() for key, rows in columns.items() for place, each in enumerate(rows.T)}


@partial(np.vectorize, otypes=[object])
def _shorten(value: float) -> float | None:
    """A float with nine significant figures, which are all that a float32 has; None if it is not finite."""
    return float(f"{value:.9g}") if isfinite(value) else None


@contextmanager
def open_output(path: str, terminal: IO[str], *, replace: bool = False) -> Iterator[IO[str]]:
    """The file to write to, which is complete or absent; `-` is the terminal.

    Raises UserError if the file exists and `replace` is false, or if the disk refuses.
    """
    if path == "-":
        with stop_at_closed_pipe(terminal):
            yield terminal
        return
    try:
        with (
            new_file(Path(path), replace=replace) as partial,
            partial.open("w", encoding="utf-8", errors="surrogateescape") as file,
        ):
            yield file
    except OSError as error:
        raise UserError(f"{path} was not written: {error}") from None
