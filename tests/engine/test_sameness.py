"""A seed gives the same rows in the same order, bit for bit: one matrix over all kinds of rows, and whole runs."""

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
from harness import needs_gpu, numbered, open_feed, ragged, write_ragged, write_rows
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from fastgpu.feed import Feed
from fastgpu.feed.sources import open_splits
from fastgpu.images.decode import EncodedImage
from fastgpu.images.parts import centre_box, draw, random_box
from fastgpu.process.config import Data, Tier
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Ragged, Rows

N_ROWS = 150
N_FIRST = 70
"""Rows of the first of two files."""
LARGE = (1, 96, 96)
PIXELS = (16, 16)
BATCH_SIZE = 8
CANONICAL_RANKS = 4
SEED = 5
TIERS = ("device", "host", "disk")

Row = dict[str, np.ndarray | np.generic]


@cache
def photo(number: int) -> bytes:
    """A small image file of a size of its own: PNG, or JPEG."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(20, 60, 2)
    file = io.BytesIO()
    corners = Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8))
    corners.resize((width, height)).save(file, "PNG" if number % 5 == 0 else "JPEG")
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- rows, read plainly


def dense_row(number: int, epoch: int, shape: tuple[int, ...] = (1, 4, 2)) -> Row:
    return {"images": numbered(1, shape, number)[0], "labels": np.int64(number % 4)}


def ragged_row(number: int, epoch: int) -> Row:
    return {"items": ragged([number]).values, "number": np.int64(number)}


def decoded_row(number: int, epoch: int, min_scale: float = 1.0) -> Row:
    """The centre of an image, or the part that seed, epoch and number decide."""
    image = EncodedImage(np.frombuffer(photo(number), np.uint8))
    box = centre_box(image.height, image.width, PIXELS)
    if min_scale < 1:
        (draws,) = draw((SEED, epoch), np.array([number])).tolist()
        box = random_box(draws, image.height, image.width, min_scale)
    return {"images": image.decode(box, PIXELS), "labels": np.int64(number)}


def own_row(number: int, epoch: int, *, with_boxes: bool = False) -> Row:
    row = dense_row(number, epoch)
    if with_boxes:
        row["boxes"] = np.arange(number % 5 * 4, dtype=np.float32).reshape(-1, 4) + number
    return row


class Own(TorchDataset):
    """`own_row` as a Dataset."""

    def __init__(self, path: str):
        self.with_boxes = "boxes" in path

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, number: int) -> Row:
        return own_row(number, 0, with_boxes=self.with_boxes)


# ---------------------------------------------------------------------------------------------- kinds of rows


class Kind(NamedTuple):
    """Rows of one kind: settings of section `data`, what a row holds in an epoch, and where the rows may stay."""

    data: dict[str, Any]
    row: Callable[[int, int], Row]
    tiers: tuple[Tier, ...] = TIERS


def fields(*names: str) -> dict[str, str]:
    return {name: name for name in names}


DENSE = {"train": ["dense-0.h5", "dense-1.h5"], "val": "dense-0.h5", "fields": fields("images", "labels")}
LARGE_ROWS = DENSE | {"train": ["large-0.h5", "large-1.h5"], "val": "large-0.h5"}
RAGGED = {"train": ["ragged-0.h5", "ragged-1.h5"], "val": "ragged-0.h5", "fields": fields("items", "number")}
PHOTOS = DENSE | {"train": ["photos-0.h5", "photos-1.h5"], "val": "photos-0.h5", "image_size": 16}
OWN = DENSE | {"train": "own", "val": "other", "dataset": "test_sameness:Own"}
BOXES = OWN | {"train": "with boxes", "val": "other boxes", "fields": fields("images", "labels", "boxes")}
WEIGHTS = RAGGED | {"train": {"ragged-0.h5": 1, "ragged-1.h5": 2.5}}
KINDS = {
    "dense": Kind(DENSE, dense_row),
    "large": Kind(LARGE_ROWS, partial(dense_row, shape=LARGE)),
    "ragged": Kind(RAGGED, ragged_row),
    "encoded": Kind(PHOTOS, decoded_row),
    "random parts": Kind(PHOTOS | {"min_crop_scale": 0.2}, partial(decoded_row, min_scale=0.2), ("disk",)),
    "own Dataset": Kind(OWN, own_row),
    "own Dataset of any length": Kind(BOXES, partial(own_row, with_boxes=True), ("disk",)),
    "weights": Kind(WEIGHTS, ragged_row),
    "weights without a share": Kind(WEIGHTS | {"val": "10%"}, ragged_row),
    "classes without a share": Kind(DENSE | {"balance": "classes", "val": "10%"}, dense_row),
    "encoded without a share": Kind(PHOTOS | {"val": "20%"}, decoded_row),
}


def write_photos(path: Path, start: int, stop: int) -> None:
    files = [photo(number) for number in range(start, stop)]
    with h5py.File(path, "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "jpeg+png"
        file["labels"] = np.arange(start, stop)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with two files of each kind, which lie in other pieces."""
    folder = tmp_path_factory.mktemp("files")
    pieces = ((0, N_FIRST, 7, {}), (N_FIRST, N_ROWS - N_FIRST, 5, {"chunks": (16,), "compression": "gzip"}))
    for number, (start, n_rows, chunk, options) in enumerate(pieces):
        write_rows(folder / f"dense-{number}.h5", n_rows, chunk=chunk, start=start)
        write_rows(folder / f"large-{number}.h5", n_rows, LARGE, chunk, start=start)
        write_ragged(folder / f"ragged-{number}.h5", n_rows, start, **options)
        write_photos(folder / f"photos-{number}.h5", start, start + n_rows)
    return folder


# ---------------------------------------------------------------------------------------------- the matrix


def order_of(source: Dataset, pool_batches: int, world_size: int = 1, rank: int = 0, **options: Any) -> BlockSampler:
    shard = Shard(rank, world_size, CANONICAL_RANKS)
    return BlockSampler(source, BATCH_SIZE // world_size, shard, pool_batches, **{"seed": SEED, **options})


def rows_of(batch: Rows) -> list[dict[str, bytes]]:
    """The bytes of each field of each row."""
    columns: dict[str, Sequence[np.ndarray]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            assert column.offsets.tolist() == column.host_offsets.tolist()
            values = column.values[: column.host_offsets[-1]].cpu().numpy()
            columns[name] = np.split(values, column.host_offsets[1:-1])
        else:
            columns[name] = column.cpu().numpy()
    return [{name: column[place].tobytes() for name, column in columns.items()} for place in range(len(batch))]


def global_rows(feeds: list[Feed], epoch: int, first_pool: int) -> list[dict[str, bytes]]:
    """The rows of an epoch, global batch after global batch, from the feeds of all ranks."""
    batches_of_ranks = []
    for feed in feeds:
        batches: list[list[dict[str, bytes]]] = []
        for pool in feed.pools(epoch, first_pool):
            batches += map(rows_of, pool.rows.batches(feed.order.batch_size))
        batches_of_ranks.append(batches)
    return [row for batches in zip(*batches_of_ranks, strict=True) for batch in batches for row in batch]


CASES = [(kind, tier) for kind in KINDS for tier in KINDS[kind].tiers]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize(("kind", "tier"), CASES)
def test_rows_and_their_order_depend_on_the_seed_alone(files, monkeypatch, kind, tier, device):
    """Whatever the tier, the readers, the ranks, the epoch that was read before, and the pool that a run resumes at."""
    monkeypatch.chdir(files)
    data, row, _ = KINDS[kind]

    @cache
    def bytes_of(number: int, epoch: int) -> dict[str, bytes]:
        return {name: value.tobytes() for name, value in row(number, epoch).items()}

    source, _ = open_splits(Data(batch_size=BATCH_SIZE, **data), SEED)
    for world_size, n_readers, pool_batches in ((1, 1, 3), (1, 4, 1000), (2, 2, 2), (4, 1, 3)):
        alone = order_of(source, pool_batches)
        with ExitStack() as stack:
            feeds = []
            for rank in range(world_size):
                order = order_of(source, pool_batches, world_size, rank)
                feed = open_feed(source, order, tier, n_readers, device=torch.device(device), prefetch_pools=1)
                feeds.append(stack.enter_context(closing(feed)))
            for epoch, first_pool in ((0, 0), (1, 0), (1, 1), (0, 0)):
                alone.set_epoch(epoch)
                numbers = list(alone)[alone.rows_before(0, first_pool) :]
                assert global_rows(feeds, epoch, first_pool) == [bytes_of(number, epoch) for number in numbers]
                if first_pool:
                    for feed in feeds:
                        next(feed.pools(2), None)  # the loop leaves an epoch early


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("data", [RAGGED, WEIGHTS], ids=["rows", "weights"])
def test_rows_that_are_held_out_come_once_in_the_order_of_the_files(files, monkeypatch, data, tier):
    monkeypatch.chdir(files)
    train, val = open_splits(Data(batch_size=BATCH_SIZE, **data | {"val": "20%"}), SEED)
    for world_size in (1, 2, 4):
        numbers: list[int] = []
        for rank in range(world_size):
            order = BlockSampler(val, BATCH_SIZE, Shard(rank, world_size), 2, seed=None)
            with closing(open_feed(val, order, tier)) as feed:
                for plan, rows in feed.pools(0):
                    numbers += rows["number"][: plan.n_real_rows].tolist()
        assert numbers == val.selection.rows().tolist()
        assert not {*numbers} & {*order_of(train, 1)}
