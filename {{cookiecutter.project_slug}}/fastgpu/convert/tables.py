"""CSV files, read by polars, and what belongs to a mistake in one: its line.

`Table` is the file, `parse_labels` takes columns of it for classes, attributes or targets.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.messages import explain_errors, list_first
from fastgpu.process.launch import UserError, warn

SEPARATORS = (",", ";", "\t", "|")
MAX_UNUSED_CLASSES = 1000
"""Class numbers without a row. If there are more, the labels are likely not class numbers."""
csv.field_size_limit(1 << 30)  # pixels of one image may be a field


class Table:
    """A CSV file of UTF-8 text with a header, in memory.

    Its columns are separated by a comma, `;`, tab or `|`, whichever the header has most. content: the text, if it does
    not lie in a file of its own. names: of the columns, if it has no header. Raises UserError with the line of a row
    with more or fewer columns than the header. Warns of line breaks, which a stray quote makes of rows.
    """

    def __init__(self, path: Path, *, content: bytes | None = None, names: Sequence[str] = ()):
        self.path = path
        cures = "if it is Korean: iconv -f CP949 -t UTF-8; close quotes, double stray ones"
        with explain_errors(path, f"a CSV file of UTF-8 text ({cures})"):
            self._content = path.read_bytes() if content is None else content
            header = self._content.partition(b"\n")[0].decode("utf-8-sig")
            self._separator = max(SEPARATORS, key=header.count)
            named = next(csv.reader([header], delimiter=self._separator), [])
            self._has_header = not names
            self.names = list(names) or [name.strip() for name in named]
            how: dict[str, Any] = {"separator": self._separator, "has_header": self._has_header}
            try:
                rows = pl.read_csv(self._content, **how, infer_schema=False, raise_if_empty=False)
            except pl.exceptions.PolarsError:
                list(self._lines())  # says the line
                raise
            if len(rows) and rows[:, -1].has_nulls():
                list(self._lines())
        self._rows = rows.filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
        n_long = [column.str.contains("\n", literal=True).sum() or 0 for column in self._rows]
        if any(n_long):
            warn(f"{path}: {max(n_long):,} rows have line breaks in quotes; a stray quote swallows lines: double it")

    def texts(self, name: str) -> pl.Series:
        """A column of text without the spaces around it. Raises UserError with the line of a value that is missing."""
        if self.names.count(name) != 1:
            found = f"{self.path} has the columns {list_first(self.names) or 'none'}"
            raise UserError(f"{found}, and not one {name}; name those to read on the command line")
        if not len(self._rows):
            raise UserError(f"{self.path} has no rows below its header")
        column = self._rows[:, self.names.index(name)].alias(name).str.strip_chars().replace("", None)
        self.check(column, column.is_not_null(), "it is missing")
        self.check(column, ~column.str.contains("\n", literal=True), "remove the line break or stray quote")
        return column

    def whole_numbers(self, name: str, highest: int) -> np.ndarray:
        """A column as int64. Raises UserError with the line of what is no whole number from 0 to `highest`."""
        texts = self.texts(name)
        numbers = texts.cast(pl.Int64, strict=False)
        is_right = numbers.is_between(0, highest).fill_null(False)
        self.check(texts, is_right, f"it should be a whole number from 0 to {highest:,}")
        return numbers.to_numpy()

    def decimals(self, name: str) -> np.ndarray:
        """A column as float64. Raises UserError with the line of what is no number."""
        texts = self.texts(name)
        numbers = texts.cast(pl.Float64, strict=False)
        self.check(texts, numbers.is_finite().fill_null(False), "it should be a number")
        return numbers.to_numpy()

    def check(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Raise UserError with the line of the first value of a column that is not right, if there is one."""
        wrong = np.flatnonzero(~np.asarray(is_right))
        if len(wrong):
            row = int(wrong[0])
            line = next(islice(self._lines(), row, None))
            value = "" if values[row] is None else str(values[row])
            raise UserError(f"{self.path}:{line}: {values.name} is {value[:40]!r}; {cure}")

    def _lines(self) -> Iterator[int]:
        """The line of each row, as the csv module reads it: slowly, and only to find a mistake."""
        text = io.TextIOWrapper(io.BytesIO(self._content), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=self._separator)
        for fields in islice(filter(any, reader), int(self._has_header), None):
            if len(fields) != len(self.names):
                counts = f"{len(fields):,} columns; its header has {len(self.names):,}"
                cure = "complete the row, or put quotes around a field that holds the separator (a decimal comma)"
                raise UserError(f"{self.path}:{reader.line_num}: {counts}; {cure}")
            yield reader.line_num


def parse_labels(table: Table, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    Raises UserError with the line of a label that does not fit.
    """
    columns = [_parse_numbers(table, table.texts(name), may_be_names=len(names) == 1) for name in names]
    several = pl.DataFrame(columns)
    if pl.String in several.dtypes:
        classes, numbers = np.unique(columns[0].to_list(), return_inverse=True)
        return numbers, {"class_names": classes.tolist()}
    if pl.Float32 in several.dtypes:
        targets = several.cast(pl.Float32).to_numpy()
        return (targets, {"target_names": list(names)}) if len(names) > 1 else (targets[:, 0], {})
    if len(names) == 1:
        (labels,) = columns
        cure = "classes are numbered from 0 on; for targets, write decimals such as 2.0"
        table.check(labels, labels.is_between(0, len(labels) + MAX_UNUSED_CLASSES), cure)
        return labels.to_numpy(), {"class_names": list(map(str, range(labels.to_numpy().max() + 1)))}
    for column in columns:
        allowed = (-1, 1) if -1 in column else (0, 1)
        cure = f"several columns of labels are attributes, {allowed[0]} or 1; for targets, write decimals such as 2.0"
        table.check(column, column.is_in(allowed), cure)
    return several.select(pl.all() == 1).cast(pl.UInt8).to_numpy(), {"class_names": list(names)}


def _parse_numbers(table: Table, words: pl.Series, *, may_be_names: bool) -> pl.Series:
    """Int64 if all are whole numbers, else Float32 if all are numbers, else the names as they are.

    Raises UserError with the line of what is no number, or too large, unless all are names and these are allowed.
    """
    whole = words.cast(pl.Int64, strict=False)
    if not whole.has_nulls():
        return whole
    numbers = words.cast(pl.Float64, strict=False).cast(pl.Float32)
    is_number = numbers.is_finite().fill_null(False)
    if may_be_names and not is_number.any():
        return words
    cure = "several columns of labels are numbers: 0 and 1 for attributes, decimals for targets"
    if may_be_names:
        cure = "others are numbers; give numbers only (not too large), or names only"
    table.check(words, is_number, cure)
    return numbers
