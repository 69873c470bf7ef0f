import argparse
from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.command_line import parse_split
from fastgpu.convert.splits import draw_split, group_splits
from fastgpu.process.launch import UserError


def test_shares_are_of_train_val_and_perhaps_test():
    assert parse_split("0.75") == (0.75, 0.25)
    assert parse_split("0.8,0.1,0.1") == (0.8, 0.1, 0.1)


@pytest.mark.parametrize(
    "text", ["0", "1", "1.2", "-0.5", "half", "0.5,0.6", "0.5,0.5,0", "0.4,0.2,0.2,0.2", "nan", ""]
)
def test_shares_that_are_not_a_whole_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"should be the share to train on, such as 0\.9"):
        parse_split(text)


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


def test_words_become_splits_or_stay():
    words = ["PrivateTest", "Training", "fold-3", "valid", "train"]
    parts = group_splits(Path("x.csv"), words)
    assert {name: rows.tolist() for name, rows in parts.items()} == {
        "train": [1, 4],
        "val": [3],
        "test": [0],
        "fold-3": [2],
    }
    with pytest.raises(UserError, match=r"x.csv: the split '\.\./x' cannot be part of the name of a file"):
        group_splits(Path("x.csv"), ["train", "../x"])
    with pytest.raises(UserError, match=r"x.csv: 30 splits, such as 0, 1, 2: is it another column"):
        group_splits(Path("x.csv"), [str(n) for n in range(30)])
