"""Encoded images become pixels: any part of one, resized, with and without simplejpeg; and which part a row shows."""

import math

import numpy as np
import pytest
from scipy import stats

from fastgpu.convert.images.readers import keep
from fastgpu.imagefiles.pixels import UprightImage, decode
from fastgpu.images import decode as module
from fastgpu.images.crops import N_DRAWS, Box, Preprocessing, centre_box, draw, random_box
from fastgpu.images.decode import EncodedImage
from support.images import KINDS, bytes_of, file_of

PARTS = (
    (Box(0, 0, 150, 200), (150, 200)),
    (Box(0, 0, 150, 200), (20, 30)),
    (Box(31, 7, 101, 99), (40, 17)),
    (Box(3, 3, 20, 20), (24, 24)),
)
"""(a part of a photo, the size that it gets)"""


@pytest.mark.parametrize("kind", KINDS)
def test_decode_gives_the_pixels_of_the_converter(kind, monkeypatch):
    file = file_of(kind)
    image = EncodedImage(bytes_of(file))
    found = [image.decode(box, size).copy() for box, size in PARTS]
    upright = UprightImage(bytes_of(file))
    np.testing.assert_array_equal(found[0], decode(upright, Preprocessing()))
    small = decode(upright, Preprocessing((20, 30), "exact")).astype(int)
    assert np.abs(small - found[1]).mean() < 4  # decoded at 1/4 and then resized, not at 1/2
    monkeypatch.setattr(module, "simplejpeg", None)
    for pixels_CHW, (box, size) in zip(found, PARTS, strict=True):
        np.testing.assert_array_equal(EncodedImage(bytes_of(file)).decode(box, size), pixels_CHW)


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(module, "simplejpeg", None)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["baseline", "progressive", "grey", "CMYK", "PNG", "WebP"])
def test_decode_refuses_truncated_files(kind):
    whole = bytes_of(file_of(kind))
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        data = whole[: int(share * len(whole))]
        for read in (
            lambda data=data: EncodedImage(data).decode(*PARTS[1]),
            lambda data=data: keep(UprightImage(data)),
        ):
            with pytest.raises(Exception, match=r"\w"):
                read()


@pytest.mark.usefixtures("decoder")
def test_decode_refuses_giant_images():
    data = bytearray(file_of("baseline").getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xfe\xfe\xfe\xfe"  # height and width in its header
    with pytest.raises(Exception, match="decompression bomb"):
        EncodedImage(np.frombuffer(bytes(data), np.uint8))


def torchvision_box(rng: np.random.Generator, height: int, width: int, min_scale: float) -> Box:
    """What torchvision's RandomResizedCrop.get_params does, as it is written there."""
    for _ in range(10):
        area = height * width * rng.uniform(min_scale, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1)), h, w)
    w = min(width, round(height * (4 / 3)))
    h = min(height, round(width / (3 / 4)))
    return Box((height - h) // 2, (width - w) // 2, h, w)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (600, 200), (100, 1000)])
def test_decode_random_crops_follow_torchvision(height, width):
    n = 4000
    rng = np.random.default_rng(0)
    expected = np.array([torchvision_box(rng, height, width, 0.08) for _ in range(n)])
    draws = draw((0, 0, 0), np.arange(n)).tolist()
    found = np.array([random_box(each, height, width, 0.08) for each in draws])
    assert (found[:, :2] >= 0).all()
    assert (found[:, 0] + found[:, 2] <= height).all()
    assert (found[:, 1] + found[:, 3] <= width).all()
    found, expected = (np.column_stack([each, each[:, 0] - each[:, 1]]) for each in (found, expected))
    assert (stats.ks_2samp(found, expected).pvalue > 0.001).all()


def test_decode_draws_are_uniform_and_differ():
    rows = np.arange(3000)
    draws = draw((7, 3), rows)
    np.testing.assert_array_equal(draw((7, 3), rows[[5, 2999, 17]]), draws[[5, 2999, 17]])
    again = draw((7, 3), rows, np.full(3000, 1))
    for other in (draw((8, 3), rows), draw((7, 4), rows), again):
        assert not np.isin(other, draws).any()
    assert np.abs(np.corrcoef(draws.ravel(), again.ravel())[0, 1]) < 0.02
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 0.001
    assert np.abs(np.corrcoef(draws.T) - np.eye(N_DRAWS)).max() < 0.08


def test_decode_centre_box():
    assert centre_box(375, 500, (10, 20)) == Box(62, 0, 250, 500)
    assert centre_box(375, 500, (224, 224), 0.8) == Box(37, 100, 300, 300)
    assert centre_box(375, 500, (1, 1), 1e-9) == Box(187, 249, 1, 1)
