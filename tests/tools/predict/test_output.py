"""What is written of predictions."""

import io
import json

import numpy as np
import pytest
import torch

from fastgpu.predict.output import RowWriter, count_nan, open_output, to_columns, to_rows
from fastgpu.process.launch import UserError


def write(values, *, is_csv=True, top=None, every=False, ids=None, **attributes):
    """The lines for a batch of two rows."""
    file = io.StringIO()
    writer = RowWriter(file, is_csv=is_csv)
    for row in to_rows(ids or {"row": [0, 1]}, to_columns(values, attributes, top, every=every)):
        writer.write(row)
    lines = file.getvalue().splitlines()
    return lines if is_csv else [json.loads(line) for line in lines]


PROBABILITY = {"probability": torch.tensor([[0.25, 0.75], [0.9, 0.1]])}
SCORES = {"scores": torch.tensor([[0.5, -torch.inf, 2.0], [1.0, 3.0, 2.0]])}


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (PROBABILITY, {}, ["row,class,probability", "0,1,0.75", "1,0,0.899999976"]),
        (
            PROBABILITY,
            {"class_names": ["cat", "dog, small"]},
            ["row,class,class_name,probability", '0,1,"dog, small",0.75', "1,0,cat,0.899999976"],
        ),
        (
            PROBABILITY,
            {"class_names": ["cat", "dog"], "every": True},
            [
                "row,class,class_name,probability,probability_cat,probability_dog",
                "0,1,dog,0.75,0.25,0.75",
                "1,0,cat,0.899999976,0.899999976,0.100000001",
            ],
        ),
        (
            PROBABILITY,
            {"class_names": ["cat", "cat"], "every": True},  # which name no column
            [
                "row,class,probability,probability_0,probability_1",
                "0,1,0.75,0.25,0.75",
                "1,0,0.899999976,0.899999976,0.100000001",
            ],
        ),
        (
            SCORES,
            {"top": 2},
            ["row,items_0,items_1,scores_0,scores_1", "0,2,0,2.0,0.5", "1,1,2,3.0,2.0"],
        ),
        ({"class": torch.tensor([0.5, torch.nan])}, {"class_names": ["class"]}, ["row,class", "0,0.5", "1,"]),
        (
            PROBABILITY,
            {"class_names": ["cat", "=HYPERLINK(1)"], "ids": {"file": ["+1.png", "a.png"]}},  # text is no formula
            ["file,class,class_name,probability", "'+1.png,1,'=HYPERLINK(1),0.75", "a.png,0,cat,0.899999976"],
        ),
    ],
)
def test_lines_of_a_csv(values, options, expected):
    assert write(values, **options) == expected


def test_json_has_lists_and_null():
    assert write(SCORES, is_csv=False, item_ids=[7, 8, 9]) == [
        {"row": 0, "items": [2, 0, -1], "item_ids": [9, 7, None], "scores": [2.0, 0.5, None]},
        {"row": 1, "items": [1, 2, 0], "item_ids": [8, 9, 7], "scores": [3.0, 2.0, 1.0]},
    ]
    mask = {"mask": torch.zeros(2, 2, 2, dtype=torch.uint8)}
    assert write(mask, is_csv=False)[0] == {"row": 0, "mask": [[0, 0], [0, 0]]}
    with pytest.raises(UserError, match="mask is a list of lists .*; use -o FILE.jsonl"):
        write(mask)
    assert write(PROBABILITY, is_csv=False, class_names=["=1", "cat"])[1]["class_name"] == "=1"


def test_every_float32_is_written_exactly():
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(2).astype(np.float32))
    written = [line["y"] for line in write({"y": values}, is_csv=False)]
    assert torch.equal(torch.tensor(written), values)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (PROBABILITY, {"top": 3}, "--top is 3, but this model has 2 to rank; allowed is 1 to 2"),
        ({"y": torch.zeros(2)}, {"top": 1}, "ranks nothing"),
        ({"y": torch.zeros(2)}, {"every": True}, "ranks nothing"),
        ({"row": torch.zeros(2)}, {}, "two columns of the output would be called row; rename it"),
        ({"user": torch.zeros(2)}, {"ids": {"row": [0, 1], "user": [8, 9]}}, "would be called user; rename it"),
    ],
)
def test_what_cannot_be_written_is_one_line(values, options, message):
    with pytest.raises(UserError, match=message):
        write(values, **options)


def test_rows_with_nan_are_counted():
    scores = torch.tensor([[0.5, torch.nan], [1.0, torch.inf], [1.0, 2.0]])
    assert count_nan({"class": torch.tensor([0, 1, 2]), "scores": scores}) == 1
    assert count_nan({"mean": torch.tensor([1.0, torch.nan, 0.0]), "scores": scores}) == 2


def test_the_output_is_complete_or_absent(tmp_path):
    target = tmp_path / "x.csv"
    with open_output(str(target), io.StringIO()) as file:
        file.write("new")
        assert not target.exists()
    with (
        pytest.raises(UserError, match=r"x.csv was not written: .*No space left"),
        open_output(str(target), io.StringIO(), replace=True),
    ):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    assert target.read_text() == "new"


def test_nothing_of_others_is_replaced(tmp_path):
    """Temporary names are new: a link that somebody planted is not followed."""
    target = tmp_path / "x.csv"
    target.write_text("old")
    for name in (".partial-x.csv", ".x.csv.part0"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=r"x.csv exists; --force"), open_output(str(target), io.StringIO()):
        pass
    with open_output(str(tmp_path / "y.csv"), io.StringIO()) as file:
        file.write("new")
    (tmp_path / "z.csv").mkdir()
    with pytest.raises(UserError, match=r"z.csv is a folder"):
        open_output(str(tmp_path / "z.csv"), io.StringIO(), replace=True).__enter__()
    assert target.read_text() == "old"
    assert not (tmp_path / "y.csv").is_symlink()
