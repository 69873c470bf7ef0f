import numpy as np
import pytest

from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.meaning import check_meaning


def source(name, **attributes):
    return ArrayDataset(name, {"x": np.zeros((2, 3), np.uint8)}, attributes)


def test_items_have_the_same_numbers_in_all_sources(capsys):
    ids = np.array([7, 3, 9])
    check_meaning("data.val", source("a", item_ids=ids), source("b", item_ids=[7, 3, 9]))
    check_meaning("data.val", source("a", item_ids=[0, 1, 2]), source("b"))  # a matrix with all its columns
    assert not capsys.readouterr().out
    with pytest.raises(
        UserError, match="number 0 of the items is 3 in b and 7 in a .attribute item_ids.; convert them together"
    ):
        check_meaning("data.val", source("a", item_ids=ids), source("b", item_ids=[3, 7, 9]))
    check_meaning("data.val", source("a", item_ids=ids), source("b"))
    assert "b has no item_ids; its items 0, 1, 2... are taken for 7, 3, 9 as in a" in capsys.readouterr().out


def test_images_that_were_prepared_in_two_ways_are_told(capsys):
    pixels, others = (f'{{"size": [8, 8], "resize": "{resize}"}}' for resize in ("shorter", "exact"))
    check_meaning("data.val", source("a", preprocessing=pixels), source("b", preprocessing=pixels), source("c"))
    assert not capsys.readouterr().out
    check_meaning("data.val", source("a", preprocessing=pixels), source("b", preprocessing=others))
    assert f"the images of b were prepared with {others}, those of a with {pixels}" in capsys.readouterr().out


def test_numbers_to_predict_have_one_order():
    check_meaning("data.val", source("a", target_names=["row", "column"]), source("b"))
    with pytest.raises(UserError, match="number 0 of the columns of labels is column in b and row in a"):
        check_meaning(
            "data.val", source("a", target_names=["row", "column"]), source("b", target_names=["column", "row"])
        )
