import io

import h5py
import numpy as np
import pytest
from harness import ALONE, read_rows
from PIL import Image

from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.images.column import decoded
from fastgpu.images.decode import EncodedImage
from fastgpu.images.parts import centre_box
from fastgpu.process.config import Config, Data
from fastgpu.process.launch import RankError
from fastgpu.process.machine import available_cpus
from fastgpu.storage.store import open_store

N_ROWS = 90
SIZE = (16, 16)
FIELDS = {"images": "images", "labels": "labels"}


def photo(number: int) -> bytes:
    """A JPEG or PNG file of a size of its own. The first JPEG file has the size of the rows."""
    rng = np.random.default_rng(number)
    height, width = SIZE if number == 1 else rng.integers(8, 60, 2)
    corners = rng.integers(0, 256, (3, 3, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(corners).resize((width, height)).save(file, "PNG" if number % 5 == 0 else "JPEG")
    return file.getvalue()


FILES = [photo(number) for number in range(N_ROWS)]


@pytest.fixture
def path(tmp_path) -> str:
    """An HDF5 file of these files. See also `random parts` in test_sameness.py."""
    with h5py.File(tmp_path / "encoded.h5", "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, FILES)])
        file["images/values"] = np.frombuffer(b"".join(FILES), np.uint8)
        file["images"].attrs["codec"] = "jpeg+png"
        file["labels"] = np.arange(N_ROWS)
    return str(tmp_path / "encoded.h5")


@pytest.mark.parametrize(("min_scale", "share"), [(1.0, 1.0), (0.2, 224 / 256)])
@pytest.mark.parametrize("name", ["images", "pixels", "file"])  # as scratch memory is called elsewhere
def test_rows_that_are_not_shuffled_show_their_centres_whatever_the_field_is_called(path, min_scale, share, name):
    rows = read_rows(decoded(open_store("x", path, {name: "images"}), SIZE, min_scale=min_scale))[name]
    for data, pixels in zip(FILES, rows, strict=True):
        image = EncodedImage(np.frombuffer(data, np.uint8))
        box = centre_box(image.height, image.width, SIZE, share)
        np.testing.assert_array_equal(pixels, image.decode(box, SIZE))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("no memory"), "no memory; free some memory"),  # is no damage
        (RuntimeError("can't allocate memory: 9 bytes"), "9 bytes; free some memory"),
        (ValueError("two\n  lines"), "the image in row 0 cannot be decoded: two lines; restore the file"),
    ],
)
def test_what_the_decoder_raises_is_one_line(path, monkeypatch, error, message):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(EncodedImage, "decode", fail)
    with pytest.raises(RankError, match=message):
        read_rows(decoded(open_store("data.train", path, FIELDS), SIZE))


def test_a_damaged_image_is_named_by_its_row(path):
    with h5py.File(path, "a") as file:
        begin, end = file["images/indptr"][21:23]  # a JPEG file
        file["images/values"][(begin + end) // 2 : end] = 0
    source = decoded(open_store("data.train", path, FIELDS), SIZE, min_scale=0.5)
    with pytest.raises(RankError, match=r"encoded\.h5: the image in row 21 cannot be decoded: \w"):
        read_rows(source)


# ---------------------------------------------------------------------------------------------- settings


def sizes_of(path: str, fields: dict[str, str] = FIELDS, **values: object) -> Sizes:
    data = Data(train=path, val="20%", fields=fields, batch_size=8, **values)
    return choose_sizes(Config(workload="images", data=data), *open_splits(data, 0), ALONE)


def test_auto_keeps_centres_on_the_device_and_leaves_random_parts_on_the_disk(path):
    fixed = sizes_of(path, image_size=16)
    random = sizes_of(path, image_size=16, min_crop_scale=0.3)
    assert (fixed.tier, random.tier) == ("device", "disk")
    assert fixed.need == N_ROWS * (3 * 16 * 16 + 8)
    assert random.n_readers == available_cpus()


def test_the_size_of_images_has_no_effect_on_rows_that_are_no_files(write, capsys):
    sizes_of(write(90), min_crop_scale=0.5)
    assert "data.image_size and data.min_crop_scale have no effect: " in capsys.readouterr().out


def test_messages(compare_messages, path):
    with h5py.File(path, "a") as file:
        file["masks"] = np.zeros((N_ROWS, 16, 16), np.uint8)

    masks = {"images": "images", "masks": "masks"}
    sizes_of(path, masks, image_size=16)
    random = {"image_size": 16, "min_crop_scale": 0.5}
    compare_messages(
        {
            "device tier and random parts": lambda: sizes_of(path, tier="device", **random),
            "host tier and random parts": lambda: sizes_of(path, tier="host", **random),
            "no size": lambda: sizes_of(path),
            "random parts and whole masks": lambda: sizes_of(path, masks, **random),
        }
    )
