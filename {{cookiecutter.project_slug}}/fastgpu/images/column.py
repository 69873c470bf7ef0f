"""The codec of image files: the threads that read a block decode its images straight into their places in the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastgpu.images.decode import EncodedImage, decode_plain
from fastgpu.images.parts import Preprocessing, centre_box, draw, random_box
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.rows import Field

CENTRE_SHARE = 224 / 256
"""Share of the sides that validation keeps where training sees random parts, in which things look larger."""


@dataclass(frozen=True)
class ImageCodec:
    """Decodes image files to pixels of (height, width), uint8 (3, H, W). See `Codec` in storage/columns.py.

    Rows of a shuffled order show random parts, others the centre. A random part is a function of (seed, epoch, row)
    alone: it is the same for every world size, tier and number of readers, and for a resumed run.
    """

    size: tuple[int, int]
    """(height, width)"""
    min_scale: float = 1.0
    """Smallest share of the area of a random part. 1: no random parts."""
    centre_share: float | None = None
    """Share of the sides of the largest centre that is taken. None: CENTRE_SHARE if there are random parts, or else
    all."""

    @property
    def field(self) -> Field:
        return Field(np.dtype(np.uint8), (3, *self.size), is_channels_last=True)

    @property
    def _share(self) -> float:
        return self.centre_share or (CENTRE_SHARE if self.min_scale < 1 else 1.0)

    @property
    def attributes(self) -> dict[str, str]:
        return {"preprocessing": Preprocessing(self.size, centre_share=self._share).to_json()}

    def __str__(self) -> str:
        height, width = self.size
        return f"decoded by the readers to {height} x {width} pixels; data.min_crop_scale is {self.min_scale:g}"

    def draw(self, plan: PoolPlan | None, row_ids: np.ndarray) -> list[list[float]]:
        """N_DRAWS random numbers for each row, which choose its part. None if it shows the centre."""
        if self.min_scale < 1 and plan and plan.order.shuffle:
            return draw((plan.order.seed, plan.epoch), row_ids).tolist()
        return [[]] * len(row_ids)

    def decode(self, data: np.ndarray, out: np.ndarray, draws: Sequence[float]) -> None:
        """Decode the bytes of an image file into `out`, uint8 (3, H, W). May raise anything for damaged bytes."""
        out_HWC = out.transpose(1, 2, 0)
        if not draws and self._share == 1 and decode_plain(data, out_HWC):
            return
        image = EncodedImage(data)
        if draws:
            box = random_box(draws, image.height, image.width, self.min_scale)
        else:
            box = centre_box(image.height, image.width, self.size, self._share)
        out_HWC[:] = image.decode(box, self.size).transpose(1, 2, 0)
