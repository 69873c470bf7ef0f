from fractions import Fraction
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.selection import Groups, Mixture


class Case(NamedTuple):
    """A source with groups, and the ranks that share it. Names as in BlockSampler."""

    block_rows: np.ndarray
    groups: Groups
    world_size: int
    canonical_per_rank: int
    share: int
    pool_batches: int

    def samplers(self, world_size: int | None = None, seed: int = 0) -> list[BlockSampler]:
        world_size = world_size or self.world_size
        canonical_ranks = self.world_size * self.canonical_per_rank
        batch_size = self.share * canonical_ranks // world_size
        shards = [Shard(rank, world_size, canonical_ranks) for rank in range(world_size)]
        mixture = Mixture(self.groups, self.block_rows, batch_size * world_size, seed)
        options = {"pool_batches": self.pool_batches, "seed": seed}
        return [BlockSampler(mixture, batch_size, shard=shard, **options) for shard in shards]

    @property
    def epoch_rows(self) -> int:
        """Rows of the source, in whole global batches."""
        batch = self.share * self.world_size * self.canonical_per_rank
        return int(self.block_rows.sum()) // batch * batch


@st.composite
def cases(draw) -> Case:
    small = st.integers(1, 3)
    sizes = [draw(small) for _ in range(3)]
    batch = sizes[0] * sizes[1] * sizes[2]
    rows_of_block = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    rows_of_block.append(batch)  # there is at least one batch
    block_rows = np.array(rows_of_block, np.int32)
    by_block = draw(st.booleans())
    units = len(block_rows) if by_block else int(block_rows.sum())
    groups = np.array(draw(st.lists(st.integers(0, 3), min_size=units, max_size=units)))
    _, groups = np.unique(groups, return_inverse=True)
    n_groups = int(groups.max()) + 1
    weights = draw(st.lists(st.sampled_from([1, 2, 0.3, 20]), min_size=n_groups, max_size=n_groups))
    if by_block:
        groups = np.repeat(groups, block_rows)
    names = tuple(f"group {number}" for number in range(n_groups))
    return Case(block_rows, Groups(names, tuple(weights), groups, by_block), *sizes, draw(small))


many = settings(max_examples=150, deadline=None)


def expected_turns(weights: tuple[float, ...], n_rows: int) -> list[int]:
    """Largest remainders, in exact arithmetic."""
    exact = [n_rows * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    turns = [int(share) for share in exact]
    for number in sorted(range(len(turns)), key=lambda number: turns[number] - exact[number])[: n_rows - sum(turns)]:
        turns[number] += 1
    return turns


def rows_of(samplers: list[BlockSampler], epoch: int) -> np.ndarray:
    rows = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        rows += list(sampler)
    return np.array(rows, np.int64)


# ---------------------------------------------------------------------------------------------- which rows


@many
@given(st.lists(st.sampled_from([1, 3, 0.25, 7.5]), min_size=1, max_size=5), st.integers(0, 1000))
def test_turns_are_the_largest_remainders(weights, n_rows):
    turns = Groups((), tuple(weights), np.empty(0), True).turns(n_rows)
    assert turns.sum() == n_rows
    exact = n_rows * np.array(weights) / sum(weights)
    assert (np.abs(turns - exact) < 1).all()
    remainders = sorted(exact % 1)
    if len(set(np.round(remainders, 6))) == len(remainders):  # without ties, which rounding may decide either way
        assert turns.tolist() == expected_turns(tuple(weights), n_rows)


@many
@given(cases(), st.integers(0, 9))
def test_each_epoch_has_the_exact_turns_and_the_rows_of_a_group_take_them_evenly(case, seed):
    samplers = case.samplers(seed=seed)
    groups = case.groups.groups
    turns = case.groups.turns(case.epoch_rows)
    n_epochs = 4
    total = np.zeros(len(groups), int)
    for epoch in range(n_epochs):
        uses = np.bincount(rows_of(samplers, epoch), minlength=len(groups))
        np.testing.assert_array_equal(np.bincount(groups, uses, len(turns)), turns)
        total += uses
        for group in range(len(turns)):
            for counts in (uses[groups == group], total[groups == group]):
                assert counts.max() - counts.min() <= 1
        np.testing.assert_array_equal(samplers[0].selection.uses(epoch), uses)
    assert samplers[0].total_size == case.epoch_rows == turns.sum()


@many
@given(cases(), st.integers(0, 2))
def test_each_place_of_a_pool_is_filled_once_and_pools_agree_on_all_ranks(case, epoch):
    plans_of_ranks = []
    for sampler in case.samplers():
        plans = list(sampler.pools(epoch))
        starts = np.cumsum(case.block_rows) - case.block_rows
        for plan in plans:
            assert sorted(plan.reads.places) == list(range(plan.n_rows))
            assert plan.n_rows == plan.n_real_rows <= sampler.max_pool_rows
            row_ids = np.full(plan.n_rows, -1)
            for start, read_places in plan.reads.ranges():
                block = np.searchsorted(starts, start, "right") - 1
                assert start + len(read_places) <= starts[block] + case.block_rows[block]
                row_ids[read_places] = start + np.arange(len(read_places))
            np.testing.assert_array_equal(plan.row_ids, row_ids)
        plans_of_ranks.append([(plan.n_rows, plan.number, plan.is_last) for plan in plans])
    assert all(plans == plans_of_ranks[0] for plans in plans_of_ranks)


@many
@given(cases(), st.integers(0, 9))
def test_global_batches_are_the_same_for_every_world_size_that_divides_the_canonical_ranks(case, seed):
    def global_batches(world_size: int) -> np.ndarray:
        samplers = case.samplers(world_size, seed)
        batches = [np.array(list(sampler), int).reshape(-1, sampler.batch_size) for sampler in samplers]
        return np.concatenate(batches, 1)

    for world_size in {case.world_size, case.canonical_per_rank, case.world_size * case.canonical_per_rank}:
        np.testing.assert_array_equal(global_batches(world_size), global_batches(1))


@many
@given(cases(), st.data())
def test_resuming_goes_on_where_it_stopped(case, data):
    sampler = case.samplers()[-1]
    first_pool = data.draw(st.integers(0, sampler.pools_per_epoch))
    rest = [row for plan in sampler.pools(2, first_pool) for row in plan.row_ids.tolist()]
    sampler.set_epoch(2)
    assert rest == list(sampler)[sampler.rows_before(0, first_pool) // case.world_size :]


@many
@given(cases(), st.data())
def test_no_pool_has_more_values_than_it_says(case, data):
    n_rows = int(case.block_rows.sum())
    lengths = np.array(data.draw(st.lists(st.integers(0, 50), min_size=n_rows, max_size=n_rows)), np.int32)
    for sampler in case.samplers():
        for plan in sampler.pools(0):
            assert lengths[plan.row_ids].sum() <= sampler.max_values(lengths)


# ---------------------------------------------------------------------------------------------- which order


def sampler_of(groups: Groups, block_rows: np.ndarray, batch_size: int, seed: int, **options) -> BlockSampler:
    mixture = Mixture(groups, block_rows, batch_size, seed)
    return BlockSampler(mixture, batch_size, seed=seed, **options)


def half_and_half(by_block: bool = True) -> BlockSampler:
    """40 blocks of 16 rows, the first 30 of which get half of the turns."""
    groups = Groups(("a", "b"), (1, 1), np.repeat([0, 1], [30 * 16, 10 * 16]), by_block)
    return sampler_of(groups, np.full(40, 16), 32, pool_batches=20, seed=3)


def test_sources_are_read_in_whole_blocks_except_at_one_place_in_each():
    sampler = half_and_half()
    for epoch in range(3):
        whole = [len(places) == 16 for plan in sampler.pools(epoch) for _, places in plan.reads.ranges()]
        assert whole.count(False) <= 4  # the window of a group is cut at both ends


def test_epochs_and_seeds_differ_and_a_pool_is_mixed():
    def order(seed: int, epoch: int) -> list[int]:
        groups = np.arange(64) // 32
        sampler = sampler_of(Groups(("a", "b"), (3, 1), groups, True), np.full(8, 8), 8, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    first_pool = next(half_and_half().pools(0))
    rows = first_pool.row_ids
    assert 0.3 < (rows < 30 * 16).mean() < 0.7


def test_another_weight_or_another_grouping_is_another_order():
    groups = np.arange(64) // 32
    identities = []
    for weights, rows_of_groups in (((1, 1), groups), ((1, 2), groups), ((1, 1), 1 - groups)):
        sampler = sampler_of(Groups(("a", "b"), weights, rows_of_groups, True), np.full(8, 8), 8, seed=0)
        identities.append(sampler.identity)
    assert len({identity["selection"] for identity in identities}) == 3
    assert identities[0]["rows"] == 64


def test_the_order_of_a_seed_never_changes():
    """Frozen: a run that an older version began must go on in the same order."""
    groups = Groups(("a", "b"), (1, 3), np.array([0] * 6 + [1] * 4), True)
    sampler = sampler_of(groups, np.array([3, 3, 2, 2]), 5, pool_batches=1, seed=7)
    assert list(sampler) == [3, 5, 9, 8, 4, 7, 6, 8, 9, 6]
