"""What convert.py writes: a source of rows. A `Reader` is one that gives items, some of which may be broken."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from fastgpu.convert.messages import list_first
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.rows.selection import Share

PROBED_ROWS = 100
"""Rows that are tried at most to find a whole one."""
PROBED_SIZES = 32
"""Rows that are looked at to estimate the bytes of encoded images."""


class Reader(Dataset, TorchDataset[dict[str, Any]]):
    """A map-style Dataset that can be converted, or trained on as `data.dataset`.

    A reader of your own has `__getitem__`, which gives {field: value} of one row. It may be called by many threads, and
    raise an exception of any kind if the row is broken.
    """

    splits: np.ndarray | None = None
    """(rows,) train, val or test, if the source says it."""
    encoded = False
    """Whether `images` are the bytes of image files."""

    def __init__(self, name: str, n_rows: int, labels: np.ndarray | None = None):
        """name: where the rows come from, for messages. labels: (rows,) or (rows, K)."""
        self.name = name
        self.labels = labels
        self.attributes = {}
        self.block_rows = np.ones(n_rows, np.int32)
        self.broken: dict[int, str] = {}
        """{row: why it cannot be read}, of the rows that were read."""

    @property
    def class_names(self) -> list[str] | None:
        """What `data.dataset` takes of the attributes."""
        return self.attributes.get("class_names")

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise NotImplementedError

    def column(self, name: str) -> np.ndarray | None:
        """See `Dataset.column`."""
        return self.labels if name == "labels" else None

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"{self.name}: row {row}"

    def facts(self) -> dict[str, Any]:
        """Attributes that are known when all rows have been read."""
        return {}

    def remarks(self, rows: np.ndarray) -> Sequence[str]:
        """Lines about those of these rows that were read, such as what decoding has changed."""
        return ()

    @cached_property
    def fields(self) -> dict[str, Field]:  # type: ignore[override]
        """The types of the fields, as the first whole row has them. Raises UserError if the first rows are broken."""
        n_rows = len(self.block_rows)
        tries = (self._try(row, {}) for row in range(min(PROBED_ROWS, n_rows)))
        first = next(filter(None, tries), None)
        if not first:
            reasons = list_first([*self.broken.values()], "\n  ")
            raise UserError(f"{self.name}: none of the first rows can be read:\n  {reasons}")
        fields = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        if self.encoded:
            rows = np.linspace(0, n_rows - 1, min(PROBED_SIZES, n_rows)).astype(int).tolist()
            sizes = [len(item["images"]) for row in rows if (item := self._try(row, {}))]
            mean = float(np.mean(sizes or [len(first["images"])]))
            fields["images"] = Field(np.dtype(np.uint8), (), mean, codec="encoded")
        return fields

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """See `Dataset.read`. A row that is broken is noted in `broken`; it is zeros, or has no values."""
        zeros = {name: np.zeros(0 if each.is_ragged else each.shape, each.dtype) for name, each in self.fields.items()}
        items = [self._try(row, self.fields) or zeros for row in reads.starts.tolist()]  # a block is a row
        for name, field in self.fields.items():
            values = [item[name] for item in items]
            target = out[name]
            if isinstance(target, np.ndarray):
                target[reads.places] = np.array(values, field.dtype)
            elif isinstance(target, list):
                target.append((reads.places, RaggedArray(np.concatenate(values), np.cumsum([0, *map(len, values)]))))

    def _try(self, row: int, fields: Mapping[str, Field]) -> dict[str, np.ndarray] | None:
        """The item of a row, of these fields. None: it is broken."""
        try:
            item = {name: np.asarray(value) for name, value in self[row].items()}
            for name, field in fields.items():
                if item[name].shape != field.shape and not field.is_ragged:
                    raise ValueError(f"{name} are {item[name].shape}, in the first row {field.shape}; give --size")
        except Exception as error:  # a decoder may raise anything for damaged bytes
            self.broken[row] = f"{self.where(row)} cannot be read: {error}"
            return None
        return item


def rows_of(source: Dataset) -> np.ndarray:
    """(n,) the numbers of the rows of a source, ascending."""
    return source.selection.rows() if isinstance(source.selection, Share) else np.arange(len(source))
