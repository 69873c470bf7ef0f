"""The items of a map-style `torch.utils.data.Dataset`, as rows of fixed types and shapes."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.rows import Field

NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""What NumPy and torch raise for values that are no array: lists of unequal length, text, tensors on a GPU."""


class Items:
    """Items by (seed, epoch, row). All randomness in an item follows from these, whichever process draws it."""

    types: Mapping[str, Field]
    """Type and shape of each field in the first row."""

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str]):
        """name: for messages. fields: {field: its key in the items}; if these are sequences, in their order."""
        self.name = name
        self.dataset = dataset
        self.row_ids: np.ndarray | slice = slice(None)
        """The rows of the dataset that are used."""
        self._fields = fields

    def row_id(self, row: int) -> int:
        """The number of a row in the dataset."""
        return int(self.row_ids[row]) if isinstance(self.row_ids, np.ndarray) else row

    def read(self, row: int, *, seed: int = 0, epoch: int = 0) -> dict[str, Any]:
        """One item, as {field: what the dataset gives}."""
        row = self.row_id(row)
        seed = (seed * 1_000_000_007 + epoch * 1_000_003 + row) % (1 << 32)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too, and take 60 times as long
        try:
            item = self.dataset[row]
            if isinstance(item, Mapping):
                if missing := [source for source in self._fields.values() if source not in item]:
                    raise UserError(
                        f"data.dataset: the items of {self.name} have {', '.join(map(str, item))}, not "
                        f"{', '.join(missing)}; name what they have in data.fields, or in --fields NAME=NAME of repack"
                    )
                return {name: item[source] for name, source in self._fields.items()}
            values = item if isinstance(item, Sequence) else (item,)  # a tensor is one value
            if len(values) != len(self._fields):
                raise UserError(
                    f"data.dataset: the items of {self.name} have {len(values)} values, but {len(self._fields)} names "
                    f"are given: {', '.join(self._fields)}; name all of them, in their order, in data.fields, or in "
                    "--fields NAME=NAME of repack"
                )
            return dict(zip(self._fields, values, strict=True))
        except Exception as error:
            error.add_note(f"in row {row} of {self.name}")
            raise

    def fill(self, out: Mapping[str, np.ndarray], rows: Sequence[int], *, seed: int = 0, epoch: int = 0) -> None:
        """Write the items of these rows to the beginning of `out`, {field: (n or more, *shape)}.

        Raises RankError if a row is not of the type and shape of the first row: it would be cut or wrapped.
        """
        for place, row in enumerate(rows):
            for name, value in self.read(row, seed=seed, epoch=epoch).items():
                out[name][place] = self._checked(name, value, row)

    def _checked(self, name: str, value: object, row: int) -> np.ndarray | np.generic:
        """A value as an array that the field can take without loss."""
        field = self.types[name]
        try:
            array = to_array(value)
            if array.dtype == field.dtype and array.shape == field.shape:
                return array
        except NO_ARRAY:
            pass  # the next lines say what it is
        found = type_of(value)
        if isinstance(found, str) or found.shape != field.shape or not np.can_cast(found.dtype, field.dtype, "safe"):
            raise RankError(
                f"{self.name}: row {self.row_id(row)} has {name} as {found}, row 0 as {field}; give all rows the same "
                "type and shape"
            )
        return to_array(value)


def to_array(value: object) -> np.ndarray | np.generic:
    """A value of an item as NumPy sees it. Raises one of NO_ARRAY if it is no number, array or tensor of the CPU."""
    if isinstance(value, np.ndarray):
        return value
    if type(value) is int:  # most labels; torch takes 5 us for one
        return np.int64(value)
    return torch.as_tensor(value).resolve_conj().resolve_neg().numpy()


def type_of(value: object) -> Field | str:
    """Type and shape of a value of an item; the name of its class if it is no number, array or tensor of the CPU."""
    try:
        if isinstance(value, np.ndarray):
            value = value.copy()  # torch takes no view that goes backwards, such as a mirrored image
        array = torch.as_tensor(value).resolve_conj().resolve_neg().numpy()
    except NO_ARRAY:
        return type(value).__name__
    return Field(array.dtype, array.shape)
