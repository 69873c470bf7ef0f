"""Encoded images as a source of pixels: the threads that read a block decode its rows straight into their places."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import UnidentifiedImageError

from fastgpu.images.encoded import (
    Box,
    EncodedImage,
    centre_box,
    draw,
    random_box,
    simplejpeg,
)
from fastgpu.images.files import Preprocessing
from fastgpu.process.launch import RankError, warn
from fastgpu.rows.contract import (
    DerivedSource,
    PoolPlan,
    Reads,
    Source,
)
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.file import RESTORE, scratch

CENTRE_SHARE = 224 / 256
"""Share of the sides that is kept for validation where training sees random parts, which make things look larger."""


class DecodedImages(DerivedSource):
    """Another source, with pixels in place of encoded images: uint8 (3, H, W).

    `read` takes the centre of each image. A reader in random order takes a random part, if `min_scale` is below 1. The
    part is a function of (seed, epoch, row) alone: it is the same for every world size, tier and number of readers, and
    for a resumed run.
    """

    def __init__(
        self,
        encoded: Source,
        size: tuple[int, int],
        min_scale: float = 1.0,
        centre_share: float | None = None,
    ):
        """size: (height, width) of the rows.

        min_scale: smallest share of the area of a random part. 1: no such part. centre_share: share of the sides of the
        largest centre that is taken. None: CENTRE_SHARE if there are random parts, otherwise all of it.
        """
        super().__init__(encoded.name, encoded)
        self.encoded_fields = {name for name, field in encoded.fields.items() if field.codec}
        self._size = size
        self._min_scale = min_scale
        self._is_random = min_scale < 1
        self._centre_share = centre_share or (CENTRE_SHARE if min_scale < 1 else 1.0)
        self.block_rows = encoded.block_rows
        self.attributes = dict(encoded.attributes)
        self.attributes["preprocessing"] = Preprocessing(self._size, centre_share=self._centre_share).to_json()
        self.decoding = self._describe_decoding()
        self.lengths = {name: each for name, each in encoded.lengths.items() if name not in self.encoded_fields}
        pixels = Field(np.dtype(np.uint8), (3, *self._size), is_channels_last=True)
        self.fields = {**encoded.fields, **dict.fromkeys(self.encoded_fields, pixels)}
        if simplejpeg is None:
            warn("simplejpeg is not installed: Pillow decodes JPEG files, which takes longer (pip install simplejpeg)")

    @property
    def stored(self) -> Source:
        """The encoded rows, if epochs see other parts of them."""
        return self._source if self._is_random else self

    def over(self, stored: Source) -> Source:
        """The same rows, from a copy of `stored` that is kept in memory."""
        return self._of(stored) if self._is_random else stored

    def _describe_decoding(self) -> str:
        codecs = "+".join(sorted({self._source.fields[name].codec for name in self.encoded_fields}))
        part = "the centre"
        if self._min_scale < 1:
            part = f"a random part of {100 * self._min_scale:g} to 100 % of the area"
            part += f" (validation: the central {100 * self._centre_share:g} % of the sides)"
        height, width = self._size
        library = "simplejpeg and Pillow" if simplejpeg else "Pillow"
        return f"{codecs}, decoded by {library} in the reader threads to {height} x {width} pixels: {part}"

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows. Raises KeyError if it is not in memory."""
        return self._source.column(name)

    def _find_box(self, image: EncodedImage, draws: Sequence[float]) -> Box:
        """The part of an image that is taken: a random one of (N_DRAWS,) numbers, or the centre if there are none."""
        if draws:
            return random_box(draws, image.height, image.width, self._min_scale)
        return centre_box(image.height, image.width, self._size, self._centre_share)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Any]) -> None:
        """Decode random parts of images, or their centres if the plan draws nothing, to their places. Thread-safe.

        Raises RankError with the row if an image is damaged.
        """
        for start, places in reads.ranges():
            rows = np.arange(start, start + len(places))
            draws: list[list[float]] = [[]] * len(rows)
            if self._is_random and plan.seed is not None:
                draws = draw((plan.seed, plan.epoch), rows).tolist()
            for name, column in read_block(self._source, plan, rows).items():
                if name in self.encoded_fields:
                    self._decode(rows, column, out[name], places, draws=draws)
                elif isinstance(column, RaggedArray):
                    out[name].values[out[name].places(places)] = column.values
                else:
                    out[name][places] = column

    def _decode(
        self,
        rows: np.ndarray,
        files: RaggedArray,
        out: np.ndarray,
        places: np.ndarray,
        *,
        draws: Sequence[Sequence[float]],
    ) -> None:
        """Decode a part of each image file to its place in `out`, (rows, 3, H, W)."""
        for number, place in enumerate(places.tolist()):
            data = files.values[files.offsets[number] : files.offsets[number + 1]]
            try:
                image = EncodedImage(data)
                image.decode_to(out[place].transpose(1, 2, 0), self._find_box(image, draws[number]))
            except Exception as error:  # a decoder may raise anything for damaged bytes
                raise self._damage(int(rows[number]), error) from None

    def _damage(self, row: int, error: Exception) -> RankError:
        """What to say about an image that cannot be decoded."""
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        text = f"{self.name}: the image in row {row:,} cannot be decoded: {reason}"
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            return RankError(f"{text}; free some memory, or use a smaller loader.num_readers")
        return RankError(f"{text}; {RESTORE}, or convert the image files again with --on-error skip")


def read_block(source: Source, plan: PoolPlan, rows: np.ndarray) -> dict[str, Any]:
    """{field: neighbouring rows, in their order}, valid until this thread reads again."""
    n_rows = len(rows)
    columns: dict[str, Any] = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.zeros(n_rows + 1, np.int64)
            np.cumsum(source.lengths[name][rows], out=offsets[1:])
            memory = scratch(int(offsets[-1]) * field.dtype.itemsize, f"field {name}")
            columns[name] = RaggedArray(memory.view(field.dtype), offsets)
        else:
            columns[name] = np.empty((n_rows, *field.shape), field.dtype)
    source.read(plan, Reads(rows[:1], np.array([n_rows]), np.arange(n_rows)), columns)
    return columns
