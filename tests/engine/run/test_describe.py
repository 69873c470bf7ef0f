import numpy as np

from fastgpu.feed.sizes import Sizes
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Groups, Mixture
from fastgpu.run.record import describe_feed
from fastgpu.storage.arrays import ArrayDataset

SIZES = Sizes(4, 1, 10, "device", 2, False, 100, {"device": 1 << 30, "host": 1 << 30})


def describe(source: ArrayDataset) -> str:
    return describe_feed(source, SIZES, BlockSampler(source, 4, pool_batches=10))


def test_rows_that_all_count_once_have_no_line_about_an_epoch():
    text = describe(ArrayDataset("x.h5", {"x": np.arange(12)}))
    assert text.startswith("rows: x.h5, 0.0 MiB with the validation rows, kept on the device tier")
    assert "each epoch" not in text


def test_rows_that_are_left_out_are_told():
    line = describe(ArrayDataset("x.h5", {"x": np.arange(1011)})).splitlines()[-1]
    assert line == "each epoch: 1,008 of 1,011 rows; the rest does not fill a batch"


def test_a_mixture_is_told_in_rows_and_passes():
    source = ArrayDataset("x.h5", {"x": np.arange(10)})
    groups = Groups(("a.h5", "b.h5"), (1, 3), np.repeat([0, 1], [8, 2]), True)
    line = describe(source.select(Mixture(groups, source.block_rows, 4, 0), "x.h5")).splitlines()[-1]
    assert line == "each epoch: 2 rows of a.h5 (0.25 passes), 6 rows of b.h5 (3 passes)"


def test_many_classes_are_told_as_a_range():
    source = ArrayDataset("x.h5", {"x": np.arange(30)})
    groups = Groups(tuple("abcdefg"), (1,) * 7, np.minimum(np.arange(30), 6), False)
    line = describe(source.select(Mixture(groups, source.block_rows, 4, 0), "x.h5")).splitlines()[-1]
    assert line == "each epoch: 28 rows, 4 to 4 of each of 7 classes (0.167 to 4 passes)"
