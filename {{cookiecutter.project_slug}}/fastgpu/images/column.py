"""Encoded images as a column of pixels: the threads that read a block decode its rows straight into their places."""

from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from PIL import UnidentifiedImageError

from fastgpu.images.decode import EncodedImage, decode_plain, simplejpeg
from fastgpu.images.parts import Preprocessing, centre_box, draw, random_box
from fastgpu.process.launch import RankError, warn
from fastgpu.rows.contract import Dataset, PoolPlan
from fastgpu.rows.rows import Field
from fastgpu.storage.columns import Column, ColumnDataset, RaggedColumn
from fastgpu.storage.file import RESTORE
from fastgpu.storage.layout import Range

CENTRE_SHARE = 224 / 256
"""Share of the sides that is kept for validation where training sees random parts, which make things look larger."""


class ImageDecoder:
    """How encoded images become pixels: uint8 (3, H, W), random parts where the plan draws, otherwise the centres.

    A random part is a function of (seed, epoch, row) alone: it is the same for every world size, tier and number of
    readers, and for a resumed run.
    """

    def __init__(self, size: tuple[int, int], min_scale: float = 1.0, centre_share: float | None = None):
        """size: (height, width) of the rows.

        min_scale: smallest share of the area of a random part. 1: no such part. centre_share: share of the sides of the
        largest centre that is taken. None: CENTRE_SHARE if there are random parts, otherwise all of it.
        """
        self.size = size
        self.min_scale = min_scale
        self.centre_share = centre_share or (CENTRE_SHARE if min_scale < 1 else 1.0)
        self.field = Field(np.dtype(np.uint8), (3, *size), is_channels_last=True)
        if simplejpeg is None:
            warn("simplejpeg is not installed: Pillow decodes JPEG files, which takes longer (pip install simplejpeg)")

    def __str__(self) -> str:
        part = "the centre"
        if self.min_scale < 1:
            part = f"random parts of {100 * self.min_scale:g} to 100 % of the area, the centre for validation"
        return f"decoded in the reader threads to {self.size[0]} x {self.size[1]} pixels: {part}"

    def decoded(self, rows: Dataset) -> Dataset:
        """The same rows, with pixels in place of encoded images."""
        assert isinstance(rows, ColumnDataset)
        other = copy(rows)
        names = {name for name, field in rows.fields.items() if field.codec}
        other.decoding = str(self)
        other.fields = {**rows.fields, **dict.fromkeys(names, self.field)}
        other.lengths = {name: lengths for name, lengths in rows.lengths.items() if name not in names}
        preprocessing = Preprocessing(self.size, centre_share=self.centre_share).to_json()
        other.attributes = {**rows.attributes, "preprocessing": preprocessing}
        other.parts = []
        first_row = 0
        for part, n_rows in zip(rows.parts, rows.part_rows, strict=True):
            columns: dict[str, Column] = dict(part)
            for name in names:
                column = columns[name]
                assert isinstance(column, RaggedColumn)
                columns[name] = ImageColumn(rows.name, column, self, first_row)
            other.parts.append(columns)
            first_row += n_rows
        return other

    def decode(self, data: np.ndarray, out_HWC: np.ndarray, draws: Sequence[float]) -> None:
        """Decode an image file. draws: (N_DRAWS,) numbers that choose the part; empty: the centre."""
        if not draws and self.centre_share == 1 and decode_plain(data, out_HWC):
            return
        image = EncodedImage(data)
        if draws:
            box = random_box(draws, image.height, image.width, self.min_scale)
        else:
            box = centre_box(image.height, image.width, self.size, self.centre_share)
        out_HWC[:] = image.decode(box, self.size).transpose(1, 2, 0)


class ImageColumn:
    """Pixels of images whose bytes are a ragged column."""

    def __init__(self, name: str, files: RaggedColumn, decoder: ImageDecoder, first_row: int):
        """name: of the dataset. first_row: number of rows of the dataset before those of the column."""
        self.field = decoder.field
        self._name = name
        self._files = files
        self._decoder = decoder
        self._first_row = first_row

    def read(self, ranges: Iterable[Range], out: np.ndarray, plan: PoolPlan | None = None) -> None:
        """Decode images to their places in `out` (see `Column.read`). Raises RankError if one is damaged."""
        out_NHWC = out.transpose(0, 2, 3, 1)
        for start, places in ranges:
            values, offsets = self._files.read_rows(start, len(places))
            first_row = self._first_row + start
            draws: list[list[float]] = [[]] * len(places)
            if self._decoder.min_scale < 1 and plan and plan.seed is not None:
                draws = draw((plan.seed, plan.epoch), np.arange(first_row, first_row + len(places))).tolist()
            bounds = offsets.tolist()
            for number, place in enumerate(places):
                try:
                    self._decoder.decode(values[bounds[number] : bounds[number + 1]], out_NHWC[place], draws[number])
                except Exception as error:  # a decoder may raise anything for damaged bytes
                    raise self._damage(first_row + number, error) from None

    def _damage(self, row: int, error: Exception) -> RankError:
        """What to say about an image that cannot be decoded."""
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        text = f"{self._name}: the image in row {row:,} cannot be decoded: {reason}"
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            return RankError(f"{text}; free some memory, or use a smaller loader.num_readers")
        return RankError(f"{text}; {RESTORE}, or convert the image files again with --on-error skip")
