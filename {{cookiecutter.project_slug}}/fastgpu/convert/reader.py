"""From a map-style Dataset to a source of rows: they are read one at a time, and may turn out to be broken."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from fastgpu.convert.messages import list_first
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import Field

OnError = Literal["stop", "skip"]
"""What is done with a broken row: stop, or leave it out and list it."""
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""
MAX_COUNTED = 1000
"""Broken rows after which a conversion that would fail at its end stops at once."""
PROBED_ROWS = 100
"""Rows that are tried at most to find a whole one."""
PROBED_SIZES = 32
"""Rows that are looked at to estimate the bytes of ragged ones."""


class BrokenRowError(UserError):
    """One row cannot be read. The others may be whole."""


class Reader(TorchDataset[dict[str, Any]]):
    """A map-style Dataset, and what is known of all its rows. It can be converted, or trained on as `data.dataset`."""

    name: str
    """Where the rows come from, for messages."""
    labels: np.ndarray | None = None
    """(rows,) or (rows, K)"""
    attributes: dict[str, Any]
    """Facts for the file. More may be known once the rows have been read."""
    splits: Mapping[str, np.ndarray] = {}
    """{split: row numbers, ascending}, if the source says it."""
    encoded = False
    """Whether `images` are the bytes of image files."""

    @property
    def class_names(self) -> list[str] | None:
        """What `data.dataset` takes of the attributes."""
        return self.attributes.get("class_names")

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]:
        """{field: value} of one row. Thread-safe. Raises an exception of any kind if it is broken."""

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"{self.name}: row {row}"

    def remarks(self, rows: np.ndarray) -> Sequence[str]:
        """Lines about those of these rows that were read, such as what decoding has changed."""
        return ()


class ReaderRows(Dataset):
    """All rows of a `Reader`, each a block of its own.

    Broken rows are collected in `failed`. on_error: `stop` means that nothing is written if there is one; `skip`, that
    they are left out. Reading ends at once if more than 1 % are broken, but for `stop` not before there are 1,000.
    """

    def __init__(self, reader: Reader, on_error: OnError = "stop"):
        if not len(reader):
            raise UserError(f"{reader.name} has no rows")
        self.name = reader.name
        self.block_rows = np.ones(len(reader), np.int32)
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}, also of the other parts of a split. `read` leaves the place of such a row
        undefined; whoever takes rows from this source must leave it out."""
        self.on_error = on_error
        self._reader = reader
        self.attributes = reader.attributes
        self.fields = self._find_fields()

    @property
    def reasons(self) -> list[str]:
        """Why rows of this part are broken, in the order of the rows."""
        return [self.failed[row] for row in self._row_numbers().tolist() if row in self.failed]

    @property
    def remarks(self) -> Sequence[str]:
        """Lines about the rows of this part that were read."""
        rows = self._row_numbers()
        return self._reader.remarks(rows[~np.isin(rows, list(self.failed))])

    def column(self, name: str) -> np.ndarray:
        """The labels of all rows. Raises KeyError for other fields."""
        if name != "labels" or self._reader.labels is None:
            raise KeyError(name)
        return self._reader.labels

    def read_row(self, row: int) -> Mapping[str, Any]:
        """All fields of one row; none if it is broken. Thread-safe. Raises UserError if too many are broken."""
        try:
            return self._get(row)
        except BrokenRowError as error:
            self.failed[row] = str(error)
            n_rows = len(self._reader)
            if len(self.failed) > max(1 if self.on_error == "skip" else MAX_COUNTED, MAX_SKIPPED_SHARE * n_rows):
                reasons = [reason for _, reason in sorted(self.failed.copy().items())]  # other threads add to it
                raise describe_broken(reasons, n_rows, ", more than 1 %") from None
            return {}

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Write rows to their places (see `read_row`)."""
        for row, (place,) in reads.ranges():
            for field, value in self.read_row(row).items():
                column = out[field]
                assert isinstance(column, np.ndarray)
                column[place] = value

    def _row_numbers(self) -> np.ndarray:
        return self.selection.rows() if self.selection else np.arange(len(self))

    def _get(self, row: int) -> dict[str, Any]:
        try:
            return self._reader[row]
        except FileNotFoundError:
            raise BrokenRowError(f"{self._reader.where(row)} does not exist") from None
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise BrokenRowError(f"{self._reader.where(row)} cannot be read: {error}") from None

    def _find_fields(self) -> dict[str, Field]:
        """The fields of the first whole row. Raises UserError if the first rows are all broken."""
        reasons = []
        for row in range(min(PROBED_ROWS, len(self))):
            try:
                first = {name: np.asarray(value) for name, value in self._get(row).items()}
                break
            except BrokenRowError as error:
                reasons.append(str(error))
        else:
            raise UserError(f"{self.name}: none of the first rows can be read:\n  " + list_first(reasons, "\n  "))
        fields = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        if self._reader.encoded:
            sizes = []
            for row in np.linspace(0, len(self) - 1, min(PROBED_SIZES, len(self))).astype(int).tolist():
                with suppress(BrokenRowError):
                    sizes.append(len(self._get(row)["images"]))
            mean = float(np.mean(sizes)) if sizes else len(first["images"])
            fields["images"] = Field(np.dtype(np.uint8), (), mean, codec="encoded")
        return fields


def describe_broken(reasons: Sequence[str], n_rows: int, cure: str) -> UserError:
    """An error that lists the first broken rows of `n_rows`."""
    lines = list_first(reasons, "\n  ")
    return UserError(f"{len(reasons):,} of {n_rows:,} rows are broken{cure}:\n  {lines}")
