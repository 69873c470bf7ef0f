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
    assert "b has no item_ids; its items 0, 1, 2... would be 7, 3, 9 as in a, in this order" in capsys.readouterr().out


def test_pixels_and_encoded_images_may_show_the_same(capsys):
    resized = '{"size": [8, 8], "resize": "shorter", "crop": null%s}'
    sources = [source(name, preprocessing=resized % more) for name, more in (("a", ""), ("b", ', "centre_share": 1.0'))]
    check_meaning("data.val", *sources)
    assert not capsys.readouterr().out
    check_meaning("data.val", sources[0], source("c", preprocessing=resized % ', "centre_share": 0.875'))
    assert "'centre_share': 0.875}, those of a with" in capsys.readouterr().out


def test_numbers_to_predict_have_one_order():
    check_meaning("data.val", source("a", target_names=["row", "column"]), source("b"))
    with pytest.raises(UserError, match="number 0 of the columns of labels is column in b and row in a"):
        check_meaning(
            "data.val", source("a", target_names=["row", "column"]), source("b", target_names=["column", "row"])
        )
