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

EXPECTED = "a CSV file of UTF-8 text (if it is Korean: iconv -f CP949 -t UTF-8; close quotes, double stray ones)"
SEPARATORS = (",", ";", "\t", "|")
MAX_UNUSED_CLASSES = 1000
"""Class numbers without a row. If there are more, the labels are likely not class numbers."""
TYPE_NAMES = {
    pl.UInt8: "a whole number from 0 to 255",
    pl.UInt32: "a whole number (12, not 12.0) from 0 on",
    pl.Float64: "a number",
    pl.String: "text",
}
csv.field_size_limit(1 << 30)  # pixels of one image may be a field


class Table:
    """A CSV file with a header, in memory. Raises UserError if it is no text in UTF-8.

    Its columns are separated by a comma, `;`, tab or `|`, whichever the header has most. content: the text, if it does
    not lie in a file of its own. names: of the columns, if it has no header.
    """

    def __init__(self, path: Path, *, content: bytes | None = None, names: Sequence[str] = ()):
        self.path = path
        with explain_errors(path, EXPECTED):
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
        with explain_errors(self.path, EXPECTED):
            try:
                rows = self._parse(types)
            except pl.exceptions.PolarsError:  # without the line: as text, its values are checked below
                list(self._lines())
                rows = self._parse({})
            if rows[:, -1].has_nulls():
                list(self._lines())
        rows = rows.filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
        if not len(rows):
            raise UserError(f"{self.path} has no rows below its header")
        breaks = [rows[name].str.contains("\n", literal=True).sum() for name in rows.select(pl.col(pl.String)).columns]
        if n_long := max(breaks, default=0):
            warn(f"{self.path}: {n_long:,} rows have line breaks in quotes; a stray quote swallows lines: double it")
        return pl.DataFrame({name: self._typed(name, rows[:, self.names.index(name)], types[name]) for name in types})

    def check(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Raise UserError with the line of the first value of a column that is not right, if there is one."""
        wrong = np.flatnonzero(~np.asarray(is_right))
        if len(wrong):
            row = int(wrong[0])
            line = next(islice(self._lines(), row, None))
            value = "" if values[row] is None else str(values[row])
            raise UserError(f"{self.path}:{line}: {values.name} is {value[:40]!r}; {cure}")

    def _parse(self, types: Mapping[str, Any]) -> pl.DataFrame:
        return pl.read_csv(
            self._content,
            separator=self.separator,
            has_header=self._has_header,
            infer_schema=False,
            schema_overrides=[types.get(name, pl.String) for name in self.names],
            raise_if_empty=False,
        )

    def _typed(self, name: str, column: pl.Series, kind: Any) -> pl.Series:
        """A column as its type. Raises UserError with the line of a value that is not."""
        column = column.alias(name)
        if column.dtype == pl.String:
            column = column.str.strip_chars().replace("", None)
        self.check(column, column.is_not_null(), "it is missing")
        if kind == pl.String:
            self.check(column, ~column.str.contains("\n", literal=True), "remove the line break or stray quote")
        typed = column.cast(kind, strict=False)
        self.check(column, typed.is_not_null(), f"it should be {TYPE_NAMES[kind]}")
        return typed

    def _lines(self) -> Iterator[int]:
        """The line of each row, as the csv module reads it: slowly, and only to find a mistake.

        Raises UserError for a row with more or fewer columns than the header.
        """
        text = io.TextIOWrapper(io.BytesIO(self._content), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=self.separator)
        for fields in islice(filter(any, reader), int(self._has_header), None):
            if len(fields) != len(self.names):
                counts = f"{len(fields):,} columns; its header has {len(self.names):,}"
                cure = "complete the row, or put quotes around a field that holds the separator (a decimal comma)"
                raise UserError(f"{self.path}:{reader.line_num}: {counts}; {cure}")
            yield reader.line_num


# ---------------------------------------------------------------------------------------------- labels


def parse_labels(table: Table, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    Raises UserError with the line of a label that does not fit.
    """
    words = table.read(dict.fromkeys(names, pl.String))
    columns = [_parse_numbers(table, words[name]) for name in names]
    several = pl.DataFrame(columns)
    if pl.String in several.dtypes and len(names) == 1:
        classes, numbers = np.unique(columns[0].to_list(), return_inverse=True)
        return numbers, {"class_names": classes.tolist()}
    for column in columns:
        cure = "several columns of labels are numbers: 0 and 1 for attributes, decimals for targets"
        table.check(column, np.full(len(column), column.dtype != pl.String), cure)
    if pl.Float32 in several.dtypes:
        targets = several.cast(pl.Float32).to_numpy()
        return (targets, {"target_names": list(names)}) if len(names) > 1 else (targets[:, 0], {})
    if len(names) == 1:
        cure = "classes are numbered from 0 on; for targets, write decimals such as 2.0"
        table.check(columns[0], columns[0].is_between(0, len(words) + MAX_UNUSED_CLASSES), cure)
        labels = columns[0].to_numpy()
        return labels, {"class_names": list(map(str, range(labels.max() + 1)))}
    for column in columns:
        allowed = (-1, 1) if -1 in column else (0, 1)
        cure = f"several columns of labels are attributes, {allowed[0]} or 1; for targets, write decimals such as 2.0"
        table.check(column, column.is_in(allowed), cure)
    return several.select(pl.all() == 1).cast(pl.UInt8).to_numpy(), {"class_names": list(names)}


def _parse_numbers(table: Table, words: pl.Series) -> pl.Series:
    """Int64 if all are whole numbers, else Float32 if all are numbers, else the names as they are.

    Raises UserError if numbers and names are mixed, or if a number is too large.
    """
    whole = words.cast(pl.Int64, strict=False)
    if not whole.has_nulls():
        return whole
    numbers = words.cast(pl.Float64, strict=False).cast(pl.Float32)
    is_number = numbers.is_finite().fill_null(False)
    if not is_number.any():
        return words
    table.check(words, is_number, "others are numbers; give numbers only (not too large), or names only")
    return numbers
