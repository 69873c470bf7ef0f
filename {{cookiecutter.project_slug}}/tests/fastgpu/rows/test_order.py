import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fastgpu.rows.order import BlockSampler, _Line

blocks = st.lists(st.integers(1, 9), min_size=1, max_size=20).map(np.array)
small = st.integers(1, 4)
flag = st.booleans()
many = settings(max_examples=300, deadline=None)


def samplers(block_rows, world, lanes_a_rank, share, **options) -> list[BlockSampler]:
    """One a rank, where a global batch takes `share` rows from each lane."""
    canonical_ranks = world * lanes_a_rank
    return [
        BlockSampler(
            block_rows, share * lanes_a_rank, rank=rank, world_size=world, canonical_ranks=canonical_ranks, **options
        )
        for rank in range(world)
    ]


@many
@given(blocks, small, small, small, small, flag, flag, st.integers(0, 3))
def test_every_row_once_and_equal_counts_on_all_ranks(
    rows, world, canonical_ranks, share, pool, shuffle, drop_last, epoch
):
    ranks = samplers(
        rows, world, canonical_ranks, share, pool_batches=pool, shuffle=shuffle, drop_last=drop_last, seed=5
    )
    real, plans = [], []
    for rank in ranks:
        plans.append(list(rank.pools(epoch)))
        for plan in plans[-1]:
            places = np.concatenate([read.places for read in plan.reads])
            assert sorted(places) == list(range(plan.n_rows))  # each place of the pool is filled exactly once
            real += rank.row_ids(plan)[: plan.n_real_rows].tolist()
        assert sum(plan.n_rows for plan in plans[-1]) == len(rank)
    assert len({tuple((plan.n_rows, plan.consumed, plan.is_last) for plan in of_rank) for of_rank in plans}) == 1
    assert len(set(real)) == len(real)
    total, batch = int(rows.sum()), ranks[0].global_batch_size
    if drop_last:
        assert total - len(real) < ranks[0].canonical_ranks + batch
    else:
        assert sorted(real) == list(range(total))


@many
@given(blocks, small, small, small, small, st.integers(0, 9))
def test_global_batches_are_the_same_for_every_world_size_that_divides_the_lanes(rows, a, b, share, pool, seed):
    def global_batches(world: int) -> np.ndarray:
        ranks = samplers(rows, world, a * b // world, share, pool_batches=pool, seed=seed)
        return np.concatenate([np.array(list(rank), int).reshape(rank.batches, rank.batch_size) for rank in ranks], 1)

    for world in {a, b, a * b}:
        np.testing.assert_array_equal(global_batches(world), global_batches(1))


@many
@given(blocks, small, small, small, small, st.data())
def test_resuming_goes_on_where_it_stopped(rows, world, canonical_ranks, share, pool, data):
    rank = samplers(rows, world, canonical_ranks, share, pool_batches=pool)[world - 1]
    done = data.draw(st.integers(0, rank.batches))
    rest = [
        number
        for plan in rank.pools(2, done * rank.global_batch_size)
        for number in rank.row_ids(plan)[plan.n_skipped_rows :].tolist()
    ]
    rank.set_epoch(2)
    assert rest == list(rank)[done * rank.batch_size :]


def test_every_block_is_read_once_an_epoch_but_at_the_borders_of_pools():
    rank = BlockSampler(np.full(64, 16), 32, pool_batches=8)
    reads = [(read.block, len(read.places)) for plan in rank.pools(0) for read in plan.reads]
    assert sorted(block for block, _ in reads) == list(range(64))
    assert {rows for _, rows in reads} == {16}


def test_epochs_and_seeds_differ_and_repeat():
    def order(seed: int, epoch: int) -> list[int]:
        rank = BlockSampler(np.full(16, 8), 16, pool_batches=2, seed=seed)
        rank.set_epoch(epoch)
        return list(rank)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_of_a_seed_never_changes():
    """Frozen: a resumed run of an older version must go on in the same order."""
    rank = BlockSampler(np.array([3, 3, 3, 3, 2]), 4, pool_batches=2, seed=7)
    assert list(rank) == [0, 12, 7, 8, 1, 2, 6, 13, 4, 9, 3, 5]


def test_without_shuffle_rows_come_in_the_order_of_the_file():
    assert list(BlockSampler(np.array([3, 4, 2]), 4, shuffle=False, drop_last=False)) == list(range(9))


def test_is_a_distributed_sampler_for_a_plain_dataloader():
    ranks = [BlockSampler(np.full(8, 4), 4, rank=rank, world_size=2) for rank in range(2)]
    assert all(isinstance(rank, DistributedSampler) for rank in ranks)
    rows = [row for rank in ranks for batch in DataLoader(range(32), 4, sampler=rank) for row in batch.tolist()]
    assert sorted(rows) == list(range(32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 2, "lanes": 3}, "3 lanes do not divide among 2 ranks"),
        ({"lanes": 3}, "a global batch of 4 rows does not divide among 3 lanes"),
        ({"rank": 2, "world_size": 2}, "Invalid rank"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        BlockSampler(np.full(8, 4), 4, **options)


def test_a_line_finds_every_row():
    rows = np.random.default_rng(0).integers(1, 4, 3000).astype(np.int32)  # more blocks than a line keeps starts of
    for blocks in (None, np.random.default_rng(1).permutation(3000)):
        line = _Line(rows, blocks)
        slots = np.repeat(np.arange(3000), rows if blocks is None else rows[blocks])
        assert [line.slot(row) for row in range(len(slots))] == slots.tolist()
        assert [line.start(slot) for slot in range(3000)] == np.flatnonzero(np.diff(slots, prepend=-1)).tolist()


def test_memory_for_a_billion_rows_in_ten_million_blocks_on_a_thousand_ranks():
    block_rows = np.full(10**7, 100, np.int32)
    tracemalloc.start()
    order = BlockSampler(block_rows, 64, rank=1023, world_size=1024, pool_batches=32)
    plans = order.pools(epoch=3, consumed=order.total_size // 2 // order.global_batch_size * order.global_batch_size)
    plan = next(plans)
    rows = order.row_ids(plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6
    assert plan.n_rows == len(np.unique(rows)) == 64 * 32
    assert rows.max() < 10**9


def test_resuming_inside_a_batch_is_refused():
    with pytest.raises(ValueError, match="no whole number of global batches"):
        list(BlockSampler(np.full(8, 4), 4).pools(0, consumed=3))


@pytest.mark.parametrize("block_rows", [1, 2, 7])
def test_a_pool_of_all_rows_is_in_random_order(block_rows):
    """Rows beside each other in the pool are no neighbours in the file, whatever the blocks."""
    for seed, epoch in [(0, 0), (0, 1), (3, 0), (5, 7)]:
        order = BlockSampler(np.full(2000 // block_rows, block_rows), 16, pool_batches=200, seed=seed)
        numbers = order.row_ids(next(order.pools(epoch)))
        neighbours = np.abs(np.diff(numbers)) == 1
        assert neighbours.sum() < 12  # by chance 2 of 2,000; more than 11 once in 10^5 tries
