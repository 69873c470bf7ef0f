from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.splits import draw_split, group_splits
from fastgpu.process.launch import UserError


def test_a_split_takes_its_share_of_each_class_once():
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    parts = draw_split(labels, (0.8, 0.2), seed=1)
    assert np.bincount(labels[parts["train"]]).tolist() == [80, 8, 2]
    assert sorted([*parts["train"], *parts["val"]]) == list(range(113))
    again, other = draw_split(labels, (0.8, 0.2), seed=1), draw_split(labels, (0.8, 0.2), seed=2)
    assert parts["train"].tolist() == again["train"].tolist() != other["train"].tolist()
    parts = draw_split(labels, (0.8, 0.1, 0.1), seed=1)
    assert {name: np.bincount(labels[rows]).tolist() for name, rows in parts.items()} == {
        "train": [80, 8, 2],
        "val": [10, 1, 1],
        "test": [10, 1],
    }


def test_labels_that_are_not_classes_are_split_as_a_whole():
    for labels in (np.random.default_rng(0).random(100), np.zeros((100, 3), int)):
        parts = draw_split(labels, (0.7, 0.2, 0.1), seed=0)
        assert [len(rows) for rows in parts.values()] == [70, 20, 10]


def test_an_empty_split_is_refused():
    with pytest.raises(UserError, match="--split leaves no rows for val: 5 rows of 5 classes"):
        draw_split(np.arange(5), (0.9, 0.1), seed=0)


def test_words_name_splits():
    parts = group_splits(Path("x.csv"), ["PrivateTest", "Training", "valid", "train"])
    assert {name: rows.tolist() for name, rows in parts.items()} == {"train": [1, 3], "val": [2], "test": [0]}
    with pytest.raises(UserError, match=r"x.csv: the splits are \.\./x, fold-3; allowed are train"):
        group_splits(Path("x.csv"), ["train", "../x", "fold-3"])
