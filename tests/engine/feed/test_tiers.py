import threading
from contextlib import closing

import pytest
import torch
from harness import CPU, TIMEOUT_S, is_ragged, needs_gpu, no_host_sync, open_feed

from fastgpu.feed import Feed
from fastgpu.process.config import Tier
from fastgpu.process.launch import RankError
from fastgpu.rows import rows as rows_module
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import HDF5Dataset, open_store

TIERS = ("device", "host", "disk")


@pytest.fixture
def store(write) -> HDF5Dataset:
    return open_store("data.train", write(150, chunk=7), {"images": "images", "labels": "labels"})


@pytest.fixture
def sparse(write_ragged) -> HDF5Dataset:
    return open_store("data.train", write_ragged(700, chunks=(16,)), {"items": "items", "number": "number"})


def feed_of(source: Dataset, tier: Tier = "disk", pool_batches: int = 3, device: torch.device = CPU) -> Feed:
    order = BlockSampler(source.block_rows, 8, pool_batches=pool_batches)
    return open_feed(source, order, tier, device=device, prefetch_pools=1)


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
def test_on_a_gpu_rows_stay_whole_under_a_slow_kernel_and_the_host_never_asks_for_a_size(sparse, tier):
    device = torch.device("cuda", 0)
    feed = feed_of(sparse, tier, device=device)
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
