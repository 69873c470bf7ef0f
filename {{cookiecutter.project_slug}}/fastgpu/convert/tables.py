"""CSV files, read by polars, and what belongs to a mistake in one: its line.

`Table` is the file, `parse_labels` takes columns of it for classes, attributes or targets.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
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
MAX_CLASSES = 1 << 20
"""Each class has a name in the file."""
MAX_DECIMAL = float(np.finfo(np.float32).max)


class Table:
    """A CSV file with a header, in memory. Raises UserError if it is no text in UTF-8.

    Its columns are separated by a comma, `;`, tab or `|`, whichever the header has most. content: the text, if it does
    not lie in a file of its own. names: of the columns, if it has no header.
    """

    def __init__(self, path: Path, *, content: bytes | None = None, names: Sequence[str] = ()):
        self.path = path
        with explain_errors(path, "a CSV file of UTF-8 text"):
            self._content = path.read_bytes() if content is None else content
            header = self._content.partition(b"\n")[0].decode("utf-8-sig")
            self.separator = max(SEPARATORS, key=header.count)
            named = next(csv.reader([header], delimiter=self.separator), [])
        self._has_header = not names
        self.names = list(names) or [name.strip() for name in named]

    def read(self, types: Mapping[str, Any]) -> pl.DataFrame:
        """These columns, {name: type of polars}; text without the spaces around it.

        Raises UserError with the line of a value that is missing or of another type, and of a row with more or fewer
        columns than the header. Warns of line breaks, which a stray quote makes of rows.
        """
        for name in types:
            if self.names.count(name) != 1:
                found = f"{self.path} has the columns {list_first(self.names) or 'none'}"
                raise UserError(f"{found}, and not one {name}; name those to read on the command line")
        is_text = False
        with explain_errors(self.path, "a CSV file of UTF-8 text"):
            try:
                rows = self._parse([types.get(name, pl.String) for name in self.names])
            except pl.exceptions.PolarsError:  # without the line
                is_text = True
                try:
                    rows = self._parse([pl.String] * len(self.names))
                except pl.exceptions.PolarsError as error:
                    self._check_widths()
                    problem = str(error).splitlines()[0]
                    raise UserError(f"{self.path}: {problem}; close the quotes, or double a stray one") from None
        if rows[:, -1].has_nulls():
            self._check_widths()
        is_blank = rows.select(pl.all_horizontal(pl.all().is_null())).to_series()
        self._row_numbers = (~is_blank).arg_true()
        rows = rows.filter(~is_blank)
        if not len(rows):
            raise UserError(f"{self.path} has no rows below its header")
        self._warn_of_line_breaks(rows)
        places = {name: self.names.index(name) for name in types}
        return pl.DataFrame(
            {name: self._typed(name, rows[:, place], types[name], is_text) for name, place in places.items()}
        )

    def error(self, row: int, problem: str) -> UserError:
        """An error that names the line of a row. row: its place in what `read` returned."""
        line, _ = next(islice(self._lines(), int(self._row_numbers[row]), None))
        return UserError(f"{self.path}:{line}: {problem}")

    def _parse(self, dtypes: Sequence[Any]) -> pl.DataFrame:
        return pl.read_csv(
            self._content,
            separator=self.separator,
            has_header=self._has_header,
            infer_schema=False,
            schema_overrides=dtypes,
            raise_if_empty=False,
        )

    def _typed(self, name: str, column: pl.Series, kind: Any, is_text: bool) -> pl.Series:
        """A column as its type. Raises UserError with the line of a value that is not."""
        is_missing = column.is_null()
        if column.dtype == pl.String:
            column = column.str.strip_chars()
            is_missing |= column == ""
        if is_missing.any():
            raise self.error(int(is_missing.arg_max() or 0), f"{name} is missing")
        if kind == pl.String:
            has_break = column.str.contains("\n", literal=True)
            if has_break.any():
                problem = f"{name} has a line break in quotes; remove it, or the stray quote"
                raise self.error(int(has_break.arg_max() or 0), problem)
        if not is_text or kind == pl.String:
            return column
        typed = column.cast(kind, strict=False)
        if typed.has_nulls():
            row = int(typed.is_null().arg_max() or 0)
            raise self.error(row, f"{name} is {column[row][:80]!r}; it should be {TYPE_NAMES[kind]}")
        return typed

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """(line, its fields) of each row, as the csv module reads it: slowly, and only to find a mistake."""
        text = io.TextIOWrapper(io.BytesIO(self._content), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=self.separator)
        try:
            for number, fields in enumerate(reader):
                if number or not self._has_header:
                    yield reader.line_num, fields
        except csv.Error as error:  # such as a quote that is never closed
            raise UserError(
                f"{self.path}:{reader.line_num}: {error}; close the quotes, or double a stray one"
            ) from None

    def _check_widths(self) -> None:
        """Raise UserError for the first row with more or fewer columns than the header."""
        for line, fields in self._lines():
            if fields and len(fields) != len(self.names):
                cure = "complete the row, or drop it"
                if len(fields) > len(self.names):
                    cure = "put quotes around a field that holds the character between columns, as a decimal comma does"
                counts = f"{len(fields):,} columns; its header has {len(self.names):,}"
                raise UserError(f"{self.path}:{line}: {counts}; {cure}")

    def _warn_of_line_breaks(self, rows: pl.DataFrame) -> None:
        is_long = rows.select(pl.any_horizontal(pl.col(pl.String).str.contains("\n", literal=True)).fill_null(False))
        n_long = int(is_long.to_series().sum()) if is_long.width else 0
        if n_long:
            warn(
                f"{self.path}: {n_long:,} of {len(rows):,} rows have line breaks in quotes; if a quote is a stray one, "
                "the lines up to the next quote are lost: double it"
            )


TYPE_NAMES = {
    pl.UInt8: "a whole number from 0 to 255",
    pl.UInt32: "a whole number (12, not 12.0) from 0 on",
    pl.Float64: "a number",
}


# ---------------------------------------------------------------------------------------------- labels


def parse_labels(table: Table, names: Sequence[str], n_classes: int | None) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    n_classes: number of classes, if some of the numbers do not occur. Raises UserError with the line of a label that
    does not fit.
    """
    words = table.read(dict.fromkeys(names, pl.String))
    columns = {name: _parse_numbers(table, words[name]) for name in names}
    for name, column in columns.items():
        if column.dtype == pl.String and len(names) > 1:
            cure = "several columns of labels should be numbers: 0 and 1 for attributes, decimals for targets"
            raise table.error(0, f"{name} is {column[0][:40]!r}; {cure}")
    arrays = {name: column.to_numpy() for name, column in columns.items()}
    if any(column.dtype == pl.Float32 for column in columns.values()):
        if n_classes:
            raise UserError(f"--classes is {n_classes}, but the labels of {table.path} are decimals, not classes")
        targets = np.stack([array.astype(np.float32) for array in arrays.values()], axis=1)
        return (targets[:, 0].copy(), {}) if len(names) == 1 else (targets, {"target_names": list(names)})
    if len(names) > 1:
        attributes = [_parse_attribute(table, name, array) for name, array in arrays.items()]
        return np.stack(attributes, axis=1), {"class_names": list(names)}
    (labels,) = columns.values()
    if labels.dtype == pl.Int64:
        return _parse_classes(table, labels.to_numpy(), n_classes)
    is_nan = (labels.str.to_lowercase() == "nan").to_numpy()
    if is_nan.any():
        problem = f"{names[0]} is {labels[int(is_nan.argmax())]}, a missing value; drop the row, or name the class"
        raise table.error(int(is_nan.argmax()), f"{problem} otherwise")
    classes, numbers = np.unique(labels.to_list(), return_inverse=True)
    if n_classes and len(classes) > n_classes:
        raise UserError(f"--classes is {n_classes}, but {table.path} names {len(classes)} classes")
    return numbers.astype(np.int64), {"class_names": classes.tolist()}


def _parse_numbers(table: Table, words: pl.Series) -> pl.Series:
    """Int64 if all are whole numbers, else Float32 if all are numbers, else the names as they are.

    Raises UserError if numbers and names are mixed, or if a number is too large.
    """
    whole = words.cast(pl.Int64, strict=False)
    if not whole.has_nulls():
        return whole
    numbers = words.cast(pl.Float64, strict=False)
    is_number = numbers.is_finite().fill_null(False)
    if not is_number.any():
        return words
    if not is_number.all():
        row, number = int((~is_number).arg_max() or 0), words[int(is_number.arg_max() or 0)]
        cure = f"give numbers only, or names only (such as class_{number})"
        raise table.error(row, f"{words.name} is {words[row][:40]!r}, but another row has {number[:40]}; {cure}")
    is_wide = (numbers.abs() > MAX_DECIMAL) | (whole.is_null() & ~words.str.contains(r"[.eE]"))
    if is_wide.any():
        row = int(is_wide.arg_max() or 0)
        raise table.error(row, f"{words.name} is {words[row][:40]}, which is too large; give smaller numbers, or names")
    return numbers.cast(pl.Float32)


def _parse_attribute(table: Table, name: str, values: np.ndarray) -> np.ndarray:
    allowed = (-1, 1) if -1 in values else (0, 1)
    is_wrong = ~np.isin(values, allowed)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        cure = f"attributes: {allowed[0]} or 1 (for targets, write decimals such as 2.0)"
        raise table.error(row, f"{name} is {values[row]}; several columns of labels are {cure}")
    return (values == 1).astype(np.uint8)


def _parse_classes(table: Table, labels: np.ndarray, n_classes: int | None) -> tuple[np.ndarray, dict[str, Any]]:
    n_needed = int(labels.max()) + 1
    if not n_classes and n_needed > len(labels) + MAX_UNUSED_CLASSES:
        problem = f"label {n_needed - 1} makes {n_needed:,} classes of {len(labels):,} rows"
        cure = "for targets, write decimals such as 2.0; otherwise give --classes"
        raise table.error(int(labels.argmax()), f"{problem}; {cure}")
    n_classes = n_classes or n_needed
    if n_classes > MAX_CLASSES:
        raise UserError(f"{table.path} has {n_classes:,} classes; allowed are {MAX_CLASSES:,}: are the labels ids?")
    is_wrong = (labels < 0) | (labels >= n_classes)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise table.error(row, f"label {labels[row]} is out of range; allowed are 0 to {n_classes - 1}")
    return labels, {"class_names": [str(number) for number in range(n_classes)]}
