"""The unit of a column of times, and times as text."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import NamedTuple

import numpy as np

from fastgpu.process.launch import UserError

NUMBERS, DATES = "numbers", "dates"
PER_SECOND = {DATES: 10**6, "seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
"""{unit: units per second}. Dates are kept as microseconds since 1970."""
SECONDS = (10**8, 10**11)
"""Numbers are times since 1970 in the first unit in which the largest of them is a year from 1973 to 5138."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(NamedTuple):
    """The unit of a column of times."""

    name: str
    """Name of the column."""
    unit: str
    """NUMBERS, or a key of PER_SECOND."""

    @classmethod
    def guess(cls, name: str, times: np.ndarray) -> "Clock":
        """The clock of a column of numbers, guessed from the largest one."""
        largest = max(abs(float(times.min())), abs(float(times.max())))
        units = [unit for unit, n in PER_SECOND.items() if unit != DATES and largest < SECONDS[1] * n]
        return cls(name, units[0] if units and largest >= SECONDS[0] else NUMBERS)

    def show(self, time: float) -> str:
        """A time as text: a date and time of day, or a number."""
        if self.unit != NUMBERS:
            with suppress(OverflowError):  # before the year 1, or after 9999
                return f"{EPOCH + timedelta(seconds=float(time) / PER_SECOND[self.unit]):%Y-%m-%d %H:%M:%S}"
        return f"{time:.15g}"

    def describe(self, times: np.ndarray) -> str:
        """The unit of the times, with the first and the last time."""
        kind = self.unit if self.unit in (NUMBERS, DATES) else f"{self.unit} since 1970"
        return f"{kind}, {self.show(times.min())} to {self.show(times.max())}"

    def parse(self, text: str) -> float:
        """The time of a text: a date in UTC, or a number in the unit of the column. Raises UserError for others."""
        if self.unit != DATES:
            with suppress(ValueError):
                if isfinite(number := float(text)):
                    return number
        if self.unit != NUMBERS:
            with suppress(ValueError):
                date = datetime.fromisoformat(text)
                since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - EPOCH
                return since // timedelta(microseconds=1) * PER_SECOND[self.unit] / PER_SECOND[DATES]
        allowed = {NUMBERS: "a number", DATES: "a date, such as 2026-01-31"}
        cure = allowed.get(self.unit, f"a date, such as 2026-01-31, or {self.unit} since 1970")
        raise UserError(f"--split-by-time has {text}; {self.name} has {self.unit}, so it should be a share, or {cure}")
