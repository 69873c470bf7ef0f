from fractions import Fraction

import numpy as np
from cases import mixed
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture

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
@given(st.lists(st.sampled_from([1, 3, 0.25, 7.5]), min_size=1, max_size=5), st.integers(1, 1000))
def test_turns_are_the_largest_remainders(weights, n_rows):
    groups = Groups(("",) * len(weights), tuple(weights), np.arange(n_rows) % len(weights), False)
    turns = Mixture(groups, np.array([n_rows]), 1, 0).turns
    assert turns.sum() == n_rows
    exact = n_rows * np.array(weights) / sum(weights)
    assert (np.abs(turns - exact) < 1).all()
    remainders = sorted(exact % 1)
    if len(set(np.round(remainders, 6))) == len(remainders):  # without ties, which rounding may decide either way
        assert turns.tolist() == expected_turns(tuple(weights), n_rows)


@many
@given(mixed(), st.integers(0, 9))
def test_each_epoch_has_the_exact_turns_and_the_rows_of_a_group_take_them_evenly(case, seed):
    samplers = case.samplers(seed=seed)
    groups = case.groups.groups
    turns = samplers[0].selection.turns
    n_epochs = 4
    total = np.zeros(len(groups), int)
    for epoch in range(n_epochs):
        uses = np.bincount(rows_of(samplers, epoch), minlength=len(groups))
        np.testing.assert_array_equal(np.bincount(groups, uses, len(turns)), turns)
        total += uses
        for group in range(len(turns)):
            for counts in (uses[groups == group], total[groups == group]):
                assert counts.max() - counts.min() <= 1
    assert samplers[0].total_size == turns.sum()


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
