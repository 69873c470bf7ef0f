import tracemalloc

import numpy as np
import pytest
import torch
from cases import mixed, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.selection import Groups, Mixture

seeds = st.none() | st.integers(0, 9)
many = settings(max_examples=300, deadline=None)


@many
@given(plain | mixed(), seeds, st.none() | st.booleans(), st.integers(0, 3), st.integers(1, 50))
def test_each_place_of_a_pool_is_filled_once_also_in_portions_and_pools_agree_on_all_ranks(
    case, seed, drop_last, epoch, portion_rows
):
    stops = np.cumsum(case.block_rows)
    plans_of_ranks = []
    for sampler in case.samplers(seed=seed, drop_last=drop_last):
        plans = list(sampler.pools(epoch))
        for plan in plans:
            assert sorted(plan.reads.places) == list(range(plan.n_rows))
            row_ids = np.full(plan.n_rows, -1)
            for start, places in plan.reads.ranges():
                assert start + len(places) <= stops[np.searchsorted(stops, start, "right")]  # in one block
                row_ids[places] = start + np.arange(len(places))
            np.testing.assert_array_equal(plan.row_ids, row_ids)
            portions = list(plan.reads.portions(portion_rows))
            assert len(portions) <= -(-plan.n_rows // portion_rows)
            for portion in portions:
                assert portion.counts.sum() == len(portion.places) < portion_rows + case.block_rows.max()
            for whole, parts in zip(plan.reads, zip(*portions, strict=True), strict=True):
                assert np.concatenate(parts).tolist() == whole.tolist()
        assert sum(plan.n_rows for plan in plans) == len(sampler)
        assert len(plans) == sampler.pools_per_epoch
        assert max([plan.n_rows for plan in plans], default=0) == sampler.max_pool_rows
        plans_of_ranks.append([(plan.n_rows, plan.number, plan.is_last) for plan in plans])
    assert all(plans == plans_of_ranks[0] for plans in plans_of_ranks)


@many
@given(plain, seeds, st.booleans(), st.integers(0, 3))
def test_every_row_comes_once(case, seed, drop_last, epoch):
    samplers = case.samplers(seed=seed, drop_last=drop_last)
    plans = [plan for sampler in samplers for plan in sampler.pools(epoch)]
    real_rows = [row for plan in plans for row in plan.row_ids[: plan.n_real_rows].tolist()]
    assert len(set(real_rows)) == len(real_rows)
    if drop_last:
        assert case.n_rows - len(real_rows) < samplers[0].canonical_ranks + samplers[0].global_batch_size
    else:
        assert sorted(real_rows) == list(range(case.n_rows))


@many
@given(plain | mixed(), st.integers(0, 9))
def test_global_batches_are_the_same_for_every_world_size_that_divides_the_canonical_ranks(case, seed):
    def global_batches(world_size: int) -> np.ndarray:
        samplers = case.samplers(world_size, seed)
        batches = [np.array(list(sampler), int).reshape(-1, sampler.batch_size) for sampler in samplers]
        return np.concatenate(batches, 1)

    for world_size in {case.world_size, case.canonical_per_rank, case.world_size * case.canonical_per_rank}:
        np.testing.assert_array_equal(global_batches(world_size), global_batches(1))


@many
@given(plain | mixed(), st.data())
def test_resuming_goes_on_where_it_stopped(case, data):
    sampler = case.samplers()[-1]
    assert sampler.rows_before(2, sampler.pools_per_epoch) == 3 * sampler.total_size
    first_pool = data.draw(st.integers(0, sampler.pools_per_epoch))
    rest = [row for plan in sampler.pools(2, first_pool) for row in plan.row_ids.tolist()]
    sampler.set_epoch(2)
    assert rest == list(sampler)[sampler.rows_before(0, first_pool) // case.world_size :]


def test_blocks_are_read_as_a_whole_and_all_of_their_rows_are_mixed_in_a_pool():
    sampler = BlockSampler(np.full(64, 16), 32, pool_batches=8)
    plans = list(sampler.pools(0))
    reads = [(start // 16, len(places)) for plan in plans for start, places in plan.reads.ranges()]
    assert sorted(reads) == [(block, 16) for block in range(64)]
    for plan in plans:  # neighbours in the file are neighbours in the pool by chance only: 2 of 256
        assert (np.abs(np.diff(plan.row_ids)) == 1).sum() < 12


@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_each_seed_and_each_epoch_has_pools_of_other_rows(weights):
    def pools(seed: int, epoch: int) -> tuple[frozenset[int], ...]:
        rows = np.full(16, 8)
        if weights:
            rows = Mixture(Groups(("a", "b"), weights, np.arange(128) // 64, True), rows, 16, seed)
        sampler = BlockSampler(rows, 16, pool_batches=1, seed=seed)
        return tuple(frozenset(plan.row_ids.tolist()) for plan in sampler.pools(epoch))

    assert len({pools(seed, epoch) for seed in (0, 0, 1, 2) for epoch in (0, 0, 1, 2)}) == 9


def test_the_order_of_a_seed_and_its_names_in_checkpoints_never_change():
    """Frozen: a run that an older version began must go on in the same order."""
    sampler = BlockSampler(np.array([3, 3, 3, 3, 2]), 4, pool_batches=2, seed=7)
    assert list(sampler) == [0, 12, 7, 8, 1, 2, 6, 13, 4, 9, 3, 5]
    expected = {"rows": 14, "selection": 3668737837, "global_rows": 4, "pool_batches": 2, "lanes": 1, "seed": 7}
    assert sampler.identity == expected
    groups = Groups(("a", "b"), (1, 3), np.array([0] * 6 + [1] * 4), True)
    sampler = BlockSampler(Mixture(groups, np.array([3, 3, 2, 2]), 5, 7), 5, pool_batches=1, seed=7)
    assert list(sampler) == [3, 5, 9, 8, 4, 7, 6, 8, 9, 6]


def test_without_a_seed_rows_come_in_the_order_of_the_file_and_the_last_one_of_a_rank_is_repeated():
    samplers = [BlockSampler(np.array([3, 4]), 1, Shard(rank, 2), seed=None, drop_last=False) for rank in range(2)]
    assert [list(sampler) for sampler in samplers] == [[0, 1, 2, 2], [3, 4, 5, 6]]


def test_is_a_distributed_sampler_for_a_plain_dataloader():
    samplers = [BlockSampler(np.full(8, 4), 4, shard=Shard(rank, 2)) for rank in range(2)]
    assert all(isinstance(sampler, DistributedSampler) for sampler in samplers)
    batches = [batch for sampler in samplers for batch in DataLoader(range(32), 4, sampler=sampler)]
    assert sorted(torch.cat(batches).tolist()) == list(range(32))


@pytest.mark.parametrize(("world_size", "numbers"), [(2, "8 rows, 3 canonical ranks"), (1, "4 rows, 3 canonical")])
def test_numbers_that_do_not_divide_are_refused(world_size, numbers):
    with pytest.raises(ValueError, match=numbers):
        BlockSampler(np.full(8, 4), 4, shard=Shard(0, world_size, 3))


def test_memory_for_a_billion_rows_in_ten_million_blocks_on_a_thousand_ranks():
    block_rows = np.full(10**7, 100, np.int32)
    tracemalloc.start()
    sampler = BlockSampler(block_rows, 64, shard=Shard(1023, 1024), pool_batches=32)
    plan = next(sampler.pools(epoch=3, first_pool=sampler.pools_per_epoch // 2))
    assert len(np.unique(plan.row_ids)) == 64 * 32
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400e6
