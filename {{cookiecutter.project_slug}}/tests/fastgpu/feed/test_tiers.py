import threading

import numpy as np
import pytest
import torch
from harness import is_ragged, no_host_sync, numbers_of

from fastgpu.feed import tiers as feed_module
from fastgpu.feed.tiers import Feed, make_feed
from fastgpu.process.launch import UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import store as store_module
from fastgpu.storage.store import Store, open_store

CPU = torch.device("cpu")
TIERS = ("device", "host", "disk")


@pytest.fixture(params=[(1, 4, 2), (1, 96, 96)], ids=["small rows", "large rows"])
def store(write, request) -> Store:
    return open_store("data.train", write(150, request.param, chunk=7), {"images": "images", "labels": "labels"})


def feed_of(store: Store, tier="disk", readers: int = 2, prefetch_pools: int = 2, **order) -> Feed:
    order = BlockSampler(store.block_rows, 8, **({"pool_batches": 3, "seed": 1} | order))
    return make_feed(store, order, tier, CPU, readers, prefetch_pools)


def epoch_of(feed: Feed, epoch: int, consumed: int = 0) -> list[tuple[int, int]]:
    """(row number, label) in order."""
    return [
        pair
        for pool in feed.pools(epoch, consumed)
        for pair in zip(numbers_of(pool.rows["images"]), pool.rows["labels"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("readers", "prefetch_pools"), [(1, 1), (4, 1), (2, 4)])
def test_every_tier_reader_count_and_depth_gives_the_order_bit_for_bit(store, tier, readers, prefetch_pools):
    feed = feed_of(store, tier, readers, prefetch_pools)
    order = BlockSampler(store.block_rows, 8, pool_batches=3, seed=1)
    for epoch in range(3):
        order.set_epoch(epoch)
        assert epoch_of(feed, epoch) == [(row, row % 4) for row in order]
    feed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_two_ranks_share_the_rows(store, tier):
    ranks = [feed_of(store, tier, rank=rank, world_size=2, canonical_ranks=4) for rank in range(2)]
    epochs = [epoch_of(feed, 0) for feed in ranks]
    seen = [row for rank in epochs for row, _ in rank]
    assert len(epochs[0]) == len(epochs[1])
    assert len(set(seen)) == len(seen) > 150 - 16 - 4
    for feed in ranks:
        feed.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("consumed", [0, 24, 32, 144])
def test_resumes_inside_an_epoch(store, tier, consumed):
    whole = feed_of(store, tier)
    resumed = feed_of(store, tier)
    assert epoch_of(resumed, 3, consumed) == epoch_of(whole, 3)[consumed:]
    assert epoch_of(resumed, 4) == epoch_of(whole, 4)
    whole.close()
    resumed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_after_leaving_early_the_next_epoch_is_whole(store, tier):
    feed, whole = feed_of(store, tier), feed_of(store, tier)
    for _ in feed.pools(0):
        break
    assert epoch_of(feed, 1) == epoch_of(whole, 1)
    assert epoch_of(feed, 0) == epoch_of(whole, 0)  # in any order of epochs
    feed.close()
    whole.close()


def test_the_next_epoch_is_read_while_this_one_ends(store, monkeypatch):
    feed, seen = feed_of(store), threading.Event()
    real = BlockSampler.pools

    def pools(self, epoch, consumed=0):
        if epoch == 1:
            seen.set()
        return real(self, epoch, consumed)

    monkeypatch.setattr(BlockSampler, "pools", pools)
    pools_of_epoch = list(feed.pools(0))
    assert len(pools_of_epoch) == 6
    assert seen.wait(10)
    feed.close()


def test_an_epoch_of_the_device_tier_touches_no_file(store, monkeypatch):
    feed = feed_of(store, "device")
    monkeypatch.setattr(store_module.Store, "read", lambda *_: pytest.fail("read"))
    assert len(epoch_of(feed, 0)) == 144


@pytest.mark.parametrize("tier", TIERS)
def test_padding_is_marked_and_validation_sees_each_row_once(store, tier):
    options = {"world_size": 4, "shuffle": False, "drop_last": False, "pool_batches": 2}
    real, lengths = [], set()
    for rank in range(4):
        feed = feed_of(store, tier, rank=rank, **options)
        pools = [(pool.plan, numbers_of(pool.rows["images"])) for pool in feed.pools(0)]
        lengths.add(tuple(len(numbers) for _, numbers in pools))
        real += [number for plan, numbers in pools for number in numbers[: plan.n_real_rows]]
        feed.close()
    assert sorted(real) == list(range(150))
    assert len(lengths) == 1


def test_batches_are_views_of_a_pool_on_a_cpu(store):
    feed = feed_of(store)
    pool = next(iter(feed.pools(0)))
    first = next(pool.rows.batches(8))
    assert first["images"].data_ptr() == pool.rows["images"].data_ptr()
    feed.close()
    assert np.array_equal(first["labels"], pool.rows["labels"][:8])


# ---------------------------------------------------------------------------------------------- ragged rows


@pytest.fixture(
    params=[{}, {"chunks": (16,)}, {"chunks": (16,), "compression": "gzip"}], ids=["whole", "chunks", "gzip"]
)
def sparse(write_ragged, request, monkeypatch) -> Store:
    monkeypatch.setattr(store_module, "LEAST_BLOCKS", 20)  # blocks of 7 rows
    return open_store("data.train", write_ragged(150, **request.param), {"items": "items", "number": "number"})


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("pool_batches", [1, 3, 100])
def test_ragged_rows_keep_to_the_order_on_every_tier(sparse, tier, pool_batches):
    options = {"pool_batches": pool_batches, "lanes": 2, "seed": 1}
    feed, order = feed_of(sparse, tier, **options), BlockSampler(sparse.block_rows, 8, **options)
    for epoch in range(3):
        order.set_epoch(epoch)
        seen = []
        for pool in feed.pools(epoch):
            assert is_ragged(pool.rows["items"], pool.rows["number"].tolist())
            for batch in pool.rows.batches(8):
                assert is_ragged(batch["items"], batch["number"].tolist())
                seen += batch["number"].tolist()
        assert seen == list(order)
    feed.close()


@pytest.mark.parametrize("tier", TIERS)
def test_ragged_rows_are_padded_and_resumed(sparse, tier):
    options = {"shuffle": False, "drop_last": False, "pool_batches": 2, "world_size": 4, "rank": 3}
    feed = feed_of(sparse, tier, **options)
    whole = [n for pool in feed.pools(0) for n in pool.rows["number"].tolist()]
    rest = []
    for pool in feed.pools(0, 32):
        assert is_ragged(pool.rows["items"], pool.rows["number"].tolist())
        rest += pool.rows["number"].tolist()
    assert rest == whole[8:]
    feed.close()


def test_no_pool_has_more_values_than_memory_was_made_for(sparse):
    lengths = sparse.lengths["items"]
    for pool_batches in (1, 2, 5, 18):
        for shuffle in (True, False):
            order = BlockSampler(
                sparse.block_rows, 8, pool_batches=pool_batches, shuffle=shuffle, canonical_ranks=2, drop_last=shuffle
            )
            most = order.max_values(lengths)
            found = [int(lengths[order.row_ids(plan)].sum()) for epoch in range(20) for plan in order.pools(epoch)]
            assert max(found) <= most <= lengths.sum() + lengths.max() * 2
    order = BlockSampler(
        np.ones(3, np.int32), 4, canonical_ranks=2, shuffle=False, drop_last=False
    )  # padded with its first row
    assert order.max_values(np.array([100, 0, 0])) >= 200
    rng = np.random.default_rng(0)  # long rows lie together
    order = BlockSampler(np.full(50, 100, np.int32), 10, pool_batches=30)
    lengths = np.sort(rng.pareto(1, 5000).astype(np.int32))
    found = [int(lengths[order.row_ids(plan)].sum()) for epoch in range(50) for plan in order.pools(epoch)]
    assert max(found) <= order.max_values(lengths) < lengths.sum()


def test_what_offsets_of_32_bits_cannot_count_is_refused(sparse, monkeypatch):
    monkeypatch.setattr(feed_module, "MOST_VALUES", 100)
    with pytest.raises(
        UserError, match=r"has 300 values, and at most 100 fit the device or host tier; use data.tier=disk"
    ):
        feed_of(sparse, "device")
    with pytest.raises(
        UserError, match="data.pool_batches is 50: a pool of .* may have 300 values and at most 100 fit"
    ):
        feed_of(sparse, "disk", pool_batches=50)
    feed_of(sparse, "disk", pool_batches=1).close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tier", TIERS)
def test_on_a_gpu_ragged_rows_stay_whole_and_no_size_is_asked_of_the_device(sparse, tier):
    device, options = torch.device("cuda", 0), {"pool_batches": 3, "seed": 1}
    feed = make_feed(sparse, BlockSampler(sparse.block_rows, 8, **options), tier, device, 2)
    busy, kept = torch.randn(2048, 2048, device=device), []
    list(feed.pools(0))
    torch.cuda.synchronize()
    with no_host_sync():
        for pool in feed.pools(1):
            for _ in range(20):
                busy = busy @ busy / 2048  # what follows runs on the device long after the host has moved on
            for batch in pool.rows.batches(8):
                kept.append((batch["items"].values.clone(), batch["items"].offsets.clone(), batch["number"].clone()))
    for values, offsets, number in kept:
        assert is_ragged(RaggedArray(values.cpu().numpy(), offsets.cpu().numpy()), number.tolist())
    feed.close()
