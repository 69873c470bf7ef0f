from contextlib import closing
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.images.column import ImageCodec
from fastgpu.images.decode import EncodedImage
from fastgpu.images.parts import centre_box
from fastgpu.process.config import Config, Data, Loader
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus, format_bytes
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import open_store
from support.images import photo, write_photos
from support.ranks import ALONE
from support.rows import DENSE_FIELDS, open_feed, read_rows

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


def test_encoded_rows_repeated_show_other_crops(path):
    with h5py.File(path, "a") as file:
        file["labels"][:] = np.arange(N_ROWS) < 9  # a class of 9 rows, and one of the others

    def parts_of(**settings: object) -> dict[int, list[bytes]]:
        """{row: its pixels, each time that it comes in epoch 1}"""
        sizes = {"image_size": 16, "min_crop_scale": 0.2, "batch_size": 8}
        rows, _ = open_splits(Data(train=path, val=path, fields=DENSE_FIELDS, **sizes, **settings), Loader(), 3)
        parts: dict[int, list[bytes]] = {}
        with closing(open_feed(rows, BlockSampler(rows, 8, pool_batches=4, seed=3))) as feed:
            for pool in feed.pools(1):
                for row, pixels in zip(pool.plan.row_ids.tolist(), pool.rows["images"].numpy(), strict=True):
                    parts.setdefault(row, []).append(pixels.tobytes())
        return parts

    plain, balanced = parts_of(), parts_of(balance="classes")
    assert [len(balanced[row]) for row in range(9)] == pytest.approx([44 / 9] * 9, abs=1)
    for row, parts in balanced.items():
        assert len({*parts}) == len(parts)
        assert row not in plain or plain[row][0] in parts  # the first time, as without a mixture


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


def choose(path: str, fields: dict[str, str] = DENSE_FIELDS, **values: object) -> Sizes:
    data = Data(train=path, val="20%", fields=fields, batch_size=8, **values)
    return choose_sizes(Config(workload="images", data=data), *open_splits(data, Loader(), 0), ALONE)


def test_encoded_rows_choose_their_tier(path):
    fixed = choose(path, image_size=16)
    random = choose(path, image_size=16, min_crop_scale=0.3)
    assert (fixed.tier, random.tier) == ("device", "disk")
    assert fixed.memory.startswith(f"{format_bytes(N_ROWS * (3 * 16 * 16 + 8))} for all rows, kept on the device")
    assert random.n_readers == available_cpus()


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
