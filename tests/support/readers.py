"""A reader and tables for the converter."""

from collections.abc import Container, Iterable

import numpy as np

from fastgpu.convert.reader import Reader


class Numbers(Reader):
    """Rows that hold their number. Odd ones cannot be read, and of others it is known that they are broken."""

    def __init__(self, n_rows: int, odd: Container[int] = (), known: Iterable[int] = ()):
        super().__init__("numbers", n_rows, broken={row: f"numbers:{row}: it is wrong" for row in known})
        self.odd = odd
        self.values: list[int | float] = list(range(n_rows))

    def __getitem__(self, row):
        if row in self.odd:
            raise ValueError("it is odd")
        return {"x": np.full(1000, row), "y": self.values[row]}


def names_of(columns: str) -> list[str]:
    return ["a", "b"][: columns.count("|") + 1]


def csv_of(columns: str) -> str:
    """A CSV with columns that are given as "0 1|cat dog", and one more."""
    rows = zip(*(column.split() for column in columns.split("|")), strict=True)
    return "\n".join([",".join([*names_of(columns), "end"]), *(",".join([*row, "x"]) for row in rows)])
