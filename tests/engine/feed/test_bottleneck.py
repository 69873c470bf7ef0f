"""The feed names the stage that its readers spend their time on. The stage is planted: it sleeps."""

import time
from contextlib import closing
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
from torch.utils.data import Dataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import bottleneck
from fastgpu.feed.sources import image_codecs
from fastgpu.images.column import ImageCodec
from fastgpu.rows.contract import Dataset as Source
from fastgpu.rows.order import BlockSampler
from fastgpu.storage import layout
from fastgpu.storage.file import OpenFile
from fastgpu.storage.store import HDF5Dataset, open_store
from support.images import write_photos
from support.ranks import CPU
from support.rows import DENSE_FIELDS, open_feed


class Slow(Dataset):
    """Items that take 10 ms."""

    def __len__(self):
        return 40

    def __getitem__(self, row):
        time.sleep(0.01)
        return np.full(4, row)


def slow(function):
    """The function, after 20 ms: on a busy machine, the loop takes some itself."""

    def call(*arguments):
        time.sleep(0.02)
        return function(*arguments)

    return call


def bottleneck_of(source: Source, n_readers: int = 2, step_s: float = 0.0) -> str:
    """Of one epoch of the feed, whose steps take some time."""
    sampler = BlockSampler(source.block_rows, 8, pool_batches=1)
    with closing(open_feed(source, sampler, n_readers=n_readers, device=CPU)) as feed:
        bottleneck(feed)
        for _ in feed.batches(0):
            time.sleep(step_s)
        return bottleneck(feed)


def test_bottleneck_slow_disk(dense_file, monkeypatch):
    source = open_store("data.train", dense_file(80, chunk=4), DENSE_FIELDS)
    monkeypatch.setattr(OpenFile, "check_unchanged", slow(OpenFile.check_unchanged))
    assert bottleneck_of(source).startswith("reading; try loader.num_readers=4")
    counts = count()
    monkeypatch.setattr(HDF5Dataset, "n_requests", property(lambda _: next(counts)))  # as if blocks came from a bucket
    assert bottleneck_of(source).startswith("the network; each block is fetched only once, to data.cache; try loader.")


def test_bottleneck_slow_images_and_compression(dense_file, tmp_path, monkeypatch):
    photos = write_photos(tmp_path / "photos.h5", 40)
    source = open_store("data.train", photos, {"images": "images"}, image_codecs({"images": (16, 16)}))
    monkeypatch.setattr(ImageCodec, "decode", slow(ImageCodec.decode))
    assert bottleneck_of(source).startswith("decoding; ")
    monkeypatch.setattr(layout, "decode", slow(layout.decode))
    source = open_store("data.train", dense_file(80, chunk=4, compression="gzip"), {"images": "images"})
    assert bottleneck_of(source).startswith("decoding; ")


@pytest.mark.parametrize(("n_workers", "cure"), [(0, "auto"), (1, "2")])
def test_bottleneck_slow_dataset(n_workers, cure):
    source = ItemDataset("Slow", Slow(), {"x": "x"})
    expected = f"the Dataset's items; try loader.num_workers={cure}, or write them to an HDF5 file once"
    assert bottleneck_of(source, n_workers) == expected


def test_bottleneck_none(dense_file):
    source = open_store("data.train", dense_file(80, chunk=4), {"images": "images"})
    assert bottleneck_of(source, step_s=0.02) == ""
    assert bottleneck(Mock()) == ""
