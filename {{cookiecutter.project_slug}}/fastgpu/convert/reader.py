"""What convert.py writes: map-style Datasets, whose items are read by threads and may turn out to be broken."""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from fastgpu.convert.messages import list_first
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field, RaggedArray

Columns = dict[str, np.ndarray | RaggedArray]
"""{field: rows}"""

PROBED_ROWS = 100
"""Rows that are tried at most to find a whole one."""
PROBED_SIZES = 32
"""Rows that are looked at to estimate the bytes of encoded images."""


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

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, row: int) -> dict[str, Any]:
        """{field: value} of one row. Thread-safe. Raises an exception of any kind if it is broken."""
        raise NotImplementedError

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"{self.name}: row {row}"

    def remarks(self, rows: np.ndarray) -> Sequence[str]:
        """Lines about those of these rows that were read, such as what decoding has changed."""
        return ()

    @cached_property
    def block_rows(self) -> np.ndarray:
        """(blocks,) int32: rows that lie together. Blocks are shuffled first, then the rows of many blocks."""
        return np.ones(len(self), np.int32)

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The types of the fields, as the first whole row has them. Raises UserError if the first rows are broken."""
        reasons = []
        for row in range(min(PROBED_ROWS, len(self))):
            try:
                first = self._get(row)
                break
            except BrokenRowError as error:
                reasons.append(str(error))
        else:
            raise UserError(f"{self.name}: none of the first rows can be read:\n  " + list_first(reasons, "\n  "))
        fields = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        if self.encoded:
            sizes = []
            for row in np.linspace(0, len(self) - 1, min(PROBED_SIZES, len(self))).astype(int).tolist():
                with suppress(BrokenRowError):
                    sizes.append(len(self._get(row)["images"]))
            mean = float(np.mean(sizes or [len(first["images"])]))
            fields["images"] = Field(np.dtype(np.uint8), (), mean, codec="encoded")
        return fields

    def batches(self, order: BlockSampler, broken: dict[int, str]) -> Generator[Columns]:
        """All rows of an order, read by threads a few batches ahead, but those that go to `broken`, {row: why}."""
        n_threads = available_cpus()
        with ThreadPoolExecutor(n_threads, "reader") as threads:
            waiting: deque[Future[Columns]] = deque()
            for plan in order.pools(0):
                for rows in np.split(plan.row_ids, np.arange(order.batch_size, plan.n_rows, order.batch_size)):
                    waiting.append(threads.submit(self._read, rows, broken))
                    if len(waiting) > 2 * n_threads:
                        yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _read(self, rows: np.ndarray, broken: dict[int, str]) -> Columns:
        items = []
        for row in rows.tolist():
            try:
                item = self._get(row)
            except BrokenRowError as error:
                broken[row] = str(error)
                continue
            for name, field in self.fields.items():
                if item[name].shape != field.shape and not field.is_ragged:
                    shapes = f"{name} are {item[name].shape}, in the first row {field.shape}"
                    broken[row] = f"{self.where(row)}: {shapes}; give --size"
            if row not in broken:
                items.append(item)
        return {name: _stack(field, [item[name] for item in items]) for name, field in self.fields.items()}

    def _get(self, row: int) -> dict[str, np.ndarray]:
        try:
            return {name: np.asarray(value) for name, value in self[row].items()}
        except Exception as error:  # a decoder may raise anything for damaged bytes
            raise BrokenRowError(f"{self.where(row)} cannot be read: {error}") from None


class Part(NamedTuple):
    """The rows of a reader that go to one file."""

    reader: Reader
    rows: np.ndarray | None = None
    """(n,) row numbers, ascending. None: all."""

    @property
    def n_rows(self) -> int:
        return len(self.reader) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> np.ndarray | None:
        """(n,) or (n, K)"""
        labels = self.reader.labels
        return labels if labels is None or self.rows is None else labels[self.rows]


def _stack(field: Field, rows: Sequence[np.ndarray]) -> np.ndarray | RaggedArray:
    if not field.is_ragged:
        return np.array(rows, field.dtype).reshape(-1, *field.shape)
    return RaggedArray(np.concatenate([*rows, np.empty(0, field.dtype)]), np.cumsum([0, *map(len, rows)]))
