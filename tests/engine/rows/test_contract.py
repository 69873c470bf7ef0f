import numpy as np
import pytest

from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field


class Squares(Dataset):
    """The least that a source has to define: row n holds n * n, in blocks of 4 rows."""

    def __init__(self):
        self.name = "squares"
        self.fields = {"x": Field(np.dtype("i8"), ()), "items": Field(np.dtype("i4"), (), 2.5)}
        self.attributes = {}
        self.block_rows = np.full(5, 4, np.int32)

    def read(self, plan, reads, out) -> None:
        for start, places in reads.ranges():
            out["x"][places] = np.arange(start, start + len(places)) ** 2


def test_a_source_needs_no_more_than_rows_and_read():
    source = Squares()
    assert len(source) == 20
    assert source.row_bytes == 8 + 4 + 10
    assert dict(source.lengths) == {}
    assert source.column("x") is None


def test_the_blocks_of_a_source_are_read_in_the_order_of_the_sampler():
    source = Squares()
    order = BlockSampler(source.block_rows, 4, pool_batches=2, seed=3)
    for first_pool in (0, 1):
        values = []
        for plan in order.pools(1, first_pool):
            out = {"x": np.zeros(plan.n_rows, np.int64)}
            source.read(plan, plan.reads, out)
            values += out["x"].tolist()
        order.set_epoch(1)
        assert values == [row**2 for row in order][8 * first_pool :]


@pytest.mark.parametrize("n_rows", [1, 4, 5, 100])
def test_portions_are_all_reads_in_their_order(n_rows):
    order = BlockSampler(Squares().block_rows, 4, pool_batches=5, seed=3)
    plan = next(order.pools(0))
    portions = list(plan.reads.portions(n_rows))
    for portion in portions:
        assert portion.counts.sum() == len(portion.places) < n_rows + 4  # no block is cut
    assert len(portions) <= -(-plan.n_rows // n_rows)
    for name, column in plan.reads._asdict().items():
        assert np.concatenate([getattr(portion, name) for portion in portions]).tolist() == column.tolist()
