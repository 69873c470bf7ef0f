"""Predictions as CSV or JSON lines, one line for each row, in the order of the input."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError

Columns = dict[str, list[Any]]
"""{column: a number, a text, None or a list of such values for each row}"""
RANKED = {"probability": ("class", "class_name", "class_names", 1), "scores": ("items", "item_ids", "item_ids", 10)}
"""{what `predict` of a workload gives, (B, n): (column of the numbers of the best ones, column of their names,
attribute of model.json that has all names, how many are written)}"""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes text that begins like this for a formula."""


def to_columns(values: Mapping[str, Tensor], attributes: Mapping[str, Any], top: int | None, *, every: bool) -> Columns:
    """What `predict` gives for a batch, as columns. Of what is ranked, the best `top` are written, best first.

    top: None stands for one class, or ten items. An item of score -inf is none: its number is -1. every: the values of
    all, too, in a column each, such as `probability_cat`. attributes: of model.json. Raises UserError if `top` or
    `every` is given and nothing is ranked, or if there are fewer than `top`.
    """
    ranked = [name for name, value in values.items() if name in RANKED and value.ndim == 2]
    if (top or every) and not ranked:
        raise UserError("--top and --all are for classes or items, but `predict` of this workload ranks nothing")
    columns = {name: to_list(value) for name, value in values.items() if name not in ranked}
    for name in ranked:
        number_column, name_column, attribute, default = RANKED[name]
        n_all = values[name].shape[1]
        if top and top > n_all:
            raise UserError(f"--top is {top}, but this model has {n_all:,} to rank; allowed is 1 to {n_all}")
        names = attributes.get(attribute, ())
        has_names = len(set(names)) == n_all
        best, numbers = values[name].topk(top or min(default, n_all))
        numbers = numbers.masked_fill(best == -torch.inf, -1)
        if best.shape[1] == 1:
            best, numbers = best.squeeze(1), numbers.squeeze(1)
        columns[number_column] = numbers.tolist()
        if has_names:
            columns[name_column] = _names_of(numbers.tolist(), names)
        columns[name] = to_list(best)
        if every:
            for label, column in zip(names if has_names else range(n_all), values[name].unbind(1), strict=True):
                columns[f"{name}_{label}"] = to_list(column)
    return columns


def _names_of(numbers: Any, names: Sequence[Any]) -> Any:
    """numbers: one, of which -1 has no name, or a list."""
    if isinstance(numbers, list):
        return [_names_of(number, names) for number in numbers]
    return names[numbers] if numbers >= 0 else None


def to_list(values: Tensor) -> list[Any]:
    """Numbers as Python has them. Floats have nine significant figures, as a float32, and are None if not finite."""
    numbers: list[Any] = values.tolist()
    return _shorten(numbers) if values.is_floating_point() else numbers


def _shorten(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_shorten(number) for number in numbers]
    return float(f"{numbers:.9g}") if isfinite(numbers) else None


def count_nan(values: Mapping[str, Tensor]) -> int:
    """Number of rows for which `predict` gives NaN."""
    is_nan = [value.reshape(len(value), -1).isnan().any(1) for value in values.values()]
    return int(torch.stack(is_nan).any(0).sum())


def to_rows(ids: Columns, predicted: Columns) -> list[dict[str, Any]]:
    """Columns of a batch as rows. Raises UserError if two columns have one name."""
    if taken := ids.keys() & predicted.keys():
        raise UserError(f"two columns of the output would be called {taken.pop()}; rename it in `predict`")
    columns = ids | predicted
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class RowWriter:
    """Writes rows to an open file, as CSV or JSON lines. In CSV, a list becomes columns such as `scores_0`."""

    def __init__(self, file: IO[str], *, is_csv: bool):
        self.n_rows = 0
        """Rows that were written."""
        self._file = file
        self._is_csv = is_csv

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a line. Raises UserError if it does not fit CSV."""
        if self._is_csv:
            cells = _flatten(row)
            writer = csv.DictWriter(self._file, cells, lineterminator="\n")
            if not self.n_rows:
                writer.writeheader()
            writer.writerow(cells)
        else:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.n_rows += 1


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, list):
            if value and isinstance(value[0], list):
                raise UserError(f"{name} is a list of lists in each row, which does not fit CSV; use -o FILE.jsonl")
            cells |= {f"{name}_{place}": each for place, each in enumerate(value)}
        else:
            cells[name] = value
    return {_no_formula(name): _no_formula(value) for name, value in cells.items()}


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


@contextmanager
def open_output(path: str, terminal: IO[str], *, replace: bool = False) -> Iterator[IO[str]]:
    """The file to write to, which is complete or absent; `-` is the terminal.

    Raises UserError if the file exists and `replace` is false, or if the disk refuses.
    """
    if path == "-":
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
