import io
import math

import numpy as np
import pytest
from PIL import Image
from test_files import encoded, exif_of, pixels

from fastgpu.convert.images.readers import keep
from fastgpu.images import decode as module
from fastgpu.images.decode import EncodedImage
from fastgpu.images.files import decode
from fastgpu.images.parts import N_DRAWS, Box, Preprocessing, centre_box, draw, random_box

KINDS = {
    "baseline": ("RGB", "JPEG", {"quality": 95}),
    "progressive": ("RGB", "JPEG", {"quality": 95, "progressive": True}),
    "full color": ("RGB", "JPEG", {"quality": 95, "subsampling": 0}),
    "grey": ("L", "JPEG", {"quality": 95}),
    "CMYK": ("CMYK", "JPEG", {"quality": 95}),
    "PNG": ("RGB", "PNG", {}),
    "PNG with a palette": ("P", "PNG", {}),
    "PNG with transparency": ("RGBA", "PNG", {}),
    "WebP": ("RGB", "WEBP", {"lossless": True}),
    "BMP": ("RGB", "BMP", {}),
}


def bytes_of(file: io.BytesIO) -> np.ndarray:
    return np.frombuffer(file.getvalue(), np.uint8)


def photo(kind: str, height: int = 150, width: int = 200) -> io.BytesIO:
    mode, suffix, options = KINDS[kind]
    return encoded(Image.fromarray(pixels(height, width)).convert(mode), suffix, **options)


def turned(orientation: int, kind: str, **options: object) -> io.BytesIO:
    """A file of 60 x 80 pixels with this EXIF orientation."""
    return encoded(Image.fromarray(pixels(60, 80)), kind, exif=exif_of(orientation), **options)


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(module, "simplejpeg", None)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(150, 200), (20, 30)], ids=["in full", "small"])
def test_every_kind_of_file_gives_the_pixels_that_converting_gives(kind, size, decoder):
    file = photo(kind)
    image = EncodedImage(bytes_of(file))
    found = image.decode(Box(0, 0, image.height, image.width), size)
    expected = decode(file, Preprocessing(size, "exact"))
    if size == (150, 200):
        np.testing.assert_array_equal(found, expected)
    assert np.abs(found.astype(int) - expected).mean() < 4  # decoded at 1/4 and then resized, not at 1/2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_part_is_that_of_the_upright_image(orientation, kind):
    file = turned(orientation, kind, icc_profile=b"x" * 40_000, **KINDS["full color"][2])  # EXIF need not come first
    upright = decode(file, Preprocessing())
    image = EncodedImage(bytes_of(file), obeys_exif=True)
    assert (3, image.height, image.width) == upright.shape
    as_stored = EncodedImage(bytes_of(file))  # rows of a converted file are upright
    assert (as_stored.height, as_stored.width) == (60, 80)
    assert as_stored.decode(Box(0, 0, 60, 80), (60, 80)).shape == (3, 60, 80)
    box = Box(5, 12, 40, 30)
    np.testing.assert_array_equal(image.decode(box, (40, 30)), upright[:, 5:45, 12:42])
    half = image.decode(box, (20, 15))
    assert half.transpose(1, 2, 0).flags.c_contiguous  # as it goes to a pool
    half = half.astype(int)
    expected = np.asarray(Image.fromarray(upright[:, 5:45, 12:42].transpose(1, 2, 0)).resize((15, 20), 2))
    assert np.abs(half - expected.transpose(2, 0, 1)).mean() < 3


def test_simplejpeg_and_pillow_decode_to_the_same_pixels(monkeypatch):
    def found() -> list[np.ndarray]:
        image = EncodedImage(bytes_of(photo("baseline")))
        boxes = [Box(0, 0, 150, 200), Box(31, 7, 101, 99), Box(3, 3, 20, 20)]
        return [image.decode(box, size).copy() for box in boxes for size in ((24, 24), (40, 17))]

    by_simplejpeg = found()
    monkeypatch.setattr(module, "simplejpeg", None)
    for ours, theirs in zip(by_simplejpeg, found(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["baseline", "progressive", "grey", "CMYK", "PNG", "WebP"])
def test_a_truncated_file_is_an_error_and_never_half_an_image(kind, decoder):
    whole = bytes_of(photo(kind))
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        data = whole[: int(share * len(whole))]
        with pytest.raises(Exception, match=r"\w"):
            EncodedImage(data).decode(Box(0, 0, 150, 200), (20, 20))
        with pytest.raises(Exception, match=r"\w"):
            keep(data.tobytes())


def test_a_giant_image_is_refused_before_it_is_decoded(decoder):
    data = bytearray(photo("baseline").getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xfe\xfe\xfe\xfe"  # height and width in its header
    with pytest.raises(Exception, match="decompression bomb"):
        EncodedImage(np.frombuffer(bytes(data), np.uint8))


# ---------------------------------------------------------------------------------------------- boxes


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
def test_random_parts_are_distributed_like_torchvisions(height, width):
    n = 4000
    rng = np.random.default_rng(0)
    expected = np.array([torchvision_box(rng, height, width, 0.08) for _ in range(n)])
    draws = draw((0, 0, 0), np.arange(n)).tolist()
    found = np.array([random_box(each, height, width, 0.08) for each in draws])
    assert (found[:, :2] >= 0).all()
    assert (found[:, 0] + found[:, 2] <= height).all()
    assert (found[:, 1] + found[:, 3] <= width).all()
    found, expected = (np.column_stack([each, each[:, 0] - each[:, 1]]) for each in (found, expected))
    for column in range(5):  # two-sample Kolmogorov-Smirnov at a level of 0.001; the last one: where in two dimensions
        values = np.sort(np.concatenate([found[:, column], expected[:, column]]))
        shares = [np.searchsorted(np.sort(each[:, column]), values, "right") / n for each in (found, expected)]
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * math.sqrt(2 / n)


def test_draws_are_a_function_of_seed_epoch_and_row_alone_and_uniform():
    rows = np.arange(3000)
    draws = draw((7, 3, 0), rows)
    assert draws.shape == (3000, N_DRAWS)
    np.testing.assert_array_equal(draw((7, 3, 0), rows[[5, 2999, 17]]), draws[[5, 2999, 17]])
    for other in (draw((8, 3, 0), rows), draw((7, 4, 0), rows), draw((7, 3, 1), rows)):
        assert not np.isin(other, draws).any()
    assert 0 <= draws.min() < draws.max() < 1
    counts, _ = np.histogram(draws, 100)
    assert np.square(counts - counts.mean()).sum() / counts.mean() < 150  # chi square, 99 degrees of freedom
    assert np.abs(np.corrcoef(draws.T) - np.eye(N_DRAWS)).max() < 0.08


@pytest.mark.parametrize(
    ("shape", "share", "box"),
    [
        ((224, 224), 1.0, Box(0, 62, 375, 375)),
        ((224, 224), 0.8, Box(37, 100, 300, 300)),
        ((10, 20), 1.0, Box(62, 0, 250, 500)),
        ((1, 1), 1e-9, Box(187, 249, 1, 1)),
    ],
)
def test_the_centre_is_the_largest_part_of_that_shape(shape, share, box):
    assert centre_box(375, 500, shape, share) == box


# ---------------------------------------------------------------------------------------------- kept files


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_kept_as_they_are_or_made_smaller_once(kind):
    data = photo(kind).getvalue()
    kept = keep(data)
    assert keep(data, 150) == kept
    if KINDS[kind][0] in ("RGB", "L") and kind != "BMP":
        assert kept == data
    else:  # written anew, so that training has upright RGB
        image = Image.open(io.BytesIO(kept))
        assert (image.mode, image.format) == ("RGB", "JPEG" if kind == "CMYK" else "PNG")
        found = decode(io.BytesIO(kept), Preprocessing()).astype(int)
        assert np.abs(found - decode(photo(kind), Preprocessing())).mean() <= (4 if kind == "CMYK" else 0)
    smaller = Image.open(io.BytesIO(keep(data, 60)))
    assert (smaller.format, smaller.size) == ("JPEG", (80, 60))
    expected = decode(photo(kind), Preprocessing((60, 80), "exact"))
    assert np.abs(np.asarray(smaller).transpose(2, 0, 1).astype(int) - expected).mean() < 6


@pytest.mark.parametrize("orientation", range(2, 9))
def test_photos_on_their_side_are_kept_upright(orientation):
    data = turned(orientation, "JPEG").getvalue()
    kept = keep(data)
    assert EncodedImage(np.frombuffer(kept, np.uint8)).is_plain
    found, expected = (decode(io.BytesIO(each), Preprocessing()).astype(int) for each in (kept, data))
    assert np.abs(found - expected).mean() < 6
