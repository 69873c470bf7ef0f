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


@pytest.mark.parametrize("n_rows", [1, 4, 5, 100])
def test_a_source_needs_no_more_than_rows_and_read_which_threads_do_in_portions(n_rows):
    source = Squares()
    assert (len(source), source.row_bytes, dict(source.lengths), source.column("x")) == (20, 8 + 4 + 10, {}, None)
    order = BlockSampler(source, 4, pool_batches=5, seed=3)
    plan = next(order.pools(0))
    out = {"x": np.zeros(20, np.int64)}
    for reads in plan.reads.portions(n_rows):
        source.read(plan, reads, out)
    assert out["x"].tolist() == [row**2 for row in order]
    portions = list(plan.reads.portions(n_rows))
    assert len(portions) <= -(-20 // n_rows)
    for portion in portions:
        assert portion.counts.sum() == len(portion.places) < n_rows + 4  # no block is cut
    for name, column in plan.reads._asdict().items():
        assert np.concatenate([getattr(portion, name) for portion in portions]).tolist() == column.tolist()
