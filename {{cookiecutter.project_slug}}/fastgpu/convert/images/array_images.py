"""Images in arrays as rows that can be trained on: channels first, and bytes if that is wanted."""

from collections.abc import Callable
from typing import Any

import numpy as np

from fastgpu.convert.array_files import Columns, LazyColumn
from fastgpu.images.files import is_one_hot, looks_like_nhwc
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray


def prepare_images(
    columns: Columns, layout: str | None, byte_range: tuple[float, float] | None, *, clip: bool
) -> Columns:
    """Fields (N, H, W, C), and `images` (N, H, W), become (N, C, H, W); `labels` (N, 1) and one-hot floats become (N,).

    `images` and `labels` get a type that can be trained on, if they have another one. All changes are printed.
    The rows are computed when they are read. layout: `nhwc` or `nchw`; None raises UserError if the channels seem to be
    last. byte_range: the values of images that become 0 and 255; what lies between is rounded. clip: values outside of
    it become 0 or 255, too, instead of an error.
    """
    prepared = dict(columns)
    has_images = False
    for name, column in columns.items():
        shape: tuple[int, ...] = () if isinstance(column, RaggedArray) else column.shape
        is_classes = name == "labels" and bool(shape) and column.dtype.kind == "f" and is_one_hot(column[:])
        if name == "labels" and len(shape) == 2 and shape[1] == 1 and column.dtype.kind in "bui":
            prepared[name] = _convert(column, lambda rows: rows[:, 0])
        elif is_classes:
            prepared[name] = _convert(column, lambda rows: rows.argmax(1))
        elif name == "images" and len(shape) == 3:
            prepared[name] = _convert(column, lambda rows: rows[:, None])
        elif len(shape) == 4 and layout == "nhwc":
            prepared[name] = _convert(column, lambda rows: rows.transpose(0, 3, 1, 2))
        elif layout is None and looks_like_nhwc(shape[1:]):
            cure = "--layout nhwc writes it as (N, C, H, W), and --layout nchw as it is"
            raise UserError(f"{name} is {shape}, which looks like (N, H, W, C); {cure}")
        if prepared[name] is not column:
            what = "with a single 1 in each row are written as classes" if is_classes else "are written as"
            print(f"{name} {shape} {what} {prepared[name].shape}")
        if shape and len(prepared[name].shape) == 4:
            has_images = True
            if byte_range:
                prepared[name] = _to_bytes(name, prepared[name], byte_range, clip)
        if shape and name in ("images", "labels"):
            prepared[name] = _with_fitting_type(name, prepared[name])
    if not has_images and (layout or byte_range):
        raise UserError(f"--layout and --to are for images (N, C, H, W), but the fields are {', '.join(columns)}")
    return prepared


def _with_fitting_type(name: str, column: Any) -> Any:
    """Images or labels of a type that can be trained on. Raises UserError for images of integers of another type."""
    dtype = column.dtype
    if name == "images" and dtype.kind in "iu" and dtype != np.uint8:
        cure = "--to uint8 --range 0:255 writes them as bytes"
        raise UserError(f"images are {dtype}; allowed are uint8 and floats; {cure}")
    is_wide = name == "images" and dtype.kind == "f" and dtype.itemsize > 4
    if dtype.kind != "b" and not is_wide:
        return column
    converted = _convert(column, lambda rows: rows.astype(np.float32 if is_wide else np.uint8))
    print(f"{name}, {dtype}, are written as {converted.dtype}")
    return converted


def _to_bytes(name: str, column: Any, byte_range: tuple[float, float], clip: bool) -> LazyColumn:
    low, high = byte_range

    def convert(rows: np.ndarray) -> np.ndarray:
        values = rows.astype(np.float64)
        if clip:
            values = np.clip(values, low, high)
        is_outside = ~((values >= low) & (values <= high))  # of NaN, too
        if is_outside.any():
            cure = "" if clip else "; give another --range, or --clip"
            raise UserError(f"{name} has the value {values[is_outside][0]:g}, outside of {low:g} to {high:g}{cure}")
        return np.rint((values - low) * (255 / (high - low))).astype(np.uint8)

    return _convert(column, convert)


def _convert(column: Any, convert: Callable[[np.ndarray], np.ndarray]) -> LazyColumn:
    """A column whose rows are converted when they are read."""
    no_rows = convert(column[:0])
    return LazyColumn((len(column), *no_rows.shape[1:]), no_rows.dtype, lambda rows: convert(column[rows]))
