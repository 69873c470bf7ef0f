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
    with pytest.raises(UserError, match="data.val: b numbers its items in another way than a"):
        check_meaning("data.val", source("a", item_ids=ids), source("b", item_ids=[3, 7, 9]))
    check_meaning("data.val", source("a", item_ids=ids), source("b"))
    assert "b has no item_ids, so its item numbers are taken for places in those of a" in capsys.readouterr().out


def test_pixels_and_encoded_images_may_show_the_same(capsys):
    resized = '{"size": [8, 8], "resize": "shorter", "crop": null%s}'
    sources = [source(name, preprocessing=resized % more) for name, more in (("a", ""), ("b", ', "centre_share": 1.0'))]
    check_meaning("data.val", *sources)
    assert not capsys.readouterr().out
    check_meaning("data.val", sources[0], source("c", preprocessing=resized % ', "centre_share": 0.875'))
    assert "'centre_share': 0.875}, those of a with" in capsys.readouterr().out


def test_numbers_to_predict_have_one_order():
    check_meaning("data.val", source("a", target_names=["row", "column"]), source("b"))
    with pytest.raises(UserError, match="the columns of labels are column, row in b and row, column in a"):
        check_meaning(
            "data.val", source("a", target_names=["row", "column"]), source("b", target_names=["column", "row"])
        )
