import numpy as np

from fastgpu.feed.sizes import Room, Sizes
from fastgpu.rows.mixture import Mixture
from fastgpu.storage.arrays import Arrays
from fastgpu.telemetry.describe import describe_feed

SIZES = Sizes(4, 1, 10, "device", 2, False, Room(100, 1 << 30, 1 << 30))


def test_plain_rows_have_no_line_about_groups():
    text = describe_feed(Arrays("x.h5", {"x": np.arange(10)}), SIZES, 4)
    assert text.startswith("rows: x.h5, 0.0 MiB with the validation rows, kept on the device tier")
    assert "each epoch" not in text


def test_a_mixture_is_told_in_rows_and_passes():
    source = Arrays("x.h5", {"x": np.arange(10)})
    source.mixture = Mixture(("a.h5", "b.h5"), (1, 3), np.repeat([0, 1], [8, 2]), True)
    line = describe_feed(source, SIZES, 4).splitlines()[-1]
    assert line == "each epoch: 2 rows of a.h5 (0.25 passes), 6 rows of b.h5 (3 passes)"


def test_many_classes_are_told_as_a_range():
    source = Arrays("x.h5", {"x": np.arange(30)})
    source.mixture = Mixture(tuple("abcdefg"), (1,) * 7, np.minimum(np.arange(30), 6), False)
    line = describe_feed(source, SIZES, 4).splitlines()[-1]
    assert line == "each epoch: 28 rows, 4 to 4 of each of 7 classes (0.167 to 4 passes)"
