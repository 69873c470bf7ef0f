import numpy as np

from fastgpu.convert.reader import SPLITS, draw_splits, read_splits, rows_of, split_rows
from fastgpu.storage.arrays import ArrayDataset


def test_a_split_takes_its_share_of_each_class_once():
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    splits = draw_splits(labels, (0.8, 0.2), seed=1)
    assert np.bincount(labels[splits == 0]).tolist() == [80, 8, 2]
    again, other = draw_splits(labels, (0.8, 0.2), seed=1), draw_splits(labels, (0.8, 0.2), seed=2)
    assert splits.tolist() == again.tolist() != other.tolist()
    splits = draw_splits(labels, (0.8, 0.1, 0.1), seed=1)
    assert [np.bincount(labels[splits == number]).tolist() for number in range(3)] == [[80, 8, 2], [10, 1, 1], [10, 1]]


def test_labels_that_are_not_classes_are_split_as_a_whole():
    for labels in (np.random.default_rng(0).random(100), np.zeros((100, 3), int)):
        assert np.bincount(draw_splits(labels, (0.7, 0.2, 0.1), seed=0)).tolist() == [70, 20, 10]


def test_the_parts_of_a_split_are_its_rows():
    source = ArrayDataset("x", {"x": np.arange(50), "labels": np.arange(50) % 5})
    parts = split_rows(source, (0.7, 0.3), 0)
    assert sorted(np.concatenate([rows_of(part) for part in parts.values()])) == list(range(50))
    assert {name: len(part) for name, part in parts.items()} == {"train": 35, "val": 15}
    assert split_rows(source, None, 0) == {"": source}


def test_words_name_splits():
    splits = read_splits("x.csv", ["PrivateTest", "Training", "valid", "train"])
    assert [SPLITS[number] for number in splits] == ["test", "train", "val", "train"]
