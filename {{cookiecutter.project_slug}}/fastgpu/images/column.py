"""The codec of image files: the thread that reads a block decodes its images directly into their places in the pool."""

from collections.abc import Sequence

import numpy as np

from fastgpu.images.crops import Preprocessing, centre_box, draw, random_box
from fastgpu.images.decode import EncodedImage, decode_plain
from fastgpu.rows.contract import PoolPlan
from fastgpu.rows.rows import Field

CENTRE_SHARE = 224 / 256
"""Share of the sides in the centre crop of validation, if training has random crops, because these enlarge objects."""


class ImageCodec:
    """Decodes image files to pixels of one size, uint8 (3, H, W). See `Codec` in storage/columns.py.

    Shuffled rows get random crops, other rows the centre crop. A crop is a function of (seed, epoch, row, repeats of
    the row) only: it is the same for every world size, tier and number of readers, and in a resumed run.
    """

    def __init__(self, size: tuple[int, int], min_scale: float = 1.0, centre_share: float | None = None):
        """size: (height, width). min_scale: smallest share of the area of a random crop; 1: no random crops.

        centre_share: share of the sides in the centre crop. None: CENTRE_SHARE if there are random crops, else 1.
        """
        self.field = Field(np.dtype(np.uint8), (3, *size), is_channels_last=True)
        self._size = size
        self._min_scale = min_scale
        self._share = centre_share or (CENTRE_SHARE if min_scale < 1 else 1.0)
        self.attributes = {"preprocessing": Preprocessing(size, centre_share=self._share).to_json()}

    def __str__(self) -> str:
        height, width = self._size
        return f"decoded by the readers to {height} x {width} pixels; data.min_crop_scale is {self._min_scale:g}"

    def draw(self, plan: PoolPlan | None, row_ids: np.ndarray, places: np.ndarray) -> list[list[float]]:
        """N_DRAWS random numbers for each row, which determine its crop; none for a centre crop."""
        if self._min_scale < 1 and plan and plan.is_shuffled:
            return draw((plan.seed, plan.epoch), row_ids, plan.repeats[places]).tolist()
        return [[]] * len(row_ids)

    def decode(self, data: np.ndarray, out: np.ndarray, draws: Sequence[float]) -> None:
        """Decode the bytes of an image file into `out`, uint8 (3, H, W). May raise anything for damaged bytes."""
        out_HWC = out.transpose(1, 2, 0)
        if not draws and self._share == 1 and decode_plain(data, out_HWC):
            return
        image = EncodedImage(data)
        if draws:
            box = random_box(draws, image.height, image.width, self._min_scale)
        else:
            box = centre_box(image.height, image.width, self._size, self._share)
        out_HWC[:] = image.decode(box, self._size).transpose(1, 2, 0)
