"""What is written of predictions."""

import io
import json

import numpy as np
import pytest
import torch
from predict import to_columns, write_rows

PROBABILITY = {"probability": torch.tensor([[0.25, 0.75], [0.9, 0.1]])}
SCORES = {"scores": torch.tensor([[0.5, -torch.inf, 2.0], [1.0, 3.0, 2.0]])}
CAT_DOG = {"class_names": ["cat", "dog"]}


def write(values, *, is_csv=True, top=None, every=False, **attributes):
    """The lines for two batches of the same two rows. Of the second one only its first row is written."""
    file = io.StringIO()
    columns = {"row": [0, 1]} | to_columns(values, attributes, top, every=every)
    write_rows(file, columns, [True, True], is_csv=is_csv, is_first=True)
    write_rows(file, columns, [True, False], is_csv=is_csv, is_first=False)
    *lines, again = file.getvalue().splitlines()
    assert lines[-2] == again
    return lines if is_csv else [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (PROBABILITY, {}, "row,class,probability 0,1,0.75 1,0,0.9"),
        (PROBABILITY, CAT_DOG, "row,class,class_name,probability 0,1,dog,0.75 1,0,cat,0.9"),
        (
            PROBABILITY,
            {"class_names": ["cat", "=A,1"], "every": True},  # which is no formula behind the name of the column
            'row,class,class_name,probability,probability_cat,"probability_=A,1" '
            '0,1,"\'=A,1",0.75,0.25,0.75 1,0,cat,0.9,0.9,0.1',
        ),
        (
            PROBABILITY,
            {"class_names": ["cat", "cat"], "every": True},  # which name no column
            "row,class,probability,probability_0,probability_1 0,1,0.75,0.25,0.75 1,0,0.9,0.9,0.1",
        ),
        (SCORES, {"top": 2}, "row,items_0,items_1,scores_0,scores_1 0,2,0,2.0,0.5 1,1,2,3.0,2.0"),
        ({"class": torch.tensor([0.5, torch.nan])}, {"class_names": ["class"]}, "row,class 0,0.5 1,"),
        ({"=y": torch.tensor([1, 2])}, {}, "row,'=y 0,1 1,2"),
        ({"probability": torch.full((2, 2), torch.nan)}, CAT_DOG, "row,class,class_name,probability 0,-1,, 1,-1,,"),
    ],
)
def test_lines_of_a_csv(values, options, expected):
    assert write(values, **options) == expected.split(" ")


def test_json_has_lists_and_null_and_every_float32_exactly():
    assert write(SCORES, is_csv=False, item_ids=[7, 8, 9], top=5) == [
        {"row": 0, "items": [2, 0, -1], "item_ids": [9, 7, None], "scores": [2.0, 0.5, None]},
        {"row": 1, "items": [1, 2, 0], "item_ids": [8, 9, 7], "scores": [3.0, 2.0, 1.0]},
    ]
    assert write({"mask": torch.zeros(2, 2, 2, dtype=torch.uint8)}, is_csv=False)[0]["mask"] == [[0, 0], [0, 0]]
    assert write(PROBABILITY, is_csv=False, class_names=["=1", "cat"])[1]["class_name"] == "=1"
    y = torch.from_numpy(np.random.default_rng(0).standard_normal(2).astype(np.float32))
    assert torch.equal(torch.tensor([line["y"] for line in write({"y": y}, is_csv=False)]), y)
