"""The items of a map-style `torch.utils.data.Dataset`, as columns of rows.

Shapes: n rows, N values of all rows together.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.rows import Field, RaggedArray

NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""What NumPy and torch raise for values that are no array: lists of unequal length, text, tensors on a GPU."""
N_SAMPLES = 8
"""Items that are compared to find out which fields have any number of values."""

Columns = dict[str, np.ndarray | RaggedArray]


class Items:
    """The items of a Dataset as columns of fixed types."""

    def __init__(self, name: str, dataset: Dataset, names: Mapping[str, str]):
        """name: for messages. names: {field: its key in the items}; if these are sequences, in their order.

        Raises UserError if the items are of no type that can be rows.
        """
        self.name = name
        self.dataset = dataset
        self._names = names
        n_rows = len(dataset)  # type: ignore[arg-type]
        samples = [self.read(row) for row in np.linspace(0, n_rows - 1, min(N_SAMPLES, n_rows)).astype(int).tolist()]
        self.fields: dict[str, Field] = {}
        self.first: dict[str, np.ndarray] = {}
        """The item of row 0."""
        for field in names:
            arrays = [to_array(sample[field]) for sample in samples]
            first = arrays[0]
            if first is None:
                found = type(samples[0][field]).__name__
                raise UserError(f"data.dataset: {name} has {field} as {found}; use numbers, arrays or CPU tensors")
            self.first[field] = first
            shapes = [array.shape for array in arrays if array is not None]
            differ = len({*shapes}) > 1 and {shape[1:] for shape in shapes if shape} == {first.shape[1:]}
            mean_values = None
            if first.shape and (differ or field in getattr(dataset, "ragged", ())):
                mean_values = float(np.mean([shape[0] for shape in shapes if shape]))
            self.fields[field] = Field(
                first.dtype, first.shape if mean_values is None else first.shape[1:], mean_values
            )

    def read(self, row: int) -> dict[str, Any]:
        """One item, as {field: what the Dataset gives}."""
        try:
            item = self.dataset[row]
        except Exception as error:
            error.add_note(f"in row {row} of {self.name}")
            raise
        names = self._names.values()
        values = item if isinstance(item, list | tuple) else [item]  # a tensor is one value
        if isinstance(item, Mapping):
            values = [item[name] for name in names if name in item]
        if len(values) == len(names):
            return dict(zip(self._names, values, strict=True))
        found = ", ".join(map(str, item)) if isinstance(item, Mapping) else f"{len(values)} values"
        raise UserError(
            f"data.dataset: the items of {self.name} have {found}; data.fields (--fields of convert.py) names "
            f"{', '.join(names)}: name what they have, values without names in their order"
        )

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int) -> Columns:
        """{field: (n, *shape), or ragged} of these rows, (n,), in their order.

        All that the items draw at random follows from the arguments, whichever process asks. Raises RankError if a row
        is not of the type and shape of the first row of the Dataset: it would be cut or wrapped.
        """
        state = np.random.SeedSequence((seed, epoch), spawn_key=(int(rows[0]),)).generate_state(3)
        random.seed(int(state[0]))
        np.random.seed(int(state[1]))
        torch.default_generator.manual_seed(int(state[2]))  # torch.manual_seed would seed GPUs, too
        row_ids = rows.tolist()
        items = [self.read(row) for row in row_ids]
        return {name: self._column(name, [item[name] for item in items], row_ids) for name in self.fields}

    def _column(self, name: str, values: list[Any], row_ids: list[int]) -> np.ndarray | RaggedArray:
        field = self.fields[name]
        dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
        are_equal = all(type(value) is Tensor and value.dtype == dtype for value in values)
        if are_equal and not field.is_ragged and all(value.shape == field.shape for value in values):
            return torch.stack(values).resolve_conj().resolve_neg().numpy()
        arrays = [self._checked(name, value, row) for value, row in zip(values, row_ids, strict=True)]
        if not field.is_ragged:
            return np.array(arrays, field.dtype)
        offsets = np.cumsum([0, *map(len, arrays)])
        return RaggedArray(np.concatenate(arrays, dtype=field.dtype), offsets)

    def _checked(self, name: str, value: object, row: int) -> np.ndarray:
        """A value as an array that the field can take without loss."""
        field = self.fields[name]
        array = to_array(value)
        found = type(value).__name__
        n_free = int(field.is_ragged)  # dimensions that may differ
        if array is not None:
            fits = array.shape[n_free:] == field.shape and array.ndim == n_free + len(field.shape)
            if fits and np.can_cast(array.dtype, field.dtype, "safe"):
                return array
            found = str(Field(array.dtype, array.shape))
        cure = "give all rows the same type and shape"
        if field.shape and not field.is_ragged:
            cure += f", or the Dataset an attribute ragged = ({name!r},) if only the length differs"
        raise RankError(f"{self.name}: row {row} has {name} as {found}, row 0 as {field}; {cure}")


def to_array(value: object) -> np.ndarray | None:
    """A value of an item as NumPy sees it. None: it is no number, array or tensor of the CPU that torch knows."""
    try:
        if isinstance(value, np.ndarray | np.generic):
            torch.from_numpy(np.empty(0, value.dtype))
            return np.asarray(value)
        if type(value) is int:  # most labels; torch takes 5 us for one
            return np.asarray(value, np.int64)
        return torch.as_tensor(value).resolve_conj().resolve_neg().numpy()
    except NO_ARRAY:
        return None
