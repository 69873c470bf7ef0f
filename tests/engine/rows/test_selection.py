import numpy as np
import pytest
from cases import mixed
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture, hold_out

many = settings(max_examples=150, deadline=None)


@many
@given(st.lists(st.integers(1, 40), min_size=2, max_size=30), st.floats(0.01, 0.99), st.integers(0, 9))
def test_a_share_is_exact_and_leaves_the_other_rows_and_an_epoch_has_each_of_them_once(block_rows, share, seed):
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
        assert len(pool.reads.starts) == len(part.extents(0).starts)  # none is cut inside a pool


@pytest.mark.parametrize(("n_rows", "block_rows"), [(2000, 1), (50_000, 10_000)])
def test_a_share_is_fair_to_every_class_whatever_the_order_of_the_rows_and_its_reads_are_long(n_rows, block_rows):
    n_blocks = n_rows // block_rows
    train, val = hold_out(np.full(n_blocks, block_rows), n_rows // 10)
    for labels in (np.arange(n_rows) * 10 // n_rows, np.arange(n_rows) % 10):
        counts = np.bincount(labels[val.rows()], minlength=10)
        expected = n_rows / 100
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert len(train.extents(0).starts) <= n_blocks + 2 * max(n_blocks, 1024)  # a part is cut at two places at most


def test_the_rows_held_out_never_change():
    """Frozen: a resumed run must not train on rows that it was validated on."""
    _, val = hold_out(np.array([4, 3, 6, 7]), 5)
    assert val.rows().tolist() == [2, 11, 12, 15, 17]


@many
@given(mixed(), st.integers(0, 9))
def test_each_epoch_has_the_exact_turns_and_the_rows_of_a_group_take_them_evenly(case, seed):
    samplers = case.samplers(seed=seed)
    groups = case.groups.groups
    turns = samplers[0].selection.turns
    assert samplers[0].total_size == turns.sum()
    weights = np.array(case.groups.weights)
    assert (np.abs(turns - turns.sum() * weights / weights.sum()) < 1).all()
    total = np.zeros(len(groups), int)
    for epoch in range(4):
        rows = [plan.row_ids for sampler in samplers for plan in sampler.pools(epoch)]
        uses = np.bincount(np.concatenate([*rows, []]).astype(int), minlength=len(groups))
        np.testing.assert_array_equal(np.bincount(groups, uses, len(turns)), turns)
        total += uses
        for group in range(len(turns)):
            for counts in (uses[groups == group], total[groups == group]):
                assert counts.max() - counts.min() <= 1


def test_sources_are_read_in_whole_blocks_except_at_one_place_in_each_and_pools_are_mixed():
    groups = Groups(("a", "b"), (1, 1), np.repeat([0, 1], [30 * 16, 10 * 16]), True)
    sampler = BlockSampler(Mixture(groups, np.full(40, 16), 32, 3), 32, pool_batches=20, seed=3)
    for epoch in range(3):
        whole = [len(places) == 16 for plan in sampler.pools(epoch) for _, places in plan.reads.ranges()]
        assert whole.count(False) <= 4  # the window of a group is cut at both ends
    first_pool = next(sampler.pools(0))
    assert 0.3 < (first_pool.row_ids < 30 * 16).mean() < 0.7
    rows = [Mixture(groups, np.full(40, 16), 32, seed).extents(0).starts.tolist() for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]  # which rows of the larger group come in the first epoch


def test_another_weight_or_another_grouping_has_another_checksum():
    groups = np.arange(64) // 32
    cases = [((1, 1), groups), ((1, 2), groups), ((1, 1), 1 - groups)]
    mixtures = [Mixture(Groups(("a", "b"), *case, True), np.full(8, 8), 8, 0) for case in cases]
    assert len({mixture.checksum for mixture in mixtures}) == 3
