"""Files of images become pixels: resized, upright, with masks; and those that are kept encoded."""

import io

import numpy as np
import pytest
from PIL import Image

from fastgpu.convert.images.readers import Masks, keep, read_mask
from fastgpu.imagefiles.pixels import UprightImage, decode, open_upright, read_preprocessing
from fastgpu.images.crops import Box, Preprocessing
from fastgpu.images.decode import EncodedImage
from fastgpu.process.launch import UserError
from support.images import KINDS, bytes_of, encoded, file_of, pixels


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def pixels_of(file: io.BytesIO, preprocessing: Preprocessing = Preprocessing()) -> np.ndarray:  # noqa: B008 (immutable)
    """The pixels of an image file, as convert.py prepares them."""
    return decode(UprightImage(bytes_of(file)), preprocessing)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "CMYK", "1", "I;16"])
def test_pixels_of_every_mode_are_rgb(mode):
    rgb = Image.fromarray(pixels())
    if mode == "I;16":
        grey = np.asarray(rgb.convert("L")).astype(np.uint16)
        image, expected = Image.fromarray(grey * 257), np.stack([grey] * 3).astype(np.uint8)
    else:
        image = rgb.convert(mode)
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    found = pixels_of(encoded(image, "TIFF" if mode == "CMYK" else "PNG"))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("size", [None, (15, 20), (20, 15)])
def test_pixels_stand_upright(orientation, size):
    upright = Image.fromarray(pixels(60, 80))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # EXIF orientation -> Image.Transpose that it asks to undo
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation in undo else upright
    found = pixels_of(encoded(stored, "JPEG", exif=exif_of(orientation), quality=95), Preprocessing(size, "exact"))
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
def test_pixels_resized_from_the_right_part(shape, box):
    found = pixels_of(encoded(Image.fromarray(pixels())), shape)
    height, width = shape.size
    expected = Image.fromarray(pixels()).crop(box).resize((width, height), Image.Resampling.BILINEAR)
    assert found.shape == (3, height, width)
    assert np.abs(found.transpose(1, 2, 0).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pixels_of_a_box_are_upright(orientation, kind):
    options = {"icc_profile": b"x" * 40_000, **KINDS["full color"][2]}  # EXIF need not come first
    file = encoded(Image.fromarray(pixels(60, 80)), kind, exif=exif_of(orientation), **options)
    upright = pixels_of(file)
    image = UprightImage(bytes_of(file))
    assert (3, image.height, image.width) == upright.shape
    box = Box(5, 12, 40, 30)
    np.testing.assert_array_equal(image.decode(box, (40, 30)), upright[:, 5:45, 12:42])
    half = image.decode(box, (20, 15)).transpose(1, 2, 0)
    assert half.flags.c_contiguous  # as it goes to a pool
    expected = Image.fromarray(upright[:, 5:45, 12:42].transpose(1, 2, 0)).resize((15, 20), Image.Resampling.BILINEAR)
    assert np.abs(half.astype(int) - expected).mean() < 3
    as_stored = EncodedImage(bytes_of(file))
    assert (as_stored.height, as_stored.width) == (60, 80)
    kept = EncodedImage(keep(image))
    found = kept.decode(Box(0, 0, kept.height, kept.width), upright.shape[1:]).astype(int)
    assert np.abs(found - upright).mean() < 6


def test_preprocessing_comes_back_from_json():
    for value in (Preprocessing(), Preprocessing((20, 30), "exact", 0.5)):
        assert read_preprocessing(value.to_json()) == value
    with pytest.raises(UserError, match="images that were prepared with .* need the version that prepared them"):
        read_preprocessing('{"size": [4, 5], "resize": "pad"}')


@pytest.mark.parametrize("n_zeros", [20, 300])
def test_png_ending_in_zeros_is_damaged(n_zeros, tmp_path):
    """Pillow alone decodes many of these, since zeros are pixels, too."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 99, (30, 40), np.uint8))
    data = encoded(image).getvalue()[:-n_zeros] + bytes(n_zeros)
    path = tmp_path / "x.png"
    path.write_bytes(data)
    readers = (
        lambda: EncodedImage(np.frombuffer(data, np.uint8)).decode(Box(0, 0, 30, 40), (30, 40)),
        lambda: pixels_of(io.BytesIO(data)),
        lambda: read_mask(path, is_binary=False),
    )
    for read in readers:
        with pytest.raises((SyntaxError, OSError, ValueError)):
            read()


@pytest.mark.parametrize("preprocessing", [Preprocessing(), Preprocessing((40, 10)), Preprocessing((15, 15), "exact")])
@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_mask_stays_on_its_image(tmp_path, preprocessing, mode):
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
    np.testing.assert_array_equal(found_CHW, decode(open_upright(tmp_path / "images/x.jpg"), preprocessing))
    assert mask_HW.dtype == np.uint8
    assert mask_HW.shape == found_CHW.shape[1:] == (preprocessing.size or (40, 30))
    assert set(np.unique(mask_HW).tolist()) == {0, 7}
    is_sure = (found_CHW[0] < 20) | (found_CHW[0] > 180)  # the border of the object is blurred
    np.testing.assert_array_equal(mask_HW[is_sure] == 7, found_CHW[0][is_sure] > 180)


@pytest.mark.parametrize("kind", KINDS)
def test_keep_makes_files_smaller_once(kind):
    image = UprightImage(bytes_of(file_of(kind)))
    kept = keep(image, 150)
    is_upright_rgb = KINDS[kind][0] in ("RGB", "L") and kind != "BMP"
    assert (kept is image.data) == is_upright_rgb
    assert is_upright_rgb or Image.open(io.BytesIO(kept)).mode == "RGB"
    smaller = keep(image, 60)
    assert Image.open(io.BytesIO(smaller)).format == "JPEG"
    for found, size in ((kept, (150, 200)), (smaller, (60, 80))):
        pixels_CHW = pixels_of(io.BytesIO(found)).astype(int)
        assert np.abs(pixels_CHW - pixels_of(file_of(kind), Preprocessing(size, "exact"))).mean() < 6
