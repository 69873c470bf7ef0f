"""The items of a map-style `torch.utils.data.Dataset`, as columns of rows.

Shapes: n rows, N values of all rows together.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field, RaggedArray

NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""Errors of NumPy and torch for values that are no array: lists of unequal length, text, tensors on a GPU."""
Columns = dict[str, np.ndarray | RaggedArray]


def field_of(arrays: Sequence[np.ndarray], *, is_ragged: bool) -> Field:
    """The type of a field, from the first of these values. The field is ragged if only the first dimension differs.

    is_ragged: the field is ragged even if these values have one length.
    """
    first = arrays[0]
    shapes = [array.shape for array in arrays]
    differ = len({*shapes}) > 1 and {shape[1:] for shape in shapes if shape} == {first.shape[1:]}
    if not first.shape or not (differ or is_ragged):
        return Field(first.dtype, first.shape)
    return Field(first.dtype, first.shape[1:], float(np.mean([shape[0] for shape in shapes if shape])))


def to_column(
    name: str, field: Field, values: Sequence[object], row_ids: np.ndarray, *, source: str
) -> np.ndarray | RaggedArray:
    """The values of these rows in their order: (n, *shape), or ragged. name, source: names of field and Dataset.

    Raises UserError if a row has another type or shape than the first row of the Dataset, since its values would be cut
    or wrapped.
    """
    kinds = {*map(type, values)}
    with suppress(*NO_ARRAY):  # values that do not fit are reported below
        if kinds == {int} and field == Field(np.dtype(np.int64), ()):  # most labels
            return np.array(values, np.int64)
        if kinds == {Tensor} and not field.is_ragged:
            tensors = [value for value in values if isinstance(value, Tensor)]
            if len({tensor.dtype for tensor in tensors}) == 1:  # otherwise `stack` would take the wider type
                column = torch.stack(tensors).resolve_conj().resolve_neg().numpy()
                if (column.dtype, column.shape[1:]) == (field.dtype, field.shape):
                    return column
    n_free = int(field.is_ragged)  # number of dimensions that may differ
    arrays = []
    for value, row in zip(values, row_ids.tolist(), strict=True):
        array = to_array(value)
        fits = array is not None and (array.ndim, array.shape[n_free:]) == (n_free + len(field.shape), field.shape)
        if array is None or not fits or not np.can_cast(array.dtype, field.dtype, "safe"):
            found = describe_value(value) if array is None else str(Field(array.dtype, array.shape))
            cure = "give all rows the same type and shape"
            if field.shape and not field.is_ragged:
                cure += f", or the Dataset an attribute ragged = ({name!r},) if only the length differs"
            raise UserError(f"{source}: row {row} has {name} as {found}, row 0 as {field}; {cure}")
        arrays.append(array)
    if not field.is_ragged:
        return np.array(arrays, field.dtype)
    return RaggedArray(np.concatenate(arrays, dtype=field.dtype), np.cumsum([0, *map(len, arrays)]))


def to_array(value: object) -> np.ndarray | None:
    """A value of an item as a NumPy array. None: it is no number, array or CPU tensor with a type that torch knows.

    NumPy lacks bfloat16 and 8-bit floats. Such values become float32, which represents them exactly.
    """
    try:
        if isinstance(value, np.ndarray | np.generic):
            torch.from_numpy(np.empty(0, value.dtype))
            return np.asarray(value)
        # Most labels. NumPy converts an int to an array faster than torch to a tensor.
        if type(value) is int:
            return np.asarray(value, np.int64)
        tensor = torch.as_tensor(value).detach().resolve_conj().resolve_neg()
        is_known = tensor.dtype in (torch.float16, torch.float32, torch.float64) or not tensor.is_floating_point()
        return (tensor if is_known else tensor.float()).numpy()
    except NO_ARRAY:
        return None


def describe_value(value: object) -> str:
    """The type of a value that is no array, with details that may explain why."""
    details = [str(getattr(value, name)) for name in ("dtype", "layout", "device") if hasattr(value, name)]
    return " ".join([type(value).__name__, *details])
