"""Which row comes when: in files with and without groups of rows, and for all ranks that share them."""

import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils.data import DataLoader, DistributedSampler

from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.selection import Groups, Mixture, hold_out
from support.rows import rows_before

seeds = st.none() | st.integers(0, 9)


class Case(NamedTuple):
    """A file and the ranks that share it."""

    block_rows: np.ndarray
    groups: Groups | None
    world_size: int
    canonical_per_rank: int
    share: int
    """Rows that a global batch takes from each canonical rank."""
    pool_batches: int

    @property
    def n_rows(self) -> int:
        return int(self.block_rows.sum())

    def samplers(self, world_size: int | None = None, seed: int | None = 0, **options) -> list[BlockSampler]:
        """A sampler for each rank."""
        world_size = world_size or self.world_size
        canonical_ranks = self.world_size * self.canonical_per_rank
        batch_size = self.share * canonical_ranks // world_size
        rows = self.block_rows
        if self.groups:
            rows = Mixture(self.groups, rows, batch_size * world_size, seed or 0)
        options |= {"pool_batches": self.pool_batches, "seed": seed}
        shards = [Shard(rank, world_size, canonical_ranks) for rank in range(world_size)]
        return [BlockSampler(rows, batch_size, shard=shard, **options) for shard in shards]


small = st.integers(1, 4)
plain = st.builds(
    Case, st.lists(st.integers(1, 9), min_size=1, max_size=20).map(np.array), st.none(), small, small, small, small
)


@st.composite
def mixed(draw) -> Case:
    """Cases with groups and at least one batch."""
    sizes = [draw(st.integers(1, 3)) for _ in range(3)]
    block_rows = np.array([*draw(st.lists(st.integers(1, 9), min_size=1, max_size=12)), np.prod(sizes)], np.int32)
    by_block = draw(st.booleans())
    n_drawn = len(block_rows) if by_block else int(block_rows.sum())
    names, groups = np.unique(draw(arrays(int, n_drawn, elements=st.integers(0, 3))), return_inverse=True)
    weights = tuple(draw(st.sampled_from([1, 2, 0.3, 20])) for _ in names)
    if by_block:
        groups = np.repeat(groups, block_rows)
    return Case(block_rows, Groups(tuple(map(str, names)), weights, groups), *sizes, draw(st.integers(1, 3)))


@given(plain | mixed(), seeds, st.none() | st.booleans(), st.integers(0, 3), st.integers(1, 50))
def test_sampler_pools_are_filled_once_and_agree_on_ranks(case, seed, drop_last, epoch, part_rows):
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
            parts = list(plan.reads.split(part_rows))
            assert len(parts) <= -(-plan.n_rows // part_rows)
            for part in parts:
                assert part.runs.counts.sum() == len(part.places) < part_rows + case.block_rows.max()
            columns = zip(*[(*part.runs, part.places) for part in parts], strict=True)
            whole = (*plan.reads.runs, plan.reads.places)
            for joined, column in zip(map(np.concatenate, columns), whole, strict=True):
                assert joined.tolist() == column.tolist()
        assert sum(plan.n_rows for plan in plans) == len(sampler)
        assert len(plans) == sampler.pools_per_epoch
        assert max([plan.n_rows for plan in plans], default=0) == sampler.max_pool_rows
        plans_of_ranks.append([(plan.n_rows, plan.number) for plan in plans])
    assert all(plans == plans_of_ranks[0] for plans in plans_of_ranks)


@given(plain, seeds, st.booleans(), st.integers(0, 3))
def test_sampler_every_row_once(case, seed, drop_last, epoch):
    samplers = case.samplers(seed=seed, drop_last=drop_last)
    plans = [plan for sampler in samplers for plan in sampler.pools(epoch)]
    real_rows = [row for plan in plans for row in plan.row_ids[: plan.n_real_rows].tolist()]
    assert len(set(real_rows)) == len(real_rows)
    if drop_last:
        assert case.n_rows - len(real_rows) < samplers[0].canonical_ranks + samplers[0].global_batch_size
    else:
        assert sorted(real_rows) == list(range(case.n_rows))


@given(plain | mixed(), st.integers(0, 9))
def test_sampler_same_batches_for_any_world(case, seed):
    def global_batches(world_size: int) -> np.ndarray:
        samplers = case.samplers(world_size, seed)
        batches = [np.array(list(sampler), int).reshape(-1, sampler.batch_size) for sampler in samplers]
        return np.concatenate(batches, 1)

    for world_size in {case.world_size, case.canonical_per_rank, case.world_size * case.canonical_per_rank}:
        np.testing.assert_array_equal(global_batches(world_size), global_batches(1))


@given(plain | mixed(), st.data())
def test_sampler_resumes_where_it_stopped(case, data):
    sampler = case.samplers()[-1]
    assert sum(map(sampler.batches_in, range(sampler.pools_per_epoch))) == -(-len(sampler) // sampler.batch_size)
    first_pool = data.draw(st.integers(0, sampler.pools_per_epoch))
    rest = [row for plan in sampler.pools(2, first_pool) for row in plan.row_ids.tolist()]
    sampler.set_epoch(2)
    assert rest == list(sampler)[rows_before(sampler, first_pool) // case.world_size :]


def test_sampler_reads_whole_blocks_and_mixes_rows():
    groups = Groups(("a", "b"), (1, 1), np.repeat([0, 1], [30 * 16, 10 * 16]))
    for rows, n_cut in ((np.full(40, 16), 0), (Mixture(groups, np.full(40, 16), 32, 3), 6)):
        for epoch in range(3):
            plans = list(BlockSampler(rows, 32, pool_batches=10, seed=3).pools(epoch))
            is_whole = [len(places) == 16 for plan in plans for _, places in plan.reads.ranges()]
            assert is_whole.count(False) <= n_cut  # the windows of two groups, and one border of pools
            for plan in plans:  # neighbours in the file are neighbours in the pool by chance only: 2 of 320
                assert (np.abs(np.diff(plan.row_ids)) == 1).sum() < 12


@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_sampler_pools_differ_by_seed_and_epoch(weights):
    def pools(seed: int, epoch: int) -> tuple[frozenset[int], ...]:
        rows = np.full(16, 8)
        if weights:
            rows = Mixture(Groups(("a", "b"), weights, np.arange(128) // 64), rows, 16, seed)
        sampler = BlockSampler(rows, 16, pool_batches=1, seed=seed)
        return tuple(frozenset(plan.row_ids.tolist()) for plan in sampler.pools(epoch))

    assert len({pools(seed, epoch) for seed in (0, 0, 1, 2) for epoch in (0, 0, 1, 2)}) == 9


def test_sampler_order_never_changes():
    """Frozen: a run that an older version began must go on in the same order."""
    sampler = BlockSampler(np.array([3, 3, 3, 3, 2]), 4, pool_batches=2, seed=7)
    assert list(sampler) == [0, 12, 7, 8, 1, 2, 6, 13, 4, 9, 3, 5]
    numbers = {
        "rows": 14,
        "selection": 3668737837,
        "global_rows": 4,
        "pool_batches": 2,
        "canonical_ranks": 1,
        "seed": 7,
    }
    assert sampler.fingerprint == numbers
    two_ranks = BlockSampler(np.array([3, 3, 3, 3, 2]), 4, Shard(0, 1, 2), pool_batches=2, seed=7)
    assert list(two_ranks) == [6, 8, 5, 3, 7, 0, 13, 4, 1, 2, 10, 9]
    groups = Groups(("a", "b"), (1, 3), np.array([0] * 6 + [1] * 4))
    sampler = BlockSampler(Mixture(groups, np.array([3, 3, 2, 2]), 5, 7), 5, pool_batches=1, seed=7)
    assert list(sampler) == [3, 5, 9, 8, 4, 7, 6, 8, 9, 6]


def test_sampler_without_a_seed_keeps_the_order():
    samplers = [BlockSampler(np.array([3, 4]), 1, Shard(rank, 2), seed=None, drop_last=False) for rank in range(2)]
    assert [list(sampler) for sampler in samplers] == [[0, 1, 2, 2], [3, 4, 5, 6]]


def test_sampler_is_a_distributed_sampler():
    samplers = [BlockSampler(np.full(8, 4), 4, shard=Shard(rank, 2)) for rank in range(2)]
    assert all(isinstance(sampler, DistributedSampler) for sampler in samplers)
    batches = [batch for sampler in samplers for batch in DataLoader(range(32), 4, sampler=sampler)]
    assert sorted(torch.cat(batches).tolist()) == list(range(32))


@pytest.mark.parametrize(("batch_size", "world_size"), [(6, 2), (4, 1)])
def test_sampler_refuses_numbers_that_do_not_divide(batch_size, world_size):
    with pytest.raises(ValueError, match=f"{batch_size * world_size} rows, 3 canonical ranks, {world_size} ranks"):
        BlockSampler(np.full(8, 4), batch_size, shard=Shard(0, world_size, 3))


def test_sampler_memory_for_a_billion_rows():
    block_rows = np.full(10**7, 100, np.int32)
    tracemalloc.start()
    sampler = BlockSampler(block_rows, 64, shard=Shard(1023, 1024), pool_batches=32)
    plan = next(sampler.pools(epoch=3, first_pool=sampler.pools_per_epoch // 2))
    assert len(np.unique(plan.row_ids)) == 64 * 32
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400e6


# ---------------------------------------------------------------------------------------------- shares and groups


@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_share_is_exact_and_leaves_the_other_rows(block_rows, share, seed):
    n_rows = sum(block_rows)
    n_val = round(share * n_rows)
    assume(0 < n_val < n_rows)
    parts = hold_out(np.array(block_rows), n_val)
    assert [len(part) for part in parts] == [n_rows - n_val, n_val]
    np.testing.assert_array_equal(np.sort(np.concatenate([part.rows() for part in parts])), np.arange(n_rows))
    for part in parts:
        rows = part.rows().tolist()
        assert rows == sorted(rows)
        assert rows == list(BlockSampler(part, 4, seed=None, drop_last=False, pool_batches=seed + 1))
        assert rows == sorted(BlockSampler(part, 1, seed=seed, pool_batches=seed + 1))
        (pool,) = BlockSampler(part, 1, seed=seed, pool_batches=n_rows).pools(0)
        assert len(pool.reads.runs.starts) == len(part.in_epoch(0).runs.starts)  # none is cut inside a pool


@pytest.mark.parametrize(("n_rows", "block_rows"), [(2000, 1), (50_000, 10_000)])
def test_share_is_fair_to_every_class(n_rows, block_rows):
    n_blocks = n_rows // block_rows
    train, val = hold_out(np.full(n_blocks, block_rows), n_rows // 10)
    for labels in (np.arange(n_rows) * 10 // n_rows, np.arange(n_rows) % 10):
        counts = np.bincount(labels[val.rows()], minlength=10)
        expected = n_rows / 100
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    n_runs = len(train.in_epoch(0).runs.starts)
    assert n_runs <= n_blocks + 2 * max(n_blocks, 1024)  # a section is cut at two places at most


def test_share_rows_never_change():
    """Frozen: a resumed run must not train on rows that it was validated on."""
    for block_rows, held_out in (([4, 3, 6, 7], [2, 11, 12, 15, 17]), ([5000], [2963, 3101, 3224, 3691, 4613])):
        _, val = hold_out(np.array(block_rows), 5)
        assert val.rows().tolist() == held_out


@given(mixed(), st.integers(0, 9))
def test_mixture_quotas_are_exact_and_even(case, seed):
    samplers = case.samplers(seed=seed)
    groups = case.groups.groups
    quotas = samplers[0].selection.quotas
    assert samplers[0].total_size == quotas.sum()
    weights = np.array(case.groups.weights)
    assert (np.abs(quotas - quotas.sum() * weights / weights.sum()) < 1).all()
    total = np.zeros(len(groups), int)
    for epoch in range(4):
        rows = [plan.row_ids for sampler in samplers for plan in sampler.pools(epoch)]
        uses = np.bincount(np.concatenate([*rows, []]).astype(int), minlength=len(groups))
        np.testing.assert_array_equal(np.bincount(groups, uses, len(quotas)), quotas)
        total += uses
        for group in range(len(quotas)):
            for counts in (uses[groups == group], total[groups == group]):
                assert counts.max() - counts.min() <= 1


@given(mixed(), st.integers(0, 3))
def test_mixture_repeats_of_a_row_are_numbered(case, epoch):
    times = []
    for sampler in case.samplers():
        for plan in sampler.pools(epoch):
            times += zip(plan.row_ids.tolist(), plan.repeats.tolist(), strict=True)
    rows, counts = np.unique([row for row, _ in times], return_counts=True)
    assert sorted(times) == [(row, n) for row, count in zip(rows, counts, strict=True) for n in range(count)]


def test_selection_checksum_depends_on_rows_and_weights():
    """By it, a run that was saved inside an epoch knows whether the rows of the epoch are the same."""
    groups = np.arange(64) // 32
    cases = [((1, 1), groups), ((1, 2), groups), ((1, 1), 1 - groups)]
    selections = [Mixture(Groups(("a", "b"), *case), np.full(8, 8), 8, 0) for case in cases]
    selections += [*hold_out(np.full(8, 8), 5), *hold_out(np.full(8, 8), 6)]
    assert len({selection.fingerprint for selection in selections}) == 3 + 4
