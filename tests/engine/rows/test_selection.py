import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import runs
from fastgpu.rows.selection import Share, hold_out


def numbers_in(share: Share) -> np.ndarray:
    """The rows of an epoch in the order of the file, as its extents have them."""
    extents = share.extents(0)
    return runs(extents.starts, extents.counts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_the_parts_are_exact_and_disjoint_and_keep_their_rows(block_rows, share):
    n_rows = sum(block_rows)
    n_val = round(share * n_rows)
    if not 0 < n_val < n_rows:
        return
    train, val = hold_out(np.array(block_rows), n_val)
    assert (len(train), len(val)) == (n_rows - n_val, n_val)
    together = np.concatenate([numbers_in(train), numbers_in(val)])
    np.testing.assert_array_equal(np.sort(together), np.arange(n_rows))
    for part in (train, val):
        assert (np.diff(numbers_in(part)) > 0).all()  # in the order of the file
        np.testing.assert_array_equal(part.rows(), numbers_in(part))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=30), st.integers(0, 9), st.integers(1, 4))
def test_an_epoch_of_a_part_has_each_of_its_rows_once_and_a_block_stays_together(block_rows, seed, pool_batches):
    if sum(block_rows) < 10:
        return
    train, val = hold_out(np.array(block_rows), sum(block_rows) // 5)
    for part in (train, val):
        validation = BlockSampler(part, 4, seed=None, drop_last=False, pool_batches=pool_batches)
        assert list(validation) == part.rows().tolist()
        sampler = BlockSampler(part, 1, seed=seed, pool_batches=pool_batches)
        assert sorted(sampler) == part.rows().tolist()
    n_pieces = sum(len(plan.reads.starts) for plan in BlockSampler(train, 1, seed=seed, pool_batches=10**6).pools(0))
    assert n_pieces == len(train.extents(0).starts)  # no extent is cut inside a pool


@pytest.mark.parametrize(("n_rows", "block_rows"), [(2000, 2000), (2000, 1), (50_000, 20), (50_000, 10_000)])
@pytest.mark.parametrize("order", ["sorted", "periodic", "random"])
def test_a_share_is_fair_to_every_class_whatever_the_order_of_the_rows(n_rows, block_rows, order):
    labels = np.arange(n_rows) * 10 // n_rows
    if order == "periodic":
        labels = np.arange(n_rows) % 10
    elif order == "random":
        labels = np.random.default_rng(5).permutation(labels)
    _, val = hold_out(np.full(n_rows // block_rows, block_rows), n_rows // 10)
    counts = np.bincount(labels[numbers_in(val)], minlength=10)
    expected = n_rows / 100
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_reads_of_a_large_file_stay_long():
    train, val = hold_out(np.full(2000, 50), 10_000)
    assert len(train.extents(0).units) == 2000
    assert len(train.extents(0).starts) <= 4000  # at most two pieces of each block
    np.testing.assert_array_equal(val.extents(0).counts[:10].sum() % 5, 0)


def test_the_rows_held_out_never_change():
    """Frozen: a resumed run must not train on rows that it was validated on."""
    _, val = hold_out(np.array([4, 3, 6, 7]), 5)
    assert numbers_in(val).tolist() == [2, 11, 12, 15, 17]
