import io
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import ALONE, open_feed, read_rows
from PIL import Image

from fastgpu.feed import Feed
from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.images.column import CENTRE_SHARE, decoded
from fastgpu.images.decode import EncodedImage
from fastgpu.images.files import decode_centre
from fastgpu.images.parts import Box, draw, random_box
from fastgpu.process.config import Config, Data
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.storage.store import open_store

N_ROWS = 90
SIZE = (16, 16)
FIELDS = {"images": "images", "labels": "labels"}


def photos(n_rows: int = N_ROWS) -> list[bytes]:
    """JPEG and PNG files of different sizes."""
    rng = np.random.default_rng(0)
    files = []
    for number in range(n_rows):
        height, width = rng.integers(20, 60, 2)
        corners = rng.integers(0, 256, (3, 3, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(corners).resize((width, height)).save(file, "PNG" if number % 5 == 0 else "JPEG")
        files.append(file.getvalue())
    return files


FILES = photos()
ONE_RANK = Shard(0, 1, 4)


def write_encoded(path: Path, start: int = 0, stop: int = N_ROWS) -> Path:
    """Write some of the files, with their numbers as labels."""
    files = FILES[start:stop]
    with h5py.File(path, "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "jpeg+png"
        group["indptr"] = np.cumsum([0, *map(len, files)])
        group["values"] = np.frombuffer(b"".join(files), np.uint8)
        file["labels"] = np.arange(start, stop)
    return path


@pytest.fixture
def store(tmp_path) -> Dataset:
    return open_store("data.train", str(write_encoded(tmp_path / "encoded.h5")), FIELDS)


def feed_of(source: Dataset, tier: str = "disk", n_readers: int = 2, shard: Shard = ONE_RANK) -> Feed:
    batch_size = 8 // shard.world_size
    order = BlockSampler(source.block_rows, batch_size, shard=shard, pool_batches=3, seed=5)
    return open_feed(source, order, tier, n_readers)


def rows_of(feed: Feed, epoch: int, first_pool: int = 0) -> list[tuple[int, bytes]]:
    """(label, pixels) of the rows of an epoch in order."""
    rows = []
    for pool in feed.pools(epoch, first_pool):
        images = pool.rows["images"].numpy()
        rows += [(label, image.tobytes()) for label, image in zip(pool.rows["labels"].tolist(), images, strict=True)]
    feed.close()
    return rows


def expected_pixels(row: int, epoch: int, min_scale: float) -> bytes:
    (draws,) = draw((5, epoch), np.array([row])).tolist()
    image = EncodedImage(np.frombuffer(FILES[row], np.uint8))
    return image.decode(random_box(draws, image.height, image.width, min_scale), SIZE).tobytes()


@pytest.mark.parametrize("cuts", [[N_ROWS], [40, N_ROWS]], ids=["one file", "two files"])
@pytest.mark.parametrize("n_readers", [1, 4])
def test_seed_epoch_and_row_decide_the_random_part_for_any_readers_world_and_start(tmp_path, cuts, n_readers):
    paths = [str(write_encoded(tmp_path / f"{start}.h5", start, stop)) for start, stop in pairwise([0, *cuts])]
    source = decoded(open_store("data.train", paths, FIELDS), SIZE, min_scale=0.2)
    for shard, epoch, first_pool in (
        (ONE_RANK, 0, 0),
        (ONE_RANK, 7, 2),
        (Shard(1, 2, 4), 7, 0),
        (Shard(3, 4, 4), 7, 0),
    ):
        rows = rows_of(feed_of(source, n_readers=n_readers, shard=shard), epoch, first_pool)
        assert len(rows) == (88 - 24 * first_pool) // shard.world_size
        assert rows == [(row, expected_pixels(row, epoch, 0.2)) for row, _ in rows]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_without_random_parts_every_tier_gives_the_centres(store, tier):
    rows = rows_of(feed_of(decoded(store, SIZE), tier), 1)
    assert rows == [(row, decode_centre(np.frombuffer(FILES[row], np.uint8), SIZE, 1.0).tobytes()) for row, _ in rows]


def test_validation_takes_the_central_share_of_the_sides(store):
    rows = read_rows(decoded(store, SIZE, min_scale=0.2))
    for row in (0, 1, 89):
        image = EncodedImage(np.frombuffer(FILES[row], np.uint8))
        side = round(CENTRE_SHARE * min(image.height, image.width))
        box = Box((image.height - side) // 2, (image.width - side) // 2, side, side)
        np.testing.assert_array_equal(rows["images"][row], image.decode(box, SIZE))


def test_a_field_may_have_any_name(store, tmp_path):
    for name in ("pixels", "file"):  # as scratch memory is called elsewhere
        renamed = open_store("x", str(tmp_path / "encoded.h5"), {name: "images"})
        expected = read_rows(decoded(store, SIZE))["images"]
        np.testing.assert_array_equal(read_rows(decoded(renamed, SIZE))[name], expected)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("no memory"), "no memory; free some memory"),  # is no damage
        (RuntimeError("can't allocate memory: 9 bytes"), "9 bytes; free some memory"),
        (ValueError("two\n  lines"), "the image in row 0 cannot be decoded: two lines; restore the file"),
    ],
)
def test_what_the_decoder_raises_is_one_line(store, monkeypatch, error, message):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("fastgpu.images.column.ImageColumn._decode", fail)
    with pytest.raises(RankError, match=message):
        read_rows(decoded(store, SIZE))


def test_a_damaged_image_is_named_by_its_row(tmp_path):
    path = write_encoded(tmp_path / "damaged.h5")
    with h5py.File(path, "a") as file:
        begin, end = file["images/indptr"][20:22]
        file["images/values"][(begin + end) // 2 : end] = 0
    source = decoded(open_store("data.train", str(path), FIELDS), SIZE, min_scale=0.5)
    with pytest.raises(RankError, match=r"damaged\.h5: the image in row 20 cannot be decoded: \w"):
        rows_of(feed_of(source), 0)


# ---------------------------------------------------------------------------------------------- settings


def sizes_of(path: Path, **values: object) -> Sizes:
    data = Data(train=str(path), val="20%", fields=FIELDS, batch_size=8, **values)
    return choose_sizes(Config(workload="images", data=data), *open_splits(data, 0), ALONE)


def test_auto_keeps_centres_on_the_device_and_leaves_random_parts_on_the_disk(tmp_path):
    path = write_encoded(tmp_path / "x.h5")
    fixed = sizes_of(path, image_size=16)
    random = sizes_of(path, image_size=16, min_crop_scale=0.3)
    assert (fixed.tier, random.tier) == ("device", "disk")
    assert fixed.need == N_ROWS * (3 * 16 * 16 + 8)
    assert random.n_readers == available_cpus()
    for tier in ("device", "host"):
        with pytest.raises(UserError, match=rf"data\.tier is {tier}, but each epoch decodes other parts .*tier=disk"):
            sizes_of(path, image_size=16, min_crop_scale=0.3, tier=tier)


def test_encoded_images_need_a_size_and_only_they(tmp_path, write, capsys):
    with pytest.raises(UserError, match=r"has encoded images; set data\.image_size"):
        sizes_of(write_encoded(tmp_path / "x.h5"))
    sizes_of(write(90), min_crop_scale=0.5)
    assert "data.image_size and data.min_crop_scale have no effect: " in capsys.readouterr().out


def test_parts_of_images_are_not_trained_on_with_whole_masks(tmp_path):
    path = write_encoded(tmp_path / "x.h5")
    with h5py.File(path, "a") as file:
        file["masks"] = np.zeros((N_ROWS, 16, 16), np.uint8)
    fields = {"images": "images", "masks": "masks"}
    data = Data(train=str(path), val="20%", fields=fields, batch_size=8, image_size=16, min_crop_scale=0.5)
    with pytest.raises(UserError, match=r"but masks, uint8 \(N, 16, 16\) of .* would not be cut and resized like"):
        open_splits(data, 0)
    open_splits(Data(train=str(path), val="20%", fields=fields, image_size=16), 0)
