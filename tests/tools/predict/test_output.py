import io
import json

import numpy as np
import pytest
import torch

from fastgpu.predict.inputs import Inputs
from fastgpu.predict.output import PredictionWriter, all_of, open_output
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import ArrayDataset

ROWS = ArrayDataset("made up", {"x": np.zeros((9, 2), np.float32)})


def write(values, *, is_csv=True, inputs=None, ids=None, **attributes):
    file = io.StringIO()
    writer = PredictionWriter(file, inputs or Inputs(ROWS), attributes, is_csv=is_csv)
    writer.write([0, 1], ids or {}, values)
    lines = file.getvalue().splitlines()
    return lines if is_csv else [json.loads(line) for line in lines]


def test_numbers_have_their_names_beside_them():
    values = {"class": torch.tensor([1, 0]), "probability": torch.tensor([0.75, 0.1])}
    lines = write(values, class_names=["cat", "dog, small"])
    assert lines == ["row,class,class_name,probability", '0,1,"dog, small",0.75', "1,0,cat,0.100000001"]
    assert write(values) == ["row,class,probability", "0,1,0.75", "1,0,0.100000001"]
    assert write({"items": torch.tensor([[2, -1], [0, 1]])}, is_csv=False, item_ids=[7, 8, 9]) == [
        {"row": 0, "items": [2, -1], "item_ids": [9, None]},
        {"row": 1, "items": [0, 1], "item_ids": [7, 8]},
    ]


def test_several_values_are_a_list_in_json_and_columns_in_csv():
    values = {"scores": torch.tensor([[0.5, float("inf")], [float("nan"), -2.0]])}
    assert write(values) == ["row,scores_0,scores_1", "0,0.5,", "1,,-2.0"]
    assert [line["scores"] for line in write(values, is_csv=False)] == [[0.5, None], [None, -2.0]]


def test_rows_for_which_the_model_gives_nan_are_counted():
    nan = float("nan")
    writer = PredictionWriter(io.StringIO(), Inputs(ROWS), {}, is_csv=False)
    writer.write([0, 1], {}, {"class": torch.tensor([0, 1]), "scores": torch.tensor([[0.5, nan], [1.0, float("inf")]])})
    writer.write(
        [2, 3], {"id": torch.tensor([nan, 1])}, {"class": torch.tensor([0, 1]), "mean": torch.tensor([nan, nan])}
    )
    assert writer.n_nan == 3


def test_a_mask_is_a_list_of_lists_in_json():
    values = {"mask": torch.zeros(2, 2, 2, dtype=torch.uint8)}
    assert write(values, is_csv=False)[0] == {"row": 0, "mask": [[0, 0], [0, 0]]}


def test_every_float32_is_written_exactly():
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(2).astype(np.float32))
    written = [line["y"] for line in write({"y": values}, is_csv=False)]
    assert torch.equal(torch.tensor(written), values)


def test_rows_that_could_not_be_read_say_why():
    files = [f"{number}.png" for number in range(9)]
    values = {"y": torch.tensor([1.0, 2.0])}
    assert write(values, inputs=Inputs(ROWS, files, {1: "is broken"})) == [
        "file,y,error",
        "0.png,1.0,",
        "1.png,,is broken",
    ]
    assert write(values, inputs=Inputs(ROWS, files, {0: "is broken"}), is_csv=False) == [
        {"file": "0.png", "error": "is broken"},
        {"file": "1.png", "y": 2.0},
    ]


def test_two_columns_of_one_name_are_refused():
    half = torch.tensor([0.5, 0.25])
    files = [f"{number}.png" for number in range(9)]
    for values, ids, inputs, name in (
        ({"row": half}, None, None, "row"),
        ({"file": half}, None, Inputs(ROWS, files), "file"),
        ({"error": half}, None, Inputs(ROWS, files, {1: "is broken"}), "error"),
        ({"user": half}, {"user": half}, None, "user"),
    ):
        with pytest.raises(UserError, match=f"two columns of the output would be called {name}; rename it"):
            write(values, inputs=inputs, ids=ids)


def test_only_whole_numbers_have_names(capsys):
    """An attribute may be called class: its probability is no number of a class."""
    assert write({"class": torch.tensor([0.5, 0.25])}, class_names=["class"]) == ["row,class", "0,0.5", "1,0.25"]
    assert not capsys.readouterr().out


def test_the_output_is_complete_or_absent(tmp_path):
    target = tmp_path / "x.csv"
    with open_output(str(target), io.StringIO()) as file:
        file.write("new")
        assert not target.exists()
    assert target.read_text() == "new"
    with (
        pytest.raises(UserError, match=r"x.csv was not written: .*No space left"),
        open_output(str(target), io.StringIO(), replace=True),
    ):
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    assert target.read_text() == "new"


def test_nothing_is_replaced_without_being_asked(tmp_path):
    target = tmp_path / "x.csv"
    target.write_text("old")
    with pytest.raises(UserError, match=r"x.csv exists; --force"), open_output(str(target), io.StringIO()):
        pass
    folder = tmp_path / "y.csv"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match=r"y.csv is a folder"), open_output(str(folder), io.StringIO(), replace=True):
        pass
    assert (folder / "inside").is_dir()
    assert target.read_text() == "old"


def test_links_of_temporary_names_are_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("old")
    for name in (".partial-x.csv", ".x.csv.part0"):
        (tmp_path / name).symlink_to(other)
    with open_output(str(tmp_path / "x.csv"), io.StringIO()) as file:
        file.write("new")
    assert other.read_text() == "old"
    assert not (tmp_path / "x.csv").is_symlink()


def test_text_is_no_formula_in_a_csv():
    values = {"class": torch.tensor([0, 1])}
    lines = write(values, class_names=["=HYPERLINK(1)", "cat"])
    assert lines[1:] == ["0,0,'=HYPERLINK(1)", "1,1,cat"]
    assert write(values, is_csv=False, class_names=["=1", "cat"])[0]["class_name"] == "=1"


def test_the_probabilities_of_all_classes_have_their_names():
    values = {"probability": torch.tensor([[0.25, 0.75], [1.0, 0.0]])}
    columns = all_of(values, {"class_names": ["cat", "dog"]})
    assert {name: column.tolist() for name, column in columns.items()} == {
        "probability_cat": [0.25, 1.0],
        "probability_dog": [0.75, 0.0],
    }
    assert list(all_of(values, {})) == ["probability_0", "probability_1"]
    with pytest.raises(UserError, match="ranks nothing"):
        all_of({"prediction": torch.zeros(2)}, {})
