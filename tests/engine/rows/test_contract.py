import numpy as np

from fastgpu.rows.contract import BlockRead, Source
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field


class Squares(Source):
    """The least that a source has to define: row n holds n * n, in blocks of 4 rows."""

    def __init__(self):
        self.name = "squares"
        self.fields = {"x": Field(np.dtype("i8"), ()), "items": Field(np.dtype("i4"), (), 2.5)}
        self.attributes = {}
        self.block_rows = np.full(5, 4, np.int32)

    def __len__(self) -> int:
        return 20

    def read(self, reads, out) -> None:
        for block, first, places in reads:
            row_ids = np.arange(4 * block + first, 4 * block + first + len(places))
            out["x"][places] = row_ids**2


def test_a_source_needs_no_more_than_rows_and_read():
    source = Squares()
    assert source.row_bytes == 8 + 4 + 10
    assert dict(source.lengths) == {}
    assert source.filters == ""
    assert not source.by_h5py


def test_threads_read_the_blocks_of_a_source_in_the_order_of_the_sampler():
    source = Squares()
    order = BlockSampler(source.block_rows, 4, pool_batches=2, seed=3)
    reader = source.open_reader(order, 3)
    assert reader.n_threads == 3
    for consumed in (0, 8):
        values = []
        for plan in reader.pools(1, consumed):
            out = {"x": np.zeros(plan.n_rows, np.int64)}
            reader.read(plan.reads, out)
            values += out["x"].tolist()
        order.set_epoch(1)
        assert values == [row**2 for row in order][consumed:]
    reader.close()


def test_a_read_may_begin_inside_a_block():
    out = {"x": np.zeros(3, np.int64)}
    Squares().read([BlockRead(2, 1, np.array([2, 0, 1]))], out)
    assert out["x"].tolist() == [100, 121, 81]
