import h5py
import numpy as np
import pytest
from harness import ITEMS, is_ragged
from scattered import read_scattered

from fastgpu.process.launch import RankError
from fastgpu.rows.rows import Field
from fastgpu.storage import store as store_module
from fastgpu.storage.store import open_store

FIELDS = {"items": "items", "number": "number"}


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (7,)},
        {"chunks": (64,), "compression": "gzip", "shuffle": True},
        {"dtype": "<u8"},
        {"dtype": ">i4"},
        {"dtype": "<i2", "chunks": (7,)},
    ],
    ids=["one piece", "chunks", "gzip", "<u8", ">i4", "<i2"],
)
@pytest.mark.parametrize("min_blocks", [1, 30])
def test_ragged_rows_are_read_from_any_layout_as_int32(write_ragged, monkeypatch, options, min_blocks):
    monkeypatch.setattr(store_module, "MIN_BLOCKS", min_blocks)
    store = open_store("data.train", write_ragged(101, **options), FIELDS)
    mean_values = sum(n * 7 % 5 for n in range(101)) / 101
    assert store.fields["items"] == Field(np.dtype("i4"), (), mean_values, ITEMS)
    assert len(store.block_rows) >= min_blocks
    rows = read_scattered(store)
    assert rows["number"].tolist() == list(range(101))
    assert is_ragged(rows["items"], range(101))


def test_values_of_a_matrix_that_are_not_read_are_told(write_ragged, capsys):
    path = write_ragged(40)
    for value, fields, told in (
        (1, FIELDS, ""),
        (2, FIELDS, "items/data has values other than 1, which are not read"),
        (2, FIELDS | {"weights": "items/data"}, ""),
    ):
        with h5py.File(path, "a") as file:
            data = file.require_dataset("items/data", file["items/indices"].shape, "f8")
            data[:] = 1
            data[-1] = value
        open_store("data.train", path, fields)
        printed = capsys.readouterr().out
        assert told in printed
        assert bool(printed) == bool(told)


def test_values_that_belong_to_the_items_and_other_ragged_values(write_ragged):
    path = write_ragged(30)
    with h5py.File(path, "a") as file:
        file["items/data"] = file["items/indices"][:] / 8
        file["words/indptr"] = file["items/indptr"][:]
        file["words/values"] = file["items/indices"][:].astype("u2")
    store = open_store("data.train", path, {"items": "items", "weights": "items/data", "words": "words"})
    assert [field.n_items for field in store.fields.values()] == [ITEMS, None, None]
    assert [str(field.dtype) for field in store.fields.values()] == ["int32", "float64", "uint16"]
    rows = read_scattered(store)
    assert is_ragged(rows["items"], range(30))
    np.testing.assert_array_equal(rows["weights"].offsets, rows["items"].offsets)
    np.testing.assert_array_equal(rows["weights"].values, rows["items"].values / 8)
    np.testing.assert_array_equal(rows["words"].values, rows["items"].values)


def test_rows_without_any_value_are_rows(write_ragged):
    path = write_ragged(20)
    with h5py.File(path, "a") as file:
        file["items/indptr"][:] = 0
        del file["items/indices"]
        file["items/indices"] = np.zeros(0, np.int32)
    rows = read_scattered(open_store("data.train", path, FIELDS))
    assert rows["number"].tolist() == list(range(20))
    assert rows["items"].offsets.tolist() == [0] * 21


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("wrong", [ITEMS, -1])
@pytest.mark.parametrize("options", [{}, {"chunks": (16,), "compression": "gzip"}], ids=["plain", "gzip"])
def test_an_item_number_out_of_range_stops_the_run_before_it_reaches_the_device(write_ragged, wrong, options):
    path = write_ragged(50, **options)
    with h5py.File(path, "a") as file:
        file["items/indices"][17] = wrong
    store = open_store("data.train", path, FIELDS)
    with pytest.raises(RankError, match=f"ragged.h5: items: item numbers .*{wrong}.* are not in 0 to 999"):
        read_scattered(store)


@pytest.mark.parametrize("long_row_bytes", [0, 1 << 20], ids=["row by row", "by indices"])
def test_ragged_values_may_have_a_shape(tmp_path, monkeypatch, long_row_bytes):
    monkeypatch.setattr("fastgpu.storage.columns.LONG_ROW_BYTES", long_row_bytes)
    monkeypatch.setattr(store_module, "MIN_BLOCKS", 1)  # several rows in a block
    boxes = np.arange(200 * 4, dtype=np.float32).reshape(-1, 4)
    lengths = np.arange(40) % 11
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["boxes/indptr"] = np.cumsum([0, *lengths])
        file.create_dataset("boxes/values", data=boxes[: lengths.sum()], chunks=(7, 4))
    store = open_store("data.train", str(tmp_path / "x.h5"), {"boxes": "boxes"})
    assert str(store.fields["boxes"]) == "float32 (N, any number, 4)"
    rows = read_scattered(store)["boxes"]
    np.testing.assert_array_equal(rows.values, boxes[: lengths.sum()])
    np.testing.assert_array_equal(np.diff(rows.offsets), lengths)
