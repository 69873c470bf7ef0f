from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from fastgpu.feed import describe, open_rows, resolve_auto
from fastgpu.images.column import ImageCodec
from fastgpu.images.crops import centre_box, draw
from fastgpu.images.decode import EncodedImage
from fastgpu.process.config import Config, Data
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus, format_bytes
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture
from fastgpu.storage.store import open_store
from support.images import photo, write_photos
from support.ranks import ALONE
from support.rows import DENSE_FIELDS, read_rows

N_ROWS = 90
SIZE = (16, 16)


@pytest.fixture
def path(tmp_path) -> str:
    """A file of photos. See also `random parts` in test_sameness.py."""
    return write_photos(tmp_path / "encoded.h5", N_ROWS)


@pytest.mark.parametrize(("min_scale", "share"), [(1.0, 1.0), (0.2, 224 / 256)])
def test_encoded_rows_unshuffled_show_their_centres(path, min_scale, share):
    rows = read_rows(open_store("x", path, DENSE_FIELDS, {"images": ImageCodec(SIZE, min_scale)}))["images"]
    for number, pixels in enumerate(rows):
        image = EncodedImage(np.frombuffer(photo(number), np.uint8))
        box = centre_box(image.height, image.width, SIZE, share)
        np.testing.assert_array_equal(pixels, image.decode(box, SIZE))


def test_encoded_rows_repeated_show_other_crops():
    groups = Groups(("rare", "frequent"), (1, 1), np.minimum(np.arange(N_ROWS), 9) // 9)
    plan = next(BlockSampler(Mixture(groups, np.full(18, 5), 8, seed=3), 8, pool_batches=4, seed=3).pools(1))
    assert plan.repeats.any()
    draws = ImageCodec(SIZE, 0.2).draw(plan, plan.row_ids, np.arange(plan.n_rows))
    assert draws == draw((3, 1), plan.row_ids, plan.repeats).tolist()


def test_encoded_rows_damaged_are_named(path, monkeypatch):
    with h5py.File(path, "a") as file:
        begin, end = file["images/indptr"][21:23]  # a JPEG file
        file["images/values"][(begin + end) // 2 : end] = 0
    source = open_store("data.train", path, DENSE_FIELDS, {"images": ImageCodec(SIZE, 0.5)})
    with pytest.raises(UserError, match=r"encoded\.h5: the image in row 21 cannot be decoded: .*; restore the file"):
        read_rows(source)
    for error in (MemoryError("no memory\n  left"), RuntimeError("can't allocate memory: no memory left")):
        monkeypatch.setattr(EncodedImage, "decode", Mock(side_effect=error))
        with pytest.raises(UserError, match="no memory left; free some memory"):
            read_rows(source)


def choose(path: str, fields: dict[str, str] = DENSE_FIELDS, **values: object) -> tuple[Config, str]:
    """The config without `auto`, and what is printed of it."""
    data = Data(train=path, val="20%", fields=fields, batch_size=8, **values)
    splits = open_rows(Config(workload="images", data=data))
    if splits.error:
        raise splits.error
    config = resolve_auto(Config(workload="images", data=data), splits, ALONE)
    return config, describe(config, splits, BlockSampler(splits.train, 8), ALONE)


def test_encoded_rows_choose_their_tier(path):
    fixed, text = choose(path, image_size=16)
    random, _ = choose(path, image_size=16, min_crop_scale=0.3)
    assert (fixed.data.tier, random.data.tier) == ("device", "disk")
    assert f"memory: {format_bytes(N_ROWS * (3 * 16 * 16 + 8))} for all rows, kept on the device" in text
    assert random.loader.num_readers == available_cpus()


def test_encoded_settings_without_effect_are_reported(dense_file, capsys):
    choose(dense_file(90), min_crop_scale=0.5)
    assert "data.image_size and data.min_crop_scale have no effect: " in capsys.readouterr().out


def test_messages_of_encoded_rows(compare_messages, path):
    with h5py.File(path, "a") as file:
        file["masks"] = np.zeros((N_ROWS, 16, 16), np.uint8)

    masks = {"images": "images", "masks": "masks"}
    choose(path, masks, image_size=16)
    random = {"image_size": 16, "min_crop_scale": 0.5}
    compare_messages(
        {
            "device tier and random parts": lambda: choose(path, tier="device", **random),
            "host tier and random parts": lambda: choose(path, tier="host", **random),
            "no size": lambda: choose(path),
            "random parts and whole masks": lambda: choose(path, masks, **random),
        }
    )
