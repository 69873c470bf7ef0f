"""CSV files, read by polars, and what belongs to a mistake in one: its line. Labels from columns of text."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.reader import explain_errors
from fastgpu.process.content import describe_content, open_regular
from fastgpu.process.launch import UserError, list_first, warn
from fastgpu.rows.classes import MAX_UNUSED_CLASSES

SEPARATORS = (",", ";", "\t", "|")
MAX_COLUMNS = (1 << 16) + 100  # pixels of 256x256 images, and others; reading takes minutes for more
MAX_LISTED = 10
"""Wrong lines that a message lists."""
NO_NAME = re.compile(r"[./]|^\d")
"""What names of columns rarely have, but paths and numbers do."""
NUMBER_WITH_COMMAS = r"^[-+]?\d[\d,]*,[\d.]+$"
UNIT = r"^([$€£¥₩₹]?)\s*[-+]?\d[\d,.]*\s*([^\W\d]*[^\w\s]*)$"
"""A number with a sign such as $ before it, or a unit such as % or kg behind it."""
csv.field_size_limit(1 << 30)  # pixels of one image may be a field


def read_text(path: Path) -> bytes:
    """The content of a table. Raises ValueError for a FIFO, and UserError for a file of another kind."""
    with open_regular(path) as file:
        kind = describe_content(path)
        if kind not in ("", "empty") and not kind.startswith("text"):
            raise UserError(f"{path} is no CSV, but {kind}")
        return file.read()


class Table:
    """A CSV file of UTF-8 text, in memory. Its first line has one of SEPARATORS most often.

    Raises UserError with the line of a row with more or fewer columns. Warns of line breaks, which a stray quote makes.
    """

    def __init__(self, path: Path, *, content: bytes | None = None, names: Sequence[str] = (), has_header: bool = True):
        """content: the text, if it is not that of the file. names: of the first columns, if there is no header. The
        others are then called by their numbers, from 1 on."""
        self.path = path
        with explain_errors(path, "CSV in UTF-8 (Korean: iconv -f CP949 -t UTF-8; close quotes, double stray ones)"):
            self._content = read_text(path) if content is None else content
            header = self._content.partition(b"\n")[0].decode("utf-8-sig")
            self._separator = max(SEPARATORS, key=header.count)
            self._has_header = has_header
            self.names = [name.strip() for name in next(csv.reader([header], delimiter=self._separator), [])]
            if len(self.names) > MAX_COLUMNS:
                found = f"{path} has {len(self.names):,} columns; allowed are {MAX_COLUMNS:,}"
                raise UserError(f"{found}: save arrays (.npy) for `convert.py arrays`")
            if not has_header:
                self.names = [*names, *map(str, range(len(names) + 1, len(self.names) + 1))]
            how: dict[str, Any] = {"infer_schema": False, "raise_if_empty": False}
            try:
                rows = pl.read_csv(self._content, separator=self._separator, has_header=self._has_header, **how)
            except pl.exceptions.PolarsError:
                list(self._lines())  # says the line
                raise
            if len(rows) and rows[:, -1].has_nulls():
                list(self._lines())
        self._rows = rows.filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
        if n_long := max((column.str.contains("\n", literal=True).sum() or 0 for column in self._rows), default=0):
            warn(f"{path}: {n_long:,} rows have line breaks in quotes; a stray quote swallows lines: double it")

    def texts(self, name: str) -> pl.Series:
        """A column of text without the spaces around it. Raises UserError with the line of a value that is missing."""
        column = self._find(name).str.strip_chars().replace("", None)
        self.check(column, column.is_not_null(), "it is missing")
        self.check(column, ~column.str.contains("\n", literal=True), "remove the line break or stray quote")
        return column

    def _find(self, name: str) -> pl.Series:
        """The column of this name. Raises UserError unless there is one, and rows."""
        n_found = self.names.count(name)
        if n_found == 1 and len(self._rows):
            return self._rows[:, self.names.index(name)].alias(name)
        if not self.names:
            raise UserError(f"{self.path} is empty; it should have a line for each row")
        listed = list_first(self.names)
        if n_found > 1:
            raise UserError(f"{self.path} has {n_found} columns called {name}, of {listed}; rename all but one of them")
        found, cure = f"no column {name}, but {listed}", "--columns, --label or --split-by names another"
        if n_found:
            found, cure = f"no row below its header, {listed}", "write a line for each row"
        if self._has_header:
            is_row = any(map(NO_NAME.search, self.names))
            cure += (
                f"; {'it seems to have' if is_row else 'if it has'} no header: --no-header calls the columns 1, 2, ..."
            )
        raise UserError(f"{self.path} has {found}; {cure}")

    def whole_numbers(self, name: str, highest: int, cure: str = "") -> np.ndarray:
        """A column as int64. Raises UserError with the line, and the cure, of what is no number from 0 to `highest`."""
        texts = self.texts(name)
        numbers = texts.cast(pl.Int64, strict=False)
        cure = f"it should be a whole number from 0 to {highest:,}{cure}"
        self.check(texts, numbers.is_between(0, highest).fill_null(False), cure)
        return numbers.to_numpy()

    def check(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Raise UserError with the lines of the values of a column that are not right, if there are any."""
        wrong = np.flatnonzero(~np.asarray(is_right))
        if not len(wrong):
            return
        rows = wrong[:MAX_LISTED].tolist()
        line_of = dict(enumerate(islice(self._lines(), rows[-1] + 1)))
        lines = [str(line_of[row]) for row in rows]
        value = "" if values[rows[0]] is None else str(values[rows[0]])
        more = f" and {len(wrong) - len(rows):,} more" if len(wrong) > len(rows) else ""
        listed = f" (wrong lines: {', '.join(lines)}{more})" if len(wrong) > 1 else ""
        raise UserError(f"{self.path}:{lines[0]}: {values.name} is {value[:40]!r}{listed}; {cure}")

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


class TextTable:
    """Columns of text in memory that came from no CSV. where: tells where a row came from, by its number."""

    def __init__(self, columns: Mapping[str, pl.Series | Sequence[str | None]], where: Callable[[int], str]):
        self._columns = columns
        self._where = where

    def texts(self, name: str) -> pl.Series:
        """A column without the spaces around its texts. Raises UserError with the row of a value that is missing."""
        column = pl.Series(name, self._columns[name], pl.String).str.strip_chars().replace("", None)
        self.check(column, column.is_not_null(), "it is missing")
        return column

    def check(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Raise UserError with the first row whose value is not right, if there is one, and the number of others."""
        wrong = np.flatnonzero(~np.asarray(is_right))
        if len(wrong):
            row = int(wrong[0])
            value = "" if values[row] is None else str(values[row])
            more = f" (and in {len(wrong) - 1:,} other rows)" if len(wrong) > 1 else ""
            raise UserError(f"{self._where(row)}: {values.name} is {value[:40]!r}{more}; {cure}")


def parse_labels(table: Table | TextTable, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    Numbers of one length, such as 01 and 10, are names. Raises UserError with the line of a label that is wrong.
    """
    texts = [table.texts(name) for name in names]
    numbers = [text.cast(pl.Float64, strict=False).cast(pl.Float32) for text in texts]
    are_numbers = [number.is_finite().fill_null(False) for number in numbers]
    has_zero = texts[0].str.contains(r"^0\d+$")
    are_codes = any(has_zero) and all(are_numbers[0]) and texts[0].str.len_chars().n_unique() == 1
    if len(names) == 1 and (are_codes or not are_numbers[0].any()):
        refuse_other_labels(table, texts[0])
        classes, labels = np.unique(texts[0].to_list(), return_inverse=True)
        return labels, {"class_names": classes.tolist()}
    for text, is_number in zip(texts, are_numbers, strict=True):
        table.check(
            text, is_number, "labels should be numbers in all rows, none too large, or one column of names alone"
        )
    whole = [text.cast(pl.Int64, strict=False) for text in texts]
    if any(column.has_nulls() for column in whole):
        targets = np.stack(numbers, axis=1)
        return (targets, {"target_names": list(names)}) if len(names) > 1 else (targets[:, 0], {})
    if len(names) == 1:
        labels = whole[0].to_numpy()
        table.check(
            texts[0], ~has_zero, "class numbers have no leading zero; if these are names, pad them to one length"
        )
        cure = "classes are numbered from 0 on; for targets, write decimals such as 2.0"
        table.check(whole[0], whole[0].is_between(0, len(labels) + MAX_UNUSED_CLASSES), cure)
        return labels, {"class_names": list(map(str, range(labels.max() + 1)))}
    for column in whole:
        allowed = (-1, 1) if -1 in column else (0, 1)
        cure = f"several columns of labels are attributes, {allowed[0]} or 1; for targets, write decimals such as 2.0"
        table.check(column, column.is_in(allowed), cure)
    return np.stack([column == 1 for column in whole], axis=1).astype(np.uint8), {"class_names": list(names)}


def refuse_other_labels(table: Table | TextTable, texts: pl.Series) -> None:
    """Raise UserError, with the first line, for labels that look like names of classes and are none: numbers with
    commas or one unit, and several labels in a cell."""
    has_comma = texts.str.contains(NUMBER_WITH_COMMAS)
    table.check(texts, ~has_comma, "write a decimal point, and no separator of thousands")
    units = texts.str.replace(UNIT, "$1$2")
    if units.n_unique() == 1 and units[0] and (units != texts).all():
        cure = "write numbers alone, such as 12.0; in names of classes, put text before the number"
        table.check(texts, units != units[0], f"it is a number with {units[0]}: {cure}")
    distinct = texts.unique()
    for separator in "|;,":
        parts = distinct.str.split(separator)
        parts = parts.filter(parts.list.len() > 1).explode().str.strip_chars()
        # The sign may belong to a name, above all a comma. A part that is a label of its own, or comes again, is one.
        if parts.is_in(distinct.to_list()).any() or (separator != "," and parts.n_unique() < len(parts)):
            with_space = " " * texts.str.contains(f"{separator} ", literal=True).any()
            get_dummies = f'table["{texts.name}"].str.get_dummies("{separator}{with_space}")'
            cure = f"several labels in a cell are attributes, a column of 0 and 1 for each, as pandas has {get_dummies}"
            has_one = ~texts.str.contains(separator, literal=True)
            table.check(texts, has_one, f"{cure}; name all in --columns")
