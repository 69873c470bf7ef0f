"""Neighbouring rows as first row and number of rows: how the engine says "rows a to b"."""

from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """Runs of consecutive numbers, one run after the other: rows, or values of ragged rows."""

    starts: np.ndarray
    """(runs,) the first number of each run."""
    counts: np.ndarray
    """(runs,) how many numbers each run has."""

    def numbers(self) -> np.ndarray:
        """(sum of counts,) int64: all the numbers, run after run."""
        before = np.cumsum(self.counts, dtype=np.int64) - self.counts
        numbers = np.repeat(self.starts - before, self.counts)
        numbers += np.arange(len(numbers))
        return numbers

    def take(self, index: np.ndarray) -> "Runs":
        """The runs at `index`."""
        return Runs(self.starts[index], self.counts[index])
