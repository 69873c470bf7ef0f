"""Predictions as CSV or JSON lines, one line for each row, in the order of the input."""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fastgpu.process.launch import UserError

RANKED = {"probability": ("class", "class_name", "class_names", 1), "scores": ("items", "item_ids", "item_ids", 10)}
"""{what `predict` of a workload gives, (B, n): (column of the numbers of the best ones, column of their names,
attribute of model.json that has all names, how many are written)}"""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes text that begins like this for a formula."""


def to_columns(
    values: Mapping[str, Tensor], attributes: Mapping[str, Any], top: int | None, *, every: bool
) -> dict[str, Any]:
    """What `predict` gives for a batch as {column: a number, a text, None or a list of these for each row}.

    top: how many of what is ranked, best first, at most all; None: one class, or ten items. Those of NaN or -inf have
    the number -1. every: the values of all, too, in a column each, such as `probability_cat`. attributes: of
    model.json. Raises UserError if `top` or `every` is given and nothing is ranked.
    """
    ranked = [name for name, value in values.items() if name in RANKED and value.ndim == 2]
    if (top or every) and not ranked:
        raise UserError("--top and --all are for classes or items, but `predict` of this workload ranks nothing")
    columns = {name: to_list(value) for name, value in values.items() if name not in ranked}
    for name in ranked:
        number_column, name_column, attribute, default = RANKED[name]
        n_all = values[name].shape[1]
        names = attributes.get(attribute, ())
        has_names = len(set(names)) == n_all
        best, numbers = values[name].topk(min(top or default, n_all))
        numbers = numbers.masked_fill(~(best > -torch.inf), -1)
        columns[number_column] = numbers.squeeze(1).tolist()  # squeezed if there is one for each row
        if has_names:  # the last one is that of number -1
            columns[name_column] = np.array([*names, None], object)[columns[number_column]].tolist()
        columns[name] = to_list(best.squeeze(1))
        if every:
            labels = names if has_names else range(n_all)
            columns |= {f"{name}_{label}": to_list(values[name][:, place]) for place, label in enumerate(labels)}
    return columns


def to_list(values: Tensor) -> list[Any]:
    """Numbers as Python has them. Floats are as short as a float32 can be, or None if not finite."""
    if not values.is_floating_point():
        return list(values.tolist())
    numbers = values.float().numpy(force=True).astype(str).astype(float)  # 0.9 instead of 0.8999999761581421
    return list(np.where(np.isfinite(numbers), numbers, np.array(None)).tolist())


def write_rows(file: IO[str], columns: dict[str, Any], which: Iterable[bool], *, is_csv: bool, is_first: bool) -> None:
    """Write the rows of a batch, as CSV or JSON lines. In CSV, a list becomes columns such as `scores_0`.

    which: whether to write each row. is_first: nothing was written before.
    """
    if not is_csv:
        rows = compress(zip(*columns.values(), strict=True), which)
        file.writelines(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
        return
    cells: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column[0], list):
            cells |= {f"{name}_{place}": each for place, each in enumerate(zip(*column, strict=True))}
        else:
            cells[name] = column
    writer = csv.writer(file, lineterminator="\n")
    titles = [tuple(cells)] if is_first else []
    for row in [*titles, *compress(zip(*cells.values(), strict=True), which)]:
        writer.writerow(f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row)
