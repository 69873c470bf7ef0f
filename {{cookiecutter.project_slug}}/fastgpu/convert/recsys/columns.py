"""The columns of a table of events as numbers: ids of users and items, ratings, times."""

from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from fastgpu.convert.parquet import ParquetFiles
from fastgpu.convert.recsys.times import DATES, Clock
from fastgpu.convert.tables import TextTable
from fastgpu.process.launch import UserError

Unrated = Literal["refuse", "drop", "keep"]
NO_RATING = ("", "nan", "na", "n/a", "null", "none", "\\n")
"""Texts that stand for a missing rating, in lower case."""
TEXT = (pl.String, pl.Categorical, pl.Enum)
FORMATS = ("%Y-%m-%d", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M%#z")


class ParquetTable(TextTable):
    """Columns of Parquet files: text, numbers or dates."""

    def __init__(self, source: str, broken: dict[int, str] | None):
        """source: a file or a pattern. broken: see `TextTable`."""
        self.broken = broken
        self._files = ParquetFiles(source)
        self.names = [*self._files.schema]

    def __len__(self) -> int:
        return len(self._files)

    def where(self, row: int) -> str:
        return self._files.where(row)

    def column(self, name: str) -> pl.Series:
        self._files.check([name])
        return self._files.column(name)


class Ids(NamedTuple):
    """The ids of users or items."""

    numbers: np.ndarray
    """(events,) int32: the place of each id in `ids`."""
    ids: np.ndarray
    """Each id once, sorted: int64 if all are whole numbers without leading zeros, otherwise texts."""
    kind: str
    """The type of the ids, for messages."""


class Texts(NamedTuple):
    """A column of ids as text. Each text is kept once."""

    codes: np.ndarray
    """(events,) the place of each event's text in `texts`."""
    texts: pl.Series

    def number(self, is_whole: np.ndarray) -> Ids:
        """The ids of the events that are not broken. is_whole: (all events,) bool."""
        codes = self.codes if is_whole.all() else self.codes[is_whole]
        used = np.flatnonzero(np.bincount(codes, minlength=len(self.texts)))
        texts = self.texts[used]
        whole = texts.cast(pl.Int64, strict=False)
        is_number = (whole.cast(pl.String) == texts).fill_null(False)
        ids = whole if is_number.all() else texts
        number_of_code = np.zeros(len(self.texts), np.int32)
        number_of_code[used] = ids.rank("dense").to_numpy() - 1
        kind = "whole numbers" if is_number.all() else f"text, such as {texts.filter(~is_number)[0][:40]!r}"
        return Ids(number_of_code[codes], ids.unique().sort().to_numpy(), kind)


def read_ids(table: TextTable, name: str) -> Texts:
    """A column of ids, without surrounding spaces. Rows without an id are broken."""
    column = table.column(name)
    if not (column.dtype.is_integer() or column.dtype in TEXT):
        _refuse_type(column, "whole numbers or text")
    column = column.cast(pl.String).fill_null("")
    codes = column.cast(pl.Categorical).to_physical().to_numpy()
    event_of_code = np.zeros(int(codes.max()) + 1, np.int64)
    event_of_code[codes] = np.arange(len(codes))
    texts = column[event_of_code].str.strip_chars()  # also of codes that other columns have
    has_break = texts.str.contains("\n", literal=True)
    if (texts == "").any() or has_break.any():
        table.check(column, pl.Series(~(texts == "").to_numpy()[codes]), "it is missing")
        table.check(column, pl.Series(~has_break.to_numpy()[codes]), "remove the line break or stray quote")
    return Texts(codes, texts)


class Likes(NamedTuple):
    """Whether each event is liked, and whether it has a rating."""

    is_liked: np.ndarray
    """(events,) bool: whether the rating is above the limit."""
    is_unrated: np.ndarray
    """(events,) bool: whether the rating is missing, or stands for a missing one."""


def read_likes(table: TextTable, name: str, above: float, unrated: Unrated) -> Likes:
    """A column of ratings. Ratings above `above` are liked.

    If `above` is 0 or more, ratings below 0 stand for missing ones, as -1 often does. Rows whose rating is not a number
    are broken. Raises UserError for missing ratings if `unrated` is "refuse".
    """
    column = table.column(name)
    if not (column.dtype.is_numeric() or column.dtype in (*TEXT, pl.Boolean)):
        _refuse_type(column, "numbers")
    values = column.cast(pl.String).str.strip_chars() if column.dtype in TEXT else column
    ratings = values.cast(pl.Float64, strict=False).to_numpy()  # NaN if it is missing or no number
    odd = np.flatnonzero(~np.isfinite(ratings))
    is_missing = values[odd].cast(pl.String).fill_null("").str.to_lowercase().is_in(NO_RATING)
    is_right = np.ones(len(ratings), bool)
    is_right[odd] = is_missing.to_numpy()
    table.check(values, pl.Series(is_right), "it should be a number")
    is_unrated = np.isnan(ratings)
    if above >= 0:
        is_unrated |= ratings < 0
    if unrated == "refuse":
        cure = "it is no rating: --unrated drop leaves such events out, --unrated keep counts them as liked"
        table.refuse(values, ~is_unrated, cure)
    return Likes(np.where(is_unrated, unrated == "keep", ratings > above), is_unrated)


def read_times(table: TextTable, name: str) -> tuple[np.ndarray, Clock]:
    """The times, (events,) int64 or float64, and their clock. Rows without a number or date are broken."""
    column = table.column(name)
    if not (column.dtype.is_numeric() or column.dtype in (*TEXT, pl.Date, pl.Datetime)):
        _refuse_type(column, "numbers, dates or text")
    values = column.cast(pl.String).str.strip_chars() if column.dtype in TEXT else column
    if column.dtype in (pl.Date, pl.Datetime):
        times, clock = _microseconds(values.cast(pl.Datetime("us"))), Clock(name, DATES)
    else:
        times, clock = _read_numbers(values), None
        if times.has_nulls() and column.dtype in TEXT:
            dates = _read_dates(values)
            if dates.null_count() < times.null_count():
                times, clock = dates, Clock(name, DATES)
    cure = "it should be a number, or a date such as 2026-01-31 or 2026-01-31T12:00:00"
    table.check(values, times.is_not_null(), cure)
    return times.fill_null(0).to_numpy(), clock or Clock.guess(name, times.drop_nulls().to_numpy())


def _refuse_type(column: pl.Series, allowed: str) -> None:
    raise UserError(f"{column.name} is {column.dtype}; allowed are {allowed}: cast it, or name another column")


def _read_numbers(values: pl.Series) -> pl.Series:
    """Int64, or Float64 for floats and fractions. Values that are not numbers are null."""
    whole = values.cast(pl.Int64, strict=False)
    if not whole.has_nulls() and not values.dtype.is_float():
        return whole
    numbers = values.cast(pl.Float64, strict=False)
    return pl.select(pl.when(numbers.is_finite()).then(numbers)).to_series()


def _read_dates(values: pl.Series) -> pl.Series:
    """Microseconds since 1970 in UTC, by the format that fits most values. Values that do not fit are null."""
    texts = values.str.replace(" ", "T", literal=True).str.replace(r"(Z|T?UTC)$", "+00:00")
    found = (_microseconds(texts.str.to_datetime(form, time_unit="us", strict=False)) for form in FORMATS)
    return min(found, key=pl.Series.null_count)


def _microseconds(times: pl.Series) -> pl.Series:
    return times.dt.timestamp("us")
