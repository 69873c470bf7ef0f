"""Files of images become pixels: whole or in part, resized, upright, with masks; and those that are kept encoded."""

import io
import math

import numpy as np
import pytest
from harness import image_file
from PIL import Image
from scipy import stats

from fastgpu.convert.images.readers import Masks, keep, read_mask
from fastgpu.images import decode as module
from fastgpu.images.decode import EncodedImage
from fastgpu.images.files import decode, read_preprocessing
from fastgpu.images.parts import N_DRAWS, Box, Preprocessing, centre_box, draw, random_box
from fastgpu.process.launch import UserError


def pixels(height: int = 30, width: int = 40) -> np.ndarray:
    """A smooth picture, which JPEG keeps, that has no symmetry."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 200 // height, columns * 200 // width, (rows + columns) % 50 * 4], axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    return io.BytesIO(image_file(image, kind, **options))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "CMYK", "1", "I;16"])
def test_whatever_is_opened_becomes_rgb_bytes(mode):
    rgb = Image.fromarray(pixels())
    if mode == "I;16":
        grey = np.asarray(rgb.convert("L")).astype(np.uint16)
        image, expected = Image.fromarray(grey * 257), np.stack([grey] * 3).astype(np.uint8)
    else:
        image = rgb.convert(mode)
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    found = decode(encoded(image, "TIFF" if mode == "CMYK" else "PNG"), Preprocessing())
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [None, (15, 20), (20, 15)])
def test_a_picture_stands_upright(orientation, size):
    upright = Image.fromarray(pixels(60, 80))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # EXIF orientation -> Image.Transpose that it asks to undo
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    found = decode(encoded(stored, "JPEG", exif=exif_of(orientation), quality=95), Preprocessing(size, "exact"))
    expected = np.asarray(upright.resize((size or (60, 80))[::-1], Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 4


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        (Preprocessing((15, 15), "shorter"), (5, 0, 35, 30)),
        (Preprocessing((10, 40), "shorter"), (0, 10, 40, 20)),
        (Preprocessing((15, 20), "exact"), (0, 0, 40, 30)),
    ],
)
def test_resizing_takes_the_part_it_should(shape, box):
    found = decode(encoded(Image.fromarray(pixels())), shape)
    height, width = shape.size
    expected = Image.fromarray(pixels()).crop(box).resize((width, height), Image.Resampling.BILINEAR)
    assert found.shape == (3, height, width)
    assert np.abs(found.transpose(1, 2, 0).astype(int) - expected).max() <= 1


def test_preprocessing_comes_back_from_json():
    for value in (Preprocessing(), Preprocessing((20, 30), "exact", 0.5)):
        assert read_preprocessing(value.to_json()) == value
    with pytest.raises(UserError, match="images that were prepared with .* need the version that prepared them"):
        read_preprocessing('{"size": [4, 5], "resize": "pad"}')


@pytest.mark.parametrize("n_zeros", [20, 300])
def test_a_png_file_that_ends_in_zeros_is_damaged_for_all_who_read_it(n_zeros, tmp_path):
    """Pillow alone decodes many of these, since zeros are pixels, too."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 99, (30, 40), np.uint8))
    data = encoded(image).getvalue()[:-n_zeros] + bytes(n_zeros)
    path = tmp_path / "x.png"
    path.write_bytes(data)
    readers = (
        lambda: EncodedImage(np.frombuffer(data, np.uint8)).decode(Box(0, 0, 30, 40), (30, 40)),
        lambda: decode(io.BytesIO(data), Preprocessing()),
        lambda: read_mask(path, is_binary=False),
    )
    for read in readers:
        with pytest.raises((SyntaxError, OSError, ValueError)):
            read()


@pytest.mark.parametrize("preprocessing", [Preprocessing(), Preprocessing((40, 10)), Preprocessing((15, 15), "exact")])
@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_a_mask_stays_on_its_upright_image(tmp_path, preprocessing, mode):
    image_HWC = np.zeros((40, 30, 3), np.uint8)
    image_HWC[4:24, 6:18] = 200  # an object, and its class below
    classes = np.where(image_HWC[:, :, 0] > 0, 7, 0)
    mask = Image.fromarray(classes.astype(np.uint16 if mode == "I;16" else np.uint8))
    if mode == "P":
        mask.putpalette(list(range(255, -1, -1)) * 3)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    on_its_side = Image.fromarray(image_HWC).transpose(Image.Transpose.ROTATE_90)
    on_its_side.save(tmp_path / "images/x.jpg", quality=95, exif=exif_of(6))
    mask.save(tmp_path / "masks/x.png")
    item = Masks(tmp_path / "images", tmp_path / "masks", prepared=preprocessing)[0]
    found_CHW, mask_HW = item["images"], item["masks"]
    np.testing.assert_array_equal(found_CHW, decode((tmp_path / "images/x.jpg").open("rb"), preprocessing))
    assert mask_HW.dtype == np.uint8
    assert mask_HW.shape == found_CHW.shape[1:] == (preprocessing.size or (40, 30))
    assert set(np.unique(mask_HW).tolist()) == {0, 7}
    is_sure = (found_CHW[0] < 20) | (found_CHW[0] > 180)  # the border of the object is blurred
    np.testing.assert_array_equal(mask_HW[is_sure] == 7, found_CHW[0][is_sure] > 180)


# ---------------------------------------------------------------------------------------------- parts of encoded images

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


def photo(kind: str) -> io.BytesIO:
    """A file of 150 x 200 pixels."""
    mode, suffix, options = KINDS[kind]
    return encoded(Image.fromarray(pixels(150, 200)).convert(mode), suffix, **options)


PARTS = (
    (Box(0, 0, 150, 200), (150, 200)),
    (Box(0, 0, 150, 200), (20, 30)),
    (Box(31, 7, 101, 99), (40, 17)),
    (Box(3, 3, 20, 20), (24, 24)),
)
"""(a part of a photo, the size that it gets)"""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_pixels_that_converting_gives_with_and_without_simplejpeg(kind, monkeypatch):
    file = photo(kind)
    image = EncodedImage(bytes_of(file))
    found = [image.decode(box, size).copy() for box, size in PARTS]
    np.testing.assert_array_equal(found[0], decode(file, Preprocessing()))
    small = decode(file, Preprocessing((20, 30), "exact")).astype(int)
    assert np.abs(small - found[1]).mean() < 4  # decoded at 1/4 and then resized, not at 1/2
    monkeypatch.setattr(module, "simplejpeg", None)
    for pixels_CHW, (box, size) in zip(found, PARTS, strict=True):
        np.testing.assert_array_equal(EncodedImage(bytes_of(file)).decode(box, size), pixels_CHW)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_part_is_that_of_the_upright_image_and_converted_files_are_upright(orientation, kind):
    options = {"icc_profile": b"x" * 40_000, **KINDS["full color"][2]}  # EXIF need not come first
    file = encoded(Image.fromarray(pixels(60, 80)), kind, exif=exif_of(orientation), **options)
    upright = decode(file, Preprocessing())
    image = EncodedImage(bytes_of(file), obeys_exif=True)
    assert (3, image.height, image.width) == upright.shape
    box = Box(5, 12, 40, 30)
    np.testing.assert_array_equal(image.decode(box, (40, 30)), upright[:, 5:45, 12:42])
    half = image.decode(box, (20, 15)).transpose(1, 2, 0)
    assert half.flags.c_contiguous  # as it goes to a pool
    expected = Image.fromarray(upright[:, 5:45, 12:42].transpose(1, 2, 0)).resize((15, 20), Image.Resampling.BILINEAR)
    assert np.abs(half.astype(int) - expected).mean() < 3
    as_stored = EncodedImage(bytes_of(file))
    assert (as_stored.height, as_stored.width) == (60, 80)
    kept = EncodedImage(np.frombuffer(keep(file.getvalue()), np.uint8))
    found = kept.decode(Box(0, 0, kept.height, kept.width), upright.shape[1:]).astype(int)
    assert np.abs(found - upright).mean() < 6


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(module, "simplejpeg", None)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["baseline", "progressive", "grey", "CMYK", "PNG", "WebP"])
def test_a_truncated_file_is_an_error_and_never_half_an_image(kind):
    whole = bytes_of(photo(kind))
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        data = whole[: int(share * len(whole))]
        for read in (lambda data=data: EncodedImage(data).decode(*PARTS[1]), lambda data=data: keep(data.tobytes())):
            with pytest.raises(Exception, match=r"\w"):
                read()


@pytest.mark.usefixtures("decoder")
def test_a_giant_image_is_refused_before_it_is_decoded():
    data = bytearray(photo("baseline").getvalue())
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
    assert (stats.ks_2samp(found, expected).pvalue > 0.001).all()


def test_draws_are_uniform_and_differ_by_seed_epoch_row_and_time_of_the_row():
    rows = np.arange(3000)
    draws = draw((7, 3), rows)
    np.testing.assert_array_equal(draw((7, 3), rows[[5, 2999, 17]]), draws[[5, 2999, 17]])
    again = draw((7, 3), rows, np.full(3000, 1))
    for other in (draw((8, 3), rows), draw((7, 4), rows), again):
        assert not np.isin(other, draws).any()
    assert np.abs(np.corrcoef(draws.ravel(), again.ravel())[0, 1]) < 0.02
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 0.001
    assert np.abs(np.corrcoef(draws.T) - np.eye(N_DRAWS)).max() < 0.08


def test_the_centre_is_the_largest_part_of_that_shape_or_a_share_of_it():
    assert centre_box(375, 500, (10, 20)) == Box(62, 0, 250, 500)
    assert centre_box(375, 500, (224, 224), 0.8) == Box(37, 100, 300, 300)
    assert centre_box(375, 500, (1, 1), 1e-9) == Box(187, 249, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_kept_as_they_are_or_made_smaller_once(kind):
    data = photo(kind).getvalue()
    kept = keep(data, 150)
    is_upright_rgb = KINDS[kind][0] in ("RGB", "L") and kind != "BMP"
    assert (kept == data) == is_upright_rgb
    assert is_upright_rgb or Image.open(io.BytesIO(kept)).mode == "RGB"
    smaller = keep(data, 60)
    assert Image.open(io.BytesIO(smaller)).format == "JPEG"
    for found, size in ((kept, (150, 200)), (smaller, (60, 80))):
        pixels_CHW = decode(io.BytesIO(found), Preprocessing()).astype(int)
        assert np.abs(pixels_CHW - decode(photo(kind), Preprocessing(size, "exact"))).mean() < 6
