"""Images in arrays as rows that can be trained on: channels first, and bytes if that is wanted."""

import argparse
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fastgpu.convert.array_files import Columns, LazyColumn
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.images import looks_like_nhwc

IMAGES = "images"
"""The field whose rows (H, W) are images of one channel."""


class ImageOptions(NamedTuple):
    """How images that lie in arrays are written."""

    layout: Literal["nchw", "nhwc"] | None = None
    """The order of the axes of the source. None: channels first, unless it looks otherwise, which is an error."""
    byte_range: tuple[float, float] | None = None
    """These values become 0 and 255, and what lies between is rounded. None: values are written as they are."""
    clip: bool = False
    """Whether values outside of byte_range become 0 or 255. Otherwise they are an error."""


def prepare_images(columns: Columns, options: ImageOptions) -> Columns:
    """Take images (N, H, W) and (N, H, W, C) to (N, C, H, W), and labels (N, 1) to (N,), and print it.

    The rows are computed when they are read. Raises UserError if images seem to be (N, H, W, C) and `options.layout`
    does not say so.
    """
    prepared = dict(columns)
    n_images = 0
    for name, column in columns.items():
        if isinstance(column, RaggedArray):
            continue
        shape = column.shape
        if len(shape) == 2 and shape[1] == 1 and name == "labels" and column.dtype.kind in "bui":
            prepared[name] = _convert(column, shape[:1], column.dtype, lambda rows: rows[:, 0])
            print(f"{name} {shape} are written as {shape[:1]}")
        if len(shape) != 4 and not (len(shape) == 3 and name == IMAGES):
            continue
        n_images += 1
        prepared[name] = _channels_first(name, column, options.layout)
        if options.byte_range:
            prepared[name] = _as_bytes(name, prepared[name], options.byte_range, options.clip)
    if not n_images and (options.layout or options.byte_range):
        raise UserError(f"--layout and --to are for images (N, C, H, W), but the fields are {', '.join(columns)}")
    return prepared


def _channels_first(name: str, column: Any, layout: str | None) -> Any:
    shape = column.shape
    if len(shape) == 3:
        print(f"{name} {shape} are written as {(shape[0], 1, *shape[1:])}: one channel")
        return _convert(column, (shape[0], 1, *shape[1:]), column.dtype, lambda rows: rows[:, None])
    if layout is None and looks_like_nhwc(shape[1:]):
        raise UserError(
            f"{name} is {shape}, which looks like (N, H, W, C); --layout nhwc writes it as (N, C, H, W), and --layout "
            "nchw as it is"
        )
    if layout != "nhwc":
        return column
    n_rows, height, width, channels = shape
    return _convert(column, (n_rows, channels, height, width), column.dtype, lambda rows: rows.transpose(0, 3, 1, 2))


def _as_bytes(name: str, column: Any, byte_range: tuple[float, float], clip: bool) -> LazyColumn:
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

    return _convert(column, column.shape, np.dtype(np.uint8), convert)


def _convert(
    column: Any, shape: tuple[int, ...], dtype: np.dtype, convert: Callable[[np.ndarray], np.ndarray]
) -> LazyColumn:
    return LazyColumn(shape, dtype, lambda rows: convert(column[rows]))


def parse_range(text: str) -> tuple[float, float]:
    """`0:4095` -> (0.0, 4095.0)."""
    number = r"(-?\d+(?:\.\d+)?)"
    match = re.fullmatch(f"{number}:{number}", text)
    if match is None or float(match[1]) >= float(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not the lowest and the highest value, such as 0:4095")
    return float(match[1]), float(match[2])
