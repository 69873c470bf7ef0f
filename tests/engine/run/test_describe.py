import numpy as np
import pytest

from fastgpu.feed.sizes import Sizes
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture
from fastgpu.run.record import describe_feed
from fastgpu.storage.arrays import ArrayDataset

SIZES = Sizes(4, 1, 10, "device", 2, False, 100, {"device": 1 << 30, "host": 1 << 30})
SOURCES = Groups(("a.h5", "b.h5"), (1, 3), np.repeat([0, 1], [8, 2]), True)
CLASSES = Groups(tuple("abcdefg"), (1,) * 7, np.minimum(np.arange(30), 6), False)


@pytest.mark.parametrize(
    ("n_rows", "groups", "line"),
    [
        (12, None, "batches: 4 rows over all ranks, 4 on each; 10 batches in a pool; 1 canonical ranks; "),
        (1011, None, "each epoch: 1,008 of 1,011 rows; the rest does not fill a batch"),
        (10, SOURCES, "each epoch: 2 rows of a.h5 (0.25 passes), 6 rows of b.h5 (3 passes)"),
        (30, CLASSES, "each epoch: 4 rows of a (4 passes), 4 rows of b (4 passes), "),
    ],
    ids=["all rows", "a rest", "sources at weights", "classes"],
)
def test_it_is_told_where_rows_lie_and_how_many_an_epoch_has(n_rows, groups, line):
    source = ArrayDataset("x.h5", {"x": np.arange(n_rows)})
    if groups:
        source = source.select(Mixture(groups, source.block_rows, 4, 0), "x.h5")
    lines = describe_feed(source, SIZES, BlockSampler(source, 4, pool_batches=10)).splitlines()
    assert lines[0].startswith("rows: x.h5, 0.0 MiB with the validation rows, kept on the device tier")
    assert lines[-1].startswith(line)
