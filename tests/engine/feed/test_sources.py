import random
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch.utils.data import Dataset as TorchDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.sources import open_rows, open_splits
from fastgpu.process.config import Config, Data, LoaderConfig
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Subset
from support.images import photo, write_encoded
from support.rows import DENSE_FIELDS, numbered, ragged
from support.windows import write_ragged_series


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Paths in configs and messages are names of files in tmp_path."""
    monkeypatch.chdir(tmp_path)


def open_both(
    train: str | list[str] | dict[str, float] = "a.h5",
    val: str | list[str] | dict[str, str] = "a.h5",
    fields: dict[str, str] | None = None,
    **options,
) -> tuple[Dataset, Dataset]:
    data = Data(train=train, val=val, fields=fields or DENSE_FIELDS, **options)
    rows, sets = open_splits(data, LoaderConfig(num_workers=0), 0)
    return rows, next(iter(sets.values()))


def write_labels(name: str, labels: np.ndarray, **attributes: Any) -> None:
    with h5py.File(name, "w") as file:
        file["images"] = numbered(len(labels))
        file["labels"] = labels
        file.attrs.update(attributes)


def test_sources_weights_make_groups(dense_file):
    for name, rows in (("p-0.h5", 20), ("p-1.h5", 30), ("q.h5", 10)):
        dense_file(rows, name=name)
    train, _ = open_both({"p-*.h5": 1, "q.h5": 2.5}, "q.h5")
    names, weights, groups = train.selection.groups
    assert (names, weights) == (("p-*.h5", "q.h5"), (1, 2.5))
    assert groups.tolist() == [0] * 50 + [1] * 10
    train, val = open_both({"p-*.h5": 1, "q.h5": 2.5}, "50%")  # both sources give rows for validation
    groups = train.selection.groups.groups
    assert np.bincount(groups[groups >= 0]).tolist() == pytest.approx([25, 5], abs=8)
    assert (len(train), len(groups), isinstance(val.selection, Subset)) == (30, 60, True)
    assert set(groups[val.selection.rows()]) == {-1}


def test_sources_classes_are_groups_of_equal_weight(dense_file):
    dense_file(90, name="a.h5", classes=3)
    train, val = open_both(balance="classes")
    names, weights, groups = train.selection.groups
    assert (names, weights) == (("class 0", "class 1", "class 2"), (1, 1, 1))
    assert groups.tolist() == [n % 3 for n in range(90)]
    assert val.selection is None


def test_sources_classes_of_a_table_of_scalars():
    """Each field is as large as any other."""
    with h5py.File("a.h5", "w") as file:
        file["x"], file["labels"] = np.zeros(90), np.arange(90) % 3
    train, _ = open_both(fields={"labels": "labels", "x": "x"}, balance="classes")
    assert train.selection.groups.groups.tolist() == train.column("labels").tolist() == [n % 3 for n in range(90)]


@pytest.mark.parametrize("named", [["a.h5", "b.h5"], {"a.h5": 1, "b.h5": 3}])
def test_sources_rows_by_index(ragged_file, named):
    for name, first in (("a.h5", 0), ("b.h5", 100)):
        ragged_file(90, name, first)
    for part in open_both(named, "12.5 %", {"number": "number", "items": "items"}):
        numbers = part.column("number")
        np.testing.assert_array_equal(numbers, part.stored_column("number")[part.selection.rows()])
        assert len(np.unique(numbers)) == len(part) == len(part.lengths["items"])
        for index in (0, 5, -1, np.int64(7)):
            row = part[index]
            assert row["number"] == numbers[index]
            np.testing.assert_array_equal(row["items"], ragged([numbers[index]]).values)
        some = part[2:9:3]
        np.testing.assert_array_equal(some["number"], numbers[2:9:3])
        np.testing.assert_array_equal(some["items"].values, ragged(numbers[2:9:3]).values)
        assert len(part[5:5]) == 0
        assert len([*part]) == len(part)  # the row after the last one is an IndexError
        assert f"{len(part):,} rows (number: int64 (N), items: int32 (N, any number)" in repr(part)


def test_sources_items_of_a_dataset_by_index():
    for part in open_both("a", "20%", {"x": "x"}, dataset="test_sources:Ten"):
        assert [part[0]["x"], part[-1]["x"]] == part.column("x")[[0, -1]].tolist()
        assert part[1:3]["x"].tolist() == part.column("x")[1:3].tolist()


def test_sources_column_that_is_not_in_memory():
    with pytest.raises(UserError, match="x is not in memory.*a torch Dataset has to have .* `x` or `targets`"):
        ItemDataset("mine", range(10), {"x": "x"}).column("x")


def test_sources_error_is_a_value(dense_file):
    dense_file(9, name="a.h5")
    for train, message in (("a.h5", "None"), ("b.h5", "data.train: b.h5 does not exist")):
        splits = open_rows(Config(workload="minimal", data=Data(train=train, val="a.h5", fields=DENSE_FIELDS)))
        assert str(splits.error).startswith(message)


def test_messages_of_sources(compare_messages, dense_file):
    dense_file(90, name="rows.h5")
    dense_file(1, name="one.h5")
    write_labels("floats.h5", np.arange(5) / 2)
    write_labels("a.h5", np.arange(5), class_names=["cat", "dog", "cow"])
    write_labels("b.h5", np.arange(5), class_names=["cow", "cat", "dog"])
    write_labels("few.h5", np.arange(5), class_names=["cat", "dog"])
    open_both("a.h5", "few.h5")  # a class may have no rows for validation
    Path("photos").mkdir()
    write_ragged_series(Path("short.h5"), [3, 40, 7])
    write_ragged_series(Path("ragged.h5"), [30, 40, 50])
    with h5py.File("ragged.h5", "r+") as file:
        file["y/values"], file["y/indptr"], file["z"] = np.arange(120), [0, 20, 80, 120], np.arange(7)
    write_encoded(Path("photos.h5"), [photo(1)] * 20)
    balanced = partial(open_both, val="rows.h5", balance="classes")
    window = partial(open_both, "rows.h5", "rows.h5", window=16)
    ragged_windows = partial(open_both, "ragged.h5", "ragged.h5", window=8)
    compare_messages(
        {
            "fields of a share": lambda: open_both("rows.h5", "10%", val_fields=DENSE_FIELDS),
            "a share of no rows": lambda: open_both("rows.h5", "0%"),
            "a share that is none": lambda: open_both("rows.h5", "1..5%"),
            "a source that is held out as a whole": lambda: open_both({"rows.h5": 1, "one.h5": 1}, "90%"),
            "balance without labels": lambda: balanced("rows.h5", fields={"images": "images"}),
            "balance of fractions": lambda: balanced("floats.h5"),
            "balance and weights": lambda: balanced({"rows.h5": 1}),
            "weights of a Dataset": lambda: open_both({"rows.h5": 1}, dataset="torch.utils.data:Dataset"),
            "classes in another order": lambda: open_both(["a.h5", "b.h5"]),
            "classes in another order for validation": lambda: open_both("a.h5", "b.h5"),
            "classes in another order in one of several sets": lambda: open_both(
                "a.h5", {"few": "few.h5", "b": "b.h5"}
            ),
            "one of several sets is missing": lambda: open_both("a.h5", {"few": "few.h5", "b": "nowhere.h5"}),
            "one of several sets is a share of no rows": lambda: open_both("a.h5", {"few": "few.h5", "b": "0%"}),
            "a folder": lambda: open_both("photos"),
            "a stride without a window": lambda: open_both("rows.h5", "rows.h5", stride=4),
            "windows of a Dataset": lambda: open_both("a", "b", {"x": "x"}, dataset="test_sources:Ten", window=4),
            "windows of encoded images": lambda: open_both("photos.h5", "photos.h5", {"images": "images"}, window=4),
            "windows of equal classes": lambda: window(balance="classes"),
            "windows longer than all recordings": lambda: open_both("short.h5", "short.h5", {"x": "x"}, window=41),
            "windows longer than those of validation": lambda: open_both("rows.h5", "one.h5", window=16),
            "windows of a share that has no step": lambda: open_both("rows.h5", "0%", window=16),
            "windows of a share that is too short": lambda: open_both("rows.h5", "10%", window=16),
            "windows beside a share that is too large": lambda: open_both("rows.h5", "90%", window=16),
            "windows of a source that is held out as a whole": lambda: open_both(
                {"rows.h5": 1, "one.h5": 1}, "90%", window=1
            ),
            "windows of a source that is too short": lambda: open_both(
                {"rows.h5": 1, "one.h5": 1}, "rows.h5", window=2
            ),
            "windows of recordings that begin elsewhere": lambda: ragged_windows({"x": "x", "y": "y"}),
            "windows of fields of other lengths": lambda: ragged_windows({"x": "x", "z": "z"}),
        }
    )


class Drawn(TorchDataset):
    """Ten random numbers."""

    def __init__(self, path: str):
        pass

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> float:
        return random.random()


def test_sources_that_draw_do_so_in_validation(capsys):
    """If validation rows are a share of the training rows; a Dataset of their own may know it."""
    words = {"fields": {"x": "x"}, "dataset": "test_sources:Drawn"}
    open_both("a", "b", **words)
    assert "warning" not in capsys.readouterr().out
    open_both("a", "20%", **words)
    shown = capsys.readouterr().out
    assert "warning: data.val is 20%, but the items of Drawn('a') of data.train draw random numbers (random), " in shown


class Ten(TorchDataset):
    """A Dataset of ten numbers, which it has as an attribute, too."""

    def __init__(self, path: str):
        self.targets = np.arange(10)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> int:
        return row


@pytest.mark.parametrize(("val", "n_workers"), [("b", 4), ("20%", 2), ({"b": "b", "c": "c"}, 4)])
def test_sources_dataset_is_opened_with_its_workers(val, n_workers):
    data = Data(train="a", val=val, fields={"x": "x"}, dataset="test_sources:Ten")
    before = {*active_children()}  # of other tests
    train, sets = open_splits(data, LoaderConfig(num_workers=2), 0)
    assert len({*active_children()} - before) == n_workers
    for part in (train, *sets.values()):
        assert part.read_rows(np.array([7, 3]), 0, 0, np.zeros(2, int))["x"].tolist() == [7, 3]
    for part in (train, *sets.values()):
        part.close()
        assert part.n_workers == 0
    assert not {*active_children()} - before


@pytest.mark.parametrize(
    ("train", "val", "shared", "options"),
    [
        ("p-*.h5", "p-val.h5", "p-val.h5", {}),
        ({"p-train.h5": 2, "p-val.h5": 1}, "p-val.h5", "p-val.h5", {}),
        # the rest of a copy is trained on
        (["groups.h5::train", "./groups.h5::/train"], "10%", "groups.h5::train", {}),
        ("link.h5", "q.h5", "link.h5", {}),
        ("a", "a", "a", {"dataset": "test_sources:Ten"}),
        ("q.h5", {"val": "p-val.h5", "night": "q.h5"}, "q.h5", {}),
        ("groups.h5::/train", "groups.h5::/val", "", {}),
        ("p-*.h5", "10%", "", {}),
        ("q.h5", "q.h5", "", {"val_fields": {"images": "labels"}}),  # other fields of the same rows
        ("a", "b", "", {"dataset": "test_sources:Ten"}),
    ],
)
def test_sources_warn_of_shared_validation_rows(dense_file, capsys, train, val, shared, options):
    for name in ("p-train.h5", "p-val.h5", "q.h5"):
        dense_file(20, name=name)
    Path("link.h5").symlink_to("q.h5")
    with h5py.File("groups.h5", "w") as file:
        file["train/images"] = file["val/images"] = np.arange(20)
    open_both(train, val, {"images": "images"}, **options)
    key = f"data.val.night ({val['night']})" if isinstance(val, dict) else f"data.val ({val})"
    told = f"warning: {key} has rows of {shared} that are trained on, too"
    printed = capsys.readouterr().out
    assert (told in printed) == ("trained on" in printed) == bool(shared)
