"""The crop of an image, random or at the centre, and how images were prepared."""

import json
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Resize = Literal["shorter", "exact"]

N_TRIES = 10
"""Number of random boxes that are tried until one fits into the image, as in torchvision."""
N_DRAWS = 2 * N_TRIES + 2
"""Number of random numbers for one box: an area and a ratio for each try, and one place."""
MAX_LOG_RATIO = math.log(4 / 3)
MAX_ROWS = 1 << 40
"""More rows than any dataset has. This offset gives repeated rows other random numbers, for up to 700,000 repeats."""


class Preprocessing(NamedTuple):
    """How images become (height, width) pixels: the attribute `preprocessing` of converted files."""

    size: tuple[int, int] | None = None
    """(height, width). None: the images have one size already."""
    resize: Resize = "shorter"
    """shorter: cover the size and take the centre. exact: stretch."""
    centre_share: float | None = None
    """Take the largest centre crop with the aspect ratio of `size`, and this share of its sides, as in validation.
    None: `resize` applies."""

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in self._asdict().items() if name != "centre_share" or value})


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def draw(seed: tuple[int, int], rows: np.ndarray, repeats: np.ndarray | int = 0) -> np.ndarray:
    """Random numbers for `random_box`, which depend on the arguments only: (n, N_DRAWS) in [0, 1).

    seed: (seed of the run, epoch). repeats: earlier occurrences of each row in the epoch.
    """
    # SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014): any number of rows costs a few
    # array operations, and each row has its own N_DRAWS steps; NumPy would need a generator for each row. A repeated
    # row has the steps of a row far behind the last row.
    (start,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    parts = (rows + repeats * MAX_ROWS).astype(np.uint64)
    steps = parts[:, None] * np.uint64(N_DRAWS) + np.arange(1, N_DRAWS + 1, dtype=np.uint64)
    z = start + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)) * 2.0**-53


def random_box(draws: Sequence[float], height: int, width: int, min_scale: float) -> Box:
    """A box with `min_scale` to 1 of the area and an aspect ratio of 3:4 to 4:3. draws: (N_DRAWS,).

    Like torchvision's RandomResizedCrop (Szegedy et al., arXiv:1409.4842): if no try fits into the image, the box is
    the largest centre crop with an allowed ratio.
    """
    for number in range(0, 2 * N_TRIES, 2):
        area = (min_scale + (1 - min_scale) * draws[number]) * height * width
        ratio = math.exp((2 * draws[number + 1] - 1) * MAX_LOG_RATIO)
        box_height = round(math.sqrt(area / ratio))
        box_width = round(math.sqrt(area * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top = int(draws[-2] * (height - box_height + 1))
            left = int(draws[-1] * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    shape = (min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3)))
    return centre_box(height, width, shape)


def centre_box(height: int, width: int, shape: tuple[int, int], share: float = 1.0) -> Box:
    """The centre crop with the aspect ratio of `shape`. Its sides are this share of the sides of the largest one."""
    scale = share * min(height / shape[0], width / shape[1])
    box_height = max(1, min(height, round(scale * shape[0])))
    box_width = max(1, min(width, round(scale * shape[1])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)
