from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.convert.images import array_images
from fastgpu.process.launch import UserError
from fastgpu.storage.store import open_store

RNG = np.random.default_rng(0)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(path) as file:
        order = np.argsort(file["number"][:])
        return file["images"][:][order], file["labels"][:][order]


def save(**arrays: np.ndarray) -> list[str]:
    n_rows = len(next(iter(arrays.values())))
    arrays["number"] = np.arange(n_rows)
    arrays.setdefault("labels", np.arange(n_rows) % 5)
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    return [f"{name}={name}.npy" for name in arrays]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_channels_last_are_refused_or_put_first(tmp_path, convert, channels, dtype):
    images = RNG.integers(0, 256, (60, 8, 6, channels)).astype(dtype)
    sources = save(images=images)
    result = convert("arrays", *sources, "x.h5")
    assert result.returncode == 2
    assert (
        "looks like (N, H, W, C); --layout nhwc writes it as (N, C, H, W), and --layout nchw as it is" in result.stderr
    )
    assert convert("arrays", *sources, "x.h5", "--layout", "nhwc").returncode == 0
    assert convert("arrays", *sources, "y.h5", "--layout", "nchw").returncode == 0
    np.testing.assert_array_equal(read(tmp_path / "x.h5")[0], images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(read(tmp_path / "y.h5")[0], images)


def test_images_without_channels_and_labels_in_a_column(tmp_path, convert):
    images = RNG.integers(0, 256, (60, 8, 6), np.uint8)
    result = convert("arrays", *save(images=images, labels=np.arange(60)[:, None] % 3, masks=images), "x.h5")
    assert "images (60, 8, 6) are written as (60, 1, 8, 6)" in result.stdout
    assert "labels (60, 1) are written as (60,)" in result.stdout
    found, labels = read(tmp_path / "x.h5")
    np.testing.assert_array_equal(found, images[:, None])
    np.testing.assert_array_equal(labels, np.arange(60) % 3)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["masks"].shape == (60, 8, 6)


def test_a_range_becomes_bytes_from_hdf5_too(tmp_path, convert):
    images = RNG.integers(0, 4096, (60, 3, 8, 6), np.uint16)
    sources = save(images=images)
    with h5py.File("x.h5", "w") as file:
        file["raw/x"] = images
    flags = ("--to", "uint8", "--range")
    assert convert("arrays", *sources, "a.h5", *flags, "0:4095").returncode == 0
    assert convert("arrays", "images=x.h5::/raw/x", *sources[1:], "b.h5", *flags, "0:4095").returncode == 0
    expected = np.rint(images.astype(float) * 255 / 4095)
    for name in ("a.h5", "b.h5"):
        found = read(tmp_path / name)[0]
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
    result = convert("arrays", *sources, "c.h5", *flags, "100:4000")
    assert result.returncode == 2
    assert "outside of 100 to 4000; give another --range, or --clip" in result.stderr
    assert convert("arrays", *sources, "c.h5", *flags, "100:4000", "--clip").returncode == 0
    expected = np.rint((np.clip(images.astype(float), 100, 4000) - 100) * 255 / 3900)
    np.testing.assert_array_equal(read(tmp_path / "c.h5")[0], expected)
    with pytest.raises(UserError, match=r"values from \[100.0, 4000.0\] in c.h5 and from \[0.0, 4095.0\] in a.h5"):
        open_store("data.train", ["a.h5", "c.h5"], {"images": "images"})


@pytest.mark.parametrize(
    ("dtype", "written"),
    [(bool, np.uint8), (np.float64, np.float32), (np.float32, np.float32)],
)
def test_images_and_labels_get_a_type_that_can_be_trained_on(capsys, dtype, written):
    images = np.zeros((20, 1, 4, 4), dtype)
    images[15] = 1
    labels = np.arange(20) % 2 == 0
    prepared = array_images.prepare_images({"images": images, "labels": labels, "x": images}, None, None, clip=False)
    assert prepared["images"].dtype == prepared["images"][3:9].dtype == written
    np.testing.assert_array_equal(prepared["images"][:20], images)
    assert prepared["labels"][:20].dtype == np.uint8
    assert prepared["labels"][:20].tolist() == labels.tolist()
    assert prepared["x"] is images
    shown = capsys.readouterr().out
    assert "labels, bool, are written as uint8\n" in shown
    assert (f"images, {images.dtype}, are written as {np.dtype(written)}\n" in shown) == (dtype != written)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint16])
def test_images_of_other_integers_become_bytes_by_range_only(dtype):
    images = np.arange(256, dtype=dtype).reshape(4, 1, 8, 8)
    with pytest.raises(UserError, match=rf"images are {images.dtype}; .* --to uint8 --range 0:255 writes"):
        array_images.prepare_images({"images": images}, None, None, clip=False)
    prepared = array_images.prepare_images({"images": images}, None, (0, 255), clip=False)
    assert prepared["images"].dtype == np.uint8
    np.testing.assert_array_equal(prepared["images"][:4], images)


def test_one_hot_floats_become_the_numbers_of_classes(capsys):
    numbers = np.array([2, 0, 1, 1])
    columns = {"labels": np.eye(3)[numbers]}
    prepared = array_images.prepare_images(columns, None, None, clip=False)
    assert prepared["labels"][:4].tolist() == numbers.tolist()
    assert capsys.readouterr().out == "labels (4, 3) with a single 1 in each row are written as classes (4,)\n"
    for others in (columns["labels"] * 0.9, columns["labels"].astype(np.uint8), np.ones((4, 3)), np.ones((4, 1), int)):
        kept = array_images.prepare_images({"labels": others}, None, None, clip=False)["labels"]
        assert kept[:4].tolist() == others.reshape(4, *kept.shape[1:]).tolist()


@pytest.mark.parametrize(
    ("images", "flags", "message"),
    [
        (np.full((9, 1, 2, 2), np.nan), ("--to", "uint8", "--range", "0:1", "--clip"), "has the value nan"),
        (np.zeros((9, 1, 2, 2)), ("--to", "uint8"), "--to uint8 and --range LOW:HIGH belong together"),
        (np.zeros((9, 2)), ("--layout", "nhwc"), "are for images (N, C, H, W), but the fields are images"),
        (np.zeros((9, 1, 2, 2)), ("--to", "uint8", "--range", "1:0"), "1:0 is not the lowest and the highest value"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, convert, images, flags, message):
    result = convert("arrays", *save(images=images), "x.h5", *flags)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("*.h5"))
