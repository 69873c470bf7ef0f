"""CSV files, read with polars; the line of each mistake in a file; labels from columns of text."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
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
"""Maximum wrong lines that a message lists."""
NO_NAME = re.compile(r"[./]|^\d")
"""Matches paths and numbers, but few names of columns."""
NUMBER_WITH_COMMAS = r"^[-+]?\d[\d,]*,[\d.]+$"
UNIT = r"^([$€£¥₩₹]?)\s*[-+]?\d[\d,.]*\s*([^\W\d]*[^\w\s]*)$"
"""A number, after a currency sign such as $, or before a unit such as % or kg."""
csv.field_size_limit(1 << 30)  # pixels of one image may be a field


def read_text(path: Path) -> bytes:
    """The content of a table. Raises ValueError for a FIFO, and UserError for a file of another kind."""
    with open_regular(path) as file:
        kind = describe_content(path)
        if kind not in ("", "empty") and not kind.startswith("text"):
            raise UserError(f"{path} is no CSV, but {kind}")
        return file.read()


class TextTable:
    """Columns of text in memory. The methods that read a column count rows with a wrong value as broken."""

    broken: dict[int, str] | None
    """{row: reason}, to which broken rows are added. None: they raise UserError."""

    def __len__(self) -> int:
        """The number of rows, with broken ones."""
        raise NotImplementedError

    def where(self, row: int) -> str:
        """The origin of a row, for messages."""
        raise NotImplementedError

    def column(self, name: str) -> pl.Series:
        """The column of this name. Raises UserError unless there is one."""
        raise NotImplementedError

    def _list(self, rows: Sequence[int]) -> str:
        """The number of wrong rows, or their lines, for a message."""
        return f"wrong rows: {len(rows):,}"

    @property
    def is_whole(self) -> np.ndarray:
        """(rows,) bool: whether a row is not broken."""
        is_whole = np.ones(len(self), bool)
        if self.broken:
            is_whole[[*self.broken]] = False
        return is_whole

    def texts(self, name: str) -> pl.Series:
        """A column of text, without surrounding spaces. Rows without a text are null, and broken."""
        column = self.column(name).str.strip_chars().replace("", None)
        self.check(column, column.is_not_null(), "it is missing")
        self.check(column, ~column.str.contains("\n", literal=True), "remove the line break or stray quote")
        return column

    def split_column(self, name: str) -> np.ndarray | None:
        """The texts of the column of --split-by, (rows,). None if the name is empty."""
        return self.texts(name).fill_null("").to_numpy() if name else None

    def whole_numbers(self, name: str, highest: int, cure: str = "") -> np.ndarray:
        """A column as int64. Rows without a whole number from 0 to `highest` are broken. cure: added to the reason."""
        texts = self.texts(name)
        numbers = texts.cast(pl.Int64, strict=False)
        cure = f"it should be a whole number from 0 to {highest:,}{cure}"
        self.check(texts, numbers.is_between(0, highest), cure)
        return numbers.fill_null(0).to_numpy()

    def check(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Count the rows with a wrong value in a column as broken. is_right: (rows,). cure: what is allowed.

        Raises UserError if no value is right, because the wrong column was named. If `broken` is None, a single wrong
        value raises UserError.
        """
        is_wrong = ~_as_bool(is_right)
        if self.broken is None or is_wrong.all():
            self.refuse(values, is_right, cure)
            return
        for row in np.flatnonzero(is_wrong & self.is_whole).tolist():
            self.broken[row] = self._describe(values, row, f"; {cure}")

    def refuse(self, values: pl.Series, is_right: pl.Series | np.ndarray, cure: str) -> None:
        """Raise UserError with the lines of the wrong values of a column, if there are any.

        For columns that were misunderstood as a whole.
        """
        wrong = np.flatnonzero(~_as_bool(is_right) & self.is_whole)
        if not len(wrong):
            return
        listed = f" ({self._list(wrong.tolist())})" if len(wrong) > 1 else ""
        raise UserError(self._describe(values, int(wrong[0]), f"{listed}; {cure}"))

    def _describe(self, values: pl.Series, row: int, cure: str) -> str:
        value = "" if values[row] is None else str(values[row])
        return f"{self.where(row)}: {values.name} is {value[:40]!r}{cure}"


class TextColumns(TextTable):
    """Columns of text from other sources than a CSV."""

    def __init__(
        self,
        columns: Mapping[str, pl.Series | Sequence[str | None]],
        where: Callable[[int], str],
        broken: dict[int, str] | None = None,
    ):
        """columns: {name: (rows,)}. where: returns the origin of a row. broken: see `TextTable`."""
        self.broken = broken
        self._columns = {name: pl.Series(name, column, pl.String) for name, column in columns.items()}
        self._where = where

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def where(self, row: int) -> str:
        return self._where(row)

    def column(self, name: str) -> pl.Series:
        return self._columns[name]


class Table(TextTable):
    """A CSV file of UTF-8 text, in memory. The most frequent of SEPARATORS in the first line separates its columns.

    Rows with more or fewer columns than the first line are broken. Warns of line breaks in quotes, which may come from
    a stray quote.
    """

    def __init__(
        self,
        path: Path,
        *,
        content: bytes | None = None,
        names: Sequence[str] = (),
        has_header: bool = True,
        broken: dict[int, str] | None = None,
    ):
        """content: the text; None reads the file. names: of the first columns, if there is no header; without a name,
        a column is called by its number, from 1 on. broken: see `TextTable`."""
        self.path = path
        self.broken = broken
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
            self._rows = self._read()
        if n_long := max((column.str.contains("\n", literal=True).sum() or 0 for column in self._rows), default=0):
            warn(f"{path}: {n_long:,} rows have line breaks in quotes; a stray quote swallows lines: double it")

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self) -> pl.DataFrame:
        """The rows. Rows with more or fewer columns than the first line are broken."""
        how: dict[str, Any] = {"infer_schema": False, "raise_if_empty": False, "has_header": self._has_header}
        try:
            rows = pl.read_csv(self._content, separator=self._separator, **how)
            has_wrong_rows = len(rows) > 0 and rows[:, -1].has_nulls()
        except pl.exceptions.PolarsError:  # some have more
            rows = pl.read_csv(self._content, separator=self._separator, truncate_ragged_lines=True, **how)
            has_wrong_rows = True
        rows = rows.filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
        if has_wrong_rows:
            n_columns = np.array([count for _, count in self._lines()])
            if len(n_columns) != len(rows):
                raise ValueError("a quote is not closed, or stands inside of a field")
            cure = "complete the row, or put quotes around a field that holds the separator (a decimal comma)"
            for row in np.flatnonzero(n_columns != len(self.names)).tolist():
                found = f"{n_columns[row]:,} columns; its header has {len(self.names):,}"
                reason = f"{self.where(row)}: {found}; {cure}"
                if self.broken is None:
                    raise UserError(reason)
                self.broken[row] = reason
        return rows

    def column(self, name: str) -> pl.Series:
        """The column of this name. Raises UserError if there is no such column, or more than one, or no row."""
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

    def where(self, row: int) -> str:
        """Where a row comes from, for messages: the file and its line."""
        return f"{self.path}:{self._line_of[row]}"

    def _list(self, rows: Sequence[int]) -> str:
        lines = [str(self._line_of[row]) for row in rows[:MAX_LISTED]]
        more = f" and {len(rows) - len(lines):,} more" if len(rows) > len(lines) else ""
        return f"wrong lines: {', '.join(lines)}{more}"

    @cached_property
    def _line_of(self) -> list[int]:
        """The line of each row."""
        return [line for line, _ in self._lines()]

    def _lines(self) -> Iterator[tuple[int, int]]:
        """The line and the number of columns of each row, read with the csv module: slow, only to find mistakes."""
        text = io.TextIOWrapper(io.BytesIO(self._content), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=self._separator)
        for fields in islice(filter(any, reader), int(self._has_header), None):
            yield reader.line_num, len(fields)


def _as_bool(values: pl.Series | np.ndarray) -> np.ndarray:
    """(rows,) bool. Null is False."""
    return values.fill_null(False).to_numpy() if isinstance(values, pl.Series) else values


def parse_labels(table: TextTable, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    Numbers of one length with leading zeros, such as 01 and 10, are names. The labels of broken rows have no meaning.
    """
    texts = [table.texts(name) for name in names]
    texts = [text.set(pl.Series(~table.is_whole), None) for text in texts]
    numbers = [text.cast(pl.Float64, strict=False).cast(pl.Float32) for text in texts]
    are_numbers = [number.is_finite().fill_null(False) for number in numbers]
    has_zero = texts[0].str.contains(r"^0\d+$")
    known = texts[0].drop_nulls()
    are_codes = has_zero.any() and (are_numbers[0] | texts[0].is_null()).all() and known.str.len_chars().n_unique() == 1
    if len(names) == 1 and (are_codes or not are_numbers[0].any()):
        refuse_other_labels(table, texts[0])
        classes = np.unique(known.to_list())
        return np.searchsorted(classes, texts[0].fill_null("").to_list()), {"class_names": classes.tolist()}
    for text, is_number in zip(texts, are_numbers, strict=True):
        table.check(
            text, is_number, "labels should be numbers in all rows, none too large, or one column of names alone"
        )
    whole = [text.cast(pl.Int64, strict=False) for text in texts]
    if any(column.filter(table.is_whole).has_nulls() for column in whole):
        targets = np.stack(numbers, axis=1)
        return (targets, {"target_names": list(names)}) if len(names) > 1 else (targets[:, 0], {})
    if len(names) == 1:
        table.refuse(
            texts[0], ~has_zero, "class numbers have no leading zero; if these are names, pad them to one length"
        )
        cure = "classes are numbered from 0 on; for targets, write decimals such as 2.0"
        table.check(whole[0], whole[0].is_between(0, len(table) + MAX_UNUSED_CLASSES), cure)
        labels = np.where(table.is_whole, whole[0].fill_null(0).to_numpy(), 0)
        return labels, {"class_names": list(map(str, range(labels.max() + 1)))}
    for column in whole:
        allowed = (-1, 1) if -1 in column else (0, 1)
        cure = f"several columns of labels are attributes, {allowed[0]} or 1; for targets, write decimals such as 2.0"
        table.check(column, column.is_in(allowed), cure)
    attributes = [(column == 1).fill_null(False) for column in whole]
    return np.stack(attributes, axis=1).astype(np.uint8), {"class_names": list(names)}


def refuse_other_labels(table: TextTable, texts: pl.Series) -> None:
    """Raise UserError, with the first lines, for texts that are not names of classes: numbers with commas or a unit,
    and several labels in a cell."""
    has_comma = texts.str.contains(NUMBER_WITH_COMMAS)
    table.refuse(texts, ~has_comma, "write a decimal point, and no separator of thousands")
    units = texts.str.replace(UNIT, "$1$2")
    distinct_units = units.drop_nulls().unique().to_list()
    if len(distinct_units) == 1 and distinct_units[0] and (units != texts).all():
        cure = "write numbers alone, such as 12.0; in names of classes, put text before the number"
        table.refuse(texts, units != distinct_units[0], f"it is a number with {distinct_units[0]}: {cure}")
    distinct = texts.unique()
    for separator in "|;,":
        parts = distinct.str.split(separator)
        parts = parts.filter(parts.list.len() > 1).explode().str.strip_chars()
        # The separator, above all a comma, may belong to a name. A part that is also a label, or occurs again, is one.
        if parts.is_in(distinct.to_list()).any() or (separator != "," and parts.n_unique() < len(parts)):
            with_space = " " * texts.str.contains(f"{separator} ", literal=True).any()
            get_dummies = f'table["{texts.name}"].str.get_dummies("{separator}{with_space}")'
            cure = f"several labels in a cell are attributes, a column of 0 and 1 for each, as pandas has {get_dummies}"
            has_one = ~texts.str.contains(separator, literal=True)
            table.refuse(texts, has_one, f"{cure}; name all in --columns")
