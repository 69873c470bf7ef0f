"""Encoded images as a column of pixels: the threads that read a block decode its rows straight into their places."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from fastgpu.images.decode import EncodedImage, decode_plain, simplejpeg
from fastgpu.images.parts import Preprocessing, centre_box, draw, random_box
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.rows import Field
from fastgpu.storage.columns import ColumnDataset, RaggedColumn
from fastgpu.storage.file import RESTORE
from fastgpu.storage.layout import Range

CENTRE_SHARE = 224 / 256
"""Share of the sides that is kept for validation where training sees random parts, which make things look larger."""


def decoded(
    rows: ColumnDataset, size: tuple[int, int], *, min_scale: float = 1.0, centre_share: float | None = None
) -> ColumnDataset:
    """The same rows, with pixels of (height, width) in place of encoded images: uint8 (3, *size).

    min_scale: smallest share of the area of a random part. 1: no such part. centre_share: share of the sides of the
    largest centre that is taken. None: CENTRE_SHARE if there are random parts, otherwise all of it.
    """
    if simplejpeg is None:
        warn("simplejpeg is not installed: Pillow decodes JPEG files, which takes longer (pip install simplejpeg)")
    share = centre_share or (CENTRE_SHARE if min_scale < 1 else 1.0)
    field = Field(np.dtype(np.uint8), (3, *size), is_channels_last=True)
    names = {name for name, encoded in rows.fields.items() if encoded.codec}
    other = copy(rows)
    other.decoding = f"decoded by the readers to {size[0]} x {size[1]} pixels; data.min_crop_scale is {min_scale:g}"
    other.fields = {**rows.fields, **dict.fromkeys(names, field)}
    other.lengths = {name: lengths for name, lengths in rows.lengths.items() if name not in names}
    other.attributes = {**rows.attributes, "preprocessing": Preprocessing(size, centre_share=share).to_json()}
    other.parts = []
    for columns, first_row in zip(rows.parts, rows.first_rows, strict=True):
        pixels = {
            name: ImageColumn(field, rows.name, columns[name], first_row, size, min_scale, share) for name in names
        }
        other.parts.append({**columns, **pixels})
    return other


@dataclass
class ImageColumn:
    """Pixels of images whose bytes are a ragged column: random parts where the plan draws, otherwise the centres.

    A random part is a function of (seed, epoch, row) alone: it is the same for every world size, tier and number of
    readers, and for a resumed run.
    """

    field: Field
    name: str
    files: RaggedColumn
    first_row: int
    """Number of rows of the dataset before those of the column."""
    size: tuple[int, int]
    min_scale: float
    centre_share: float

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Decode images to their places in `out` (see `Column.read`). Raises UserError if one is damaged."""
        out_NHWC = out.transpose(0, 2, 3, 1)
        for start, places in ranges:
            values, offsets = self.files.read_rows(start, len(places))
            first_row = self.first_row + start
            draws: list[list[float]] = [[]] * len(places)
            if self.min_scale < 1 and plan and plan.order.shuffle:
                draws = draw((plan.order.seed, plan.epoch), np.arange(first_row, first_row + len(places))).tolist()
            bounds = offsets.tolist()
            for number, place in enumerate(places):
                try:
                    self._decode(values[bounds[number] : bounds[number + 1]], out_NHWC[place], draws[number])
                except Exception as error:  # a decoder may raise anything for damaged bytes
                    reason = " ".join(str(error).split())
                    cure = f"{RESTORE}, or convert the image files again with --on-error skip"
                    if isinstance(error, MemoryError) or "allocate memory" in reason:
                        cure = "free some memory, or use a smaller loader.num_readers"
                    text = f"{self.name}: the image in row {first_row + number:,} cannot be decoded: {reason}; {cure}"
                    raise UserError(text) from None

    def _decode(self, data: np.ndarray, out_HWC: np.ndarray, draws: Sequence[float]) -> None:
        """Decode an image file. draws: (N_DRAWS,) numbers that choose the part; empty: the centre."""
        if not draws and self.centre_share == 1 and decode_plain(data, out_HWC):
            return
        image = EncodedImage(data)
        if draws:
            box = random_box(draws, image.height, image.width, self.min_scale)
        else:
            box = centre_box(image.height, image.width, self.size, self.centre_share)
        out_HWC[:] = image.decode(box, self.size).transpose(1, 2, 0)
