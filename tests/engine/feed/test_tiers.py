import threading
from contextlib import closing
from copy import copy

import numpy as np
import pytest
import torch
from harness import TIMEOUT_S, is_ragged, needs_gpu, no_host_sync, numbers_of, open_feed

from fastgpu.feed import Feed
from fastgpu.process.config import Tier
from fastgpu.process.launch import RankError
from fastgpu.rows import rows as rows_module
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import RaggedArray, Rows
from fastgpu.rows.selection import Groups, Mixture, hold_out
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import HDF5Dataset, open_store

TIERS = ("device", "host", "disk")
RAGGED_LAYOUTS = {"whole": {}, "chunks": {"chunks": (16,)}, "gzip": {"chunks": (16,), "compression": "gzip"}}


def open_rows(write, shape: tuple[int, ...]) -> HDF5Dataset:
    return open_store("data.train", write(150, shape, chunk=7), {"images": "images", "labels": "labels"})


def open_ragged(write_ragged, layout: str) -> HDF5Dataset:
    source = open_store(
        "data.train", write_ragged(700, **RAGGED_LAYOUTS[layout]), {"items": "items", "number": "number"}
    )
    assert 1 < source.block_rows.max() < 24  # so that pools cut blocks and join them
    return source


def mixed(source: Dataset, kind: str) -> Dataset:
    """Nine tenths of some rows, in two groups; an epoch has three rows of the one for one of the other."""
    groups = np.arange(len(source)) % 5 // 4
    if kind == "sources":
        groups = np.repeat(np.arange(len(source.block_rows)) % 5 // 4, source.block_rows)
    groups[hold_out(source.block_rows, len(source) // 10)[1].rows()] = -1
    rows = copy(source)
    rows.selection = Mixture(Groups(("a", "b"), (1, 3), groups, kind == "sources"), source.block_rows, 8, seed=1)
    return rows


@pytest.fixture(params=["small rows", "large rows", "whole", "chunks", "gzip", "sources", "classes"])
def source(write, write_ragged, request) -> Dataset:
    """Rows of one shape, ragged rows, and mixtures of ragged rows."""
    match request.param:
        case "small rows":
            return open_rows(write, (1, 4, 2))
        case "large rows":
            return open_rows(write, (1, 96, 96))
        case "sources" | "classes":
            return mixed(open_ragged(write_ragged, "chunks"), request.param)
    return open_ragged(write_ragged, request.param)


@pytest.fixture
def store(write) -> HDF5Dataset:
    return open_rows(write, (1, 4, 2))


@pytest.fixture
def sparse(write_ragged) -> HDF5Dataset:
    return open_ragged(write_ragged, "chunks")


def order_of(source: Dataset, pool_batches: int = 3) -> BlockSampler:
    rows = source if source.selection else source.block_rows
    return BlockSampler(rows, 8, shard=Shard(canonical_ranks=2), pool_batches=pool_batches, seed=1)


def feed_of(source: Dataset, tier: Tier = "disk", n_readers: int = 2, **sizes: int) -> Feed:
    """Feeds have pools of 24 rows, unless the sizes say otherwise."""
    return open_feed(source, order_of(source, **sizes), tier, n_readers, prefetch_pools=1)


def numbers_in(rows: Rows) -> list[int]:
    """The numbers of rows, all fields of which must be those of these rows."""
    if "items" not in rows.columns:
        numbers = numbers_of(rows["images"])
        assert rows["labels"].tolist() == [number % 4 for number in numbers]
        return numbers
    numbers = rows["number"].tolist()
    assert is_ragged(rows["items"], numbers)
    return numbers


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("n_readers", "pool_batches"), [(1, 3), (4, 2), (2, 1000)])
def test_every_tier_gives_the_rows_in_order_also_resumed_and_left_early(source, tier, n_readers, pool_batches):
    order = order_of(source, pool_batches)
    with closing(feed_of(source, tier, n_readers, pool_batches=pool_batches)) as feed:
        for epoch, first_pool in ((0, 0), (1, 0), (1, 1), (0, 0)):  # in any order of epochs
            numbers = []
            for pool in feed.pools(epoch, first_pool):
                for batch in pool.rows.batches(8):
                    numbers += numbers_in(batch)
            order.set_epoch(epoch)
            assert numbers == list(order)[order.rows_before(0, first_pool) :]
            if first_pool:
                next(feed.pools(2), None)  # the loop leaves an epoch early


def test_an_epoch_of_a_mixture_has_the_turns_of_its_groups(sparse):
    for kind in ("sources", "classes"):
        source = mixed(sparse, kind)
        counts = np.bincount(source.selection.groups.groups[list(order_of(source))])
        assert counts.tolist() == source.selection.turns.tolist() == [156, 468]


def test_the_next_epoch_is_read_while_this_one_ends(store, monkeypatch):
    is_planned = threading.Event()
    plan = BlockSampler.pools

    def pools(self, epoch, first_pool=0):
        if epoch == 1:
            is_planned.set()
        return plan(self, epoch, first_pool)

    monkeypatch.setattr(BlockSampler, "pools", pools)
    with closing(feed_of(store)) as feed:
        assert len(list(feed.pools(0))) == 6
        assert is_planned.wait(TIMEOUT_S)


def test_an_epoch_of_the_device_tier_touches_no_file(store, monkeypatch):
    feed = feed_of(store, "device")
    monkeypatch.setattr(HDF5Dataset, "read", lambda *_: pytest.fail("read"))
    assert sum(len(pool.rows) for pool in feed.pools(0)) == 144


def test_batches_are_views_of_a_pool_on_a_cpu(store):
    with closing(feed_of(store)) as feed:
        pool = next(feed.pools(0))
        assert next(pool.rows.batches(8))["images"].data_ptr() == pool.rows["images"].data_ptr()


@pytest.mark.parametrize("tier", TIERS)
def test_the_memory_for_values_grows_with_the_pools(tier):
    offsets = np.cumsum(np.arange(101))  # row n has n values
    values = np.arange(offsets[-1], dtype=np.int32)
    source = ArrayDataset("x.npy", {"items": RaggedArray(values, offsets), "number": np.arange(100)})
    order = BlockSampler(source.block_rows, 10, seed=None)
    with closing(open_feed(source, order, tier)) as feed:
        for epoch in range(2):
            for pool in feed.pools(epoch):
                start, stop = offsets[pool.rows["number"][0]], offsets[pool.rows["number"][-1] + 1]
                items = pool.rows["items"]
                assert items.values[: items.host_offsets[-1]].tolist() == values[start:stop].tolist()


def test_a_pool_with_more_values_than_32_bit_offsets_can_count_is_refused(sparse, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_VALUES", 100)
    message = r"a pool has 1,\d+ values of items, too many to count; use fewer data.pool_batches"
    with closing(feed_of(sparse, pool_batches=500)) as feed, pytest.raises(RankError, match=message):
        list(feed.pools(0))
    with closing(feed_of(sparse, pool_batches=1)) as feed:
        list(feed.pools(0))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tier", TIERS)
def test_on_a_gpu_ragged_rows_stay_whole_and_the_host_never_asks_for_a_size(sparse, tier):
    device = torch.device("cuda", 0)
    feed = open_feed(sparse, order_of(sparse), tier, device=device)
    busy = torch.randn(2048, 2048, device=device)
    kept = []
    list(feed.pools(0))
    torch.cuda.synchronize()
    with no_host_sync():
        for pool in feed.pools(1):
            for _ in range(20):
                busy = busy @ busy / 2048  # what follows runs on the device long after the host has moved on
            for batch in pool.rows.batches(8):
                items = batch["items"]
                kept.append((items.values.clone(), items.offsets.clone(), batch["number"].clone()))
    for values, offsets, number in kept:
        assert is_ragged(RaggedArray(values.cpu().numpy(), offsets.cpu().numpy()), number.tolist())
    feed.close()
