import threading
from typing import Any

import numpy as np
import pytest
import torch
from harness import CPU, is_ragged, needs_gpu, no_host_sync, numbers_of

from fastgpu.feed import prefetch, tiers
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Loader, Tier
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import RaggedArray
from fastgpu.rows.selection import Groups, Mixture, hold_out
from fastgpu.storage.store import HDF5Dataset, open_store

TIERS = ("device", "host", "disk")
IN_ORDER = {"seed": None, "drop_last": False, "pool_batches": 2}
"""The options of the validation order."""


@pytest.fixture(params=[(1, 4, 2), (1, 96, 96)], ids=["small rows", "large rows"])
def store(write, request) -> HDF5Dataset:
    return open_store("data.train", write(150, request.param, chunk=7), {"images": "images", "labels": "labels"})


def order_of(source: Dataset, **options: Any) -> BlockSampler:
    """Batches of 8 rows; 3 batches in a pool unless the options say otherwise."""
    return BlockSampler(source.block_rows, 8, **({"pool_batches": 3, "seed": 1} | options))


def feed_of(source: Dataset, tier: Tier = "disk", n_readers: int = 2, prefetch_pools: int = 2, **options: Any) -> Feed:
    placement = Placement(tier, CPU, n_readers)
    return make_feed(source, order_of(source, **options), placement, Loader(prefetch_pools=prefetch_pools))


def rows_of(feed: Feed, epoch: int, first_pool: int = 0) -> list[tuple[int, int]]:
    """(row number, label) of each row of an epoch in order."""
    rows = []
    for pool in feed.pools(epoch, first_pool):
        rows += zip(numbers_of(pool.rows["images"]), pool.rows["labels"].tolist(), strict=True)
    return rows


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("n_readers", "prefetch_pools"), [(1, 1), (4, 1), (2, 4)])
def test_every_tier_gives_the_order_bit_for_bit_with_any_number_of_readers_and_pools_ahead(
    store, tier, n_readers, prefetch_pools
):
    feed = feed_of(store, tier, n_readers, prefetch_pools)
    order = order_of(store)
    for epoch in range(3):
        order.set_epoch(epoch)
        assert rows_of(feed, epoch) == [(row, row % 4) for row in order]
    feed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_two_ranks_share_the_rows(store, tier):
    epochs = []
    for rank in range(2):
        feed = feed_of(store, tier, shard=Shard(rank, 2, 4))
        epochs.append(rows_of(feed, 0))
        feed.close()
    numbers = [row for epoch in epochs for row, _ in epoch]
    assert len(epochs[0]) == len(epochs[1])
    assert len(set(numbers)) == len(numbers) > 150 - 16 - 4


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("first_pool", [0, 1, 3, 6])
def test_an_epoch_can_be_resumed_inside(store, tier, first_pool):
    whole = feed_of(store, tier)
    resumed = feed_of(store, tier)
    assert rows_of(resumed, 3, first_pool) == rows_of(whole, 3)[24 * first_pool :]
    assert rows_of(resumed, 4) == rows_of(whole, 4)
    whole.close()
    resumed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_after_leaving_early_the_next_epoch_is_whole(store, tier):
    feed = feed_of(store, tier)
    whole = feed_of(store, tier)
    for _ in feed.pools(0):
        break
    assert rows_of(feed, 1) == rows_of(whole, 1)
    assert rows_of(feed, 0) == rows_of(whole, 0)  # in any order of epochs
    feed.close()
    whole.close()


def test_the_next_epoch_is_read_while_this_one_ends(store, monkeypatch):
    is_planned = threading.Event()
    plan = BlockSampler.pools

    def pools(self, epoch, first_pool=0):
        if epoch == 1:
            is_planned.set()
        return plan(self, epoch, first_pool)

    monkeypatch.setattr(BlockSampler, "pools", pools)
    feed = feed_of(store)
    assert len(list(feed.pools(0))) == 6
    assert is_planned.wait(60)
    feed.close()


def test_an_epoch_of_the_device_tier_touches_no_file(store, monkeypatch):
    feed = feed_of(store, "device")
    monkeypatch.setattr(HDF5Dataset, "read", lambda *_: pytest.fail("read"))
    assert len(rows_of(feed, 0)) == 144


@pytest.mark.parametrize("tier", TIERS)
def test_padding_is_marked_and_validation_sees_each_row_once(store, tier):
    real_rows = []
    pool_lengths = set()
    for rank in range(4):
        feed = feed_of(store, tier, shard=Shard(rank, 4), **IN_ORDER)
        lengths = []
        for pool in feed.pools(0):
            numbers = numbers_of(pool.rows["images"])
            lengths.append(len(numbers))
            real_rows += numbers[: pool.plan.n_real_rows]
        pool_lengths.add(tuple(lengths))
        feed.close()
    assert sorted(real_rows) == list(range(150))
    assert len(pool_lengths) == 1


def test_batches_are_views_of_a_pool_on_a_cpu(store):
    feed = feed_of(store)
    pool = next(iter(feed.pools(0)))
    first = next(pool.rows.batches(8))
    assert first["images"].data_ptr() == pool.rows["images"].data_ptr()
    assert torch.equal(first["labels"], pool.rows["labels"][:8])
    feed.close()


# ---------------------------------------------------------------------------------------------- ragged rows


@pytest.fixture(
    params=[{}, {"chunks": (16,)}, {"chunks": (16,), "compression": "gzip"}], ids=["whole", "chunks", "gzip"]
)
def sparse(write_ragged, request) -> HDF5Dataset:
    return open_store("data.train", write_ragged(1800, **request.param), {"items": "items", "number": "number"})


def test_blocks_of_ragged_rows_have_several_rows(sparse):
    assert 1 < sparse.block_rows.max() < 24  # so that the tests below cut blocks and join them


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("pool_batches", [1, 3, 1000])
def test_ragged_rows_come_in_order_on_every_tier(sparse, tier, pool_batches):
    options = {"pool_batches": pool_batches, "shard": Shard(canonical_ranks=2)}
    feed = feed_of(sparse, tier, **options)
    order = order_of(sparse, **options)
    for epoch in range(2):
        order.set_epoch(epoch)
        numbers = []
        for pool in feed.pools(epoch):
            assert is_ragged(pool.rows["items"], pool.rows["number"].tolist())
            for batch in pool.rows.batches(8):
                assert is_ragged(batch["items"], batch["number"].tolist())
                numbers += batch["number"].tolist()
        assert numbers == list(order)
    feed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_ragged_rows_are_padded_and_resumed(sparse, tier):
    feed = feed_of(sparse, tier, shard=Shard(3, 4), **IN_ORDER)
    whole = []
    for pool in feed.pools(0):
        whole += pool.rows["number"].tolist()
    rest = []
    for pool in feed.pools(0, 1):
        assert is_ragged(pool.rows["items"], pool.rows["number"].tolist())
        rest += pool.rows["number"].tolist()
    assert rest == whole[16:]
    feed.close()


def largest_pool(order: BlockSampler, lengths: np.ndarray, epochs: int) -> int:
    """The most values that any pool of these epochs has."""
    return max(int(lengths[plan.row_ids].sum()) for epoch in range(epochs) for plan in order.pools(epoch))


def test_no_pool_has_more_values_than_memory_was_made_for(sparse):
    lengths = sparse.lengths["items"]
    for pool_batches in (1, 2, 30, 225):
        for seed in (0, None):
            order = order_of(
                sparse,
                pool_batches=pool_batches,
                seed=seed,
                shard=Shard(canonical_ranks=2),
                drop_last=seed is not None,
            )
            bound = order.max_values(lengths)
            assert largest_pool(order, lengths, epochs=5) <= bound <= lengths.sum() + lengths.max() * 2


def test_padding_counts_as_values():
    order = BlockSampler(np.ones(3, np.int32), 4, shard=Shard(canonical_ranks=2), seed=None, drop_last=False)
    assert order.max_values(np.array([100, 0, 0])) >= 200  # it is padded with its first row


def test_the_bound_is_tight_if_long_rows_lie_together():
    order = BlockSampler(np.full(50, 100, np.int32), 10, pool_batches=30)
    lengths = np.sort(np.random.default_rng(0).pareto(1, 5000).astype(np.int32))
    assert largest_pool(order, lengths, epochs=50) <= order.max_values(lengths) < lengths.sum()


def test_more_values_than_32_bit_offsets_can_count_are_refused(sparse, monkeypatch):
    monkeypatch.setattr(tiers, "MAX_VALUES", 100)
    monkeypatch.setattr(prefetch, "MAX_VALUES", 100)
    message = "has 3,600 values, and at most 100 fit the device or host tier; use data.tier=disk"
    with pytest.raises(UserError, match=message):
        feed_of(sparse, "device")
    message = "data.pool_batches is 500: a pool of .* may have 3,600 values and at most 100 fit"
    with pytest.raises(UserError, match=message):
        feed_of(sparse, "disk", pool_batches=500)
    feed_of(sparse, "disk", pool_batches=1).close()


# ---------------------------------------------------------------------------------------------- mixtures


@pytest.fixture(params=["sources", "classes"])
def mixed(sparse, request) -> Dataset:
    """Nine tenths of the ragged rows, in two groups; an epoch has three rows of the one for one of the other."""
    by_block = request.param == "sources"
    groups = np.arange(len(sparse)) % 5 // 4
    if by_block:
        groups = np.repeat(np.arange(len(sparse.block_rows)) % 5 // 4, sparse.block_rows)
    held_out = hold_out(sparse.block_rows, len(sparse) // 10)[1]
    groups[held_out.rows()] = -1
    mixture = Mixture(Groups(("a", "b"), (1, 3), groups, by_block), sparse.block_rows, 8, seed=1)
    return sparse.select(mixture, "mixed")


def test_a_mixture_gives_the_same_batches_on_every_tier_and_when_it_is_resumed(mixed):
    numbers = mixed.column("number")
    order = BlockSampler(mixed, 8, shard=Shard(canonical_ranks=2), pool_batches=30, seed=1)
    for tier in TIERS:
        feed = make_feed(mixed, order, Placement(tier, CPU, 2), Loader())
        for epoch, first_pool in ((0, 0), (1, 0), (1, 1), (1, 6)):
            rows = []
            for pool in feed.pools(epoch, first_pool):
                assert is_ragged(pool.rows["items"], pool.rows["number"].tolist())
                rows += pool.rows["number"].tolist()
            order.set_epoch(epoch)
            assert rows == numbers[list(order)].tolist()[240 * first_pool :]
        feed.close()
    counts = np.bincount(mixed.selection.groups.groups[list(order)])
    assert counts.tolist() == mixed.selection.turns.tolist() == [404, 1212]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tier", TIERS)
def test_on_a_gpu_ragged_rows_stay_whole_and_the_host_never_asks_for_a_size(sparse, tier):
    device = torch.device("cuda", 0)
    feed = make_feed(sparse, order_of(sparse), Placement(tier, device, 2))
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
