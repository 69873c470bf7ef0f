import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.meaning import check_meaning


def described(name: str, attributes: Mapping[str, Sequence[object]]) -> ArrayDataset:
    """Rows with these attributes."""
    return ArrayDataset(name, {"x": np.zeros((2, 3), np.uint8)}, attributes)


IDS = np.array([7, 3, 9])
SHORTER, EXACT = ({"preprocessing": f'{{"size": [8, 8], "resize": "{resize}"}}'} for resize in ("shorter", "exact"))


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"item_ids": IDS}, {"item_ids": [7, 3, 9]}, ""),
        ({"item_ids": [0, 1, 2]}, {}, ""),  # a matrix with all its columns
        ({"item_ids": IDS}, {}, "b has no item_ids; its items 0, 1, 2... are taken for 7, 3, 9 as in a"),
        ({"class_names": ["0", "1", "2"]}, {}, ""),
        ({"class_names": ["cat", "dog"]}, {"class_names": ["cat"]}, ""),  # rows of fewer classes
        ({"class_names": ["cat", "dog"]}, {}, "b has no class_names; its labels 0, 1, 2... are taken for cat, dog as"),
        ({}, {"class_names": ["0", "1", "10", "2"]}, "a has no class_names; .* are taken for 0, 1, 10, 2 as in b"),
        ({"target_names": ["row", "column"]}, {}, "b has no target_names; .* are taken for row, column as in a"),
        (SHORTER, SHORTER, ""),
        (SHORTER, {}, ""),
        (SHORTER, EXACT, "the images of b were prepared with .*exact.*, those of a with .*shorter"),
    ],
)
def test_rows_that_may_mean_something_else_are_told(ours, theirs, told, capsys):
    check_meaning("data.val", described("a", ours), described("b", theirs))
    printed = capsys.readouterr().out
    assert re.search(told, printed)
    assert bool(printed) == bool(told)
