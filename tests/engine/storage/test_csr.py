import h5py
import numpy as np
import pytest
from harness import ITEMS, is_ragged
from scattered import read_scattered

from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.rows import Field
from fastgpu.storage import store as store_module
from fastgpu.storage.store import open_store

FIELDS = {"items": "items", "number": "number"}


def rewrite(path: str, name: str, values: np.ndarray) -> None:
    """Replace a dataset of a file."""
    with h5py.File(path, "a") as file:
        del file[name]
        file[name] = values


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (7,)}, {"chunks": (64,), "compression": "gzip", "shuffle": True}],
    ids=["one piece", "chunks", "gzip"],
)
@pytest.mark.parametrize("min_blocks", [1, 30])
def test_ragged_rows_are_read_from_any_layout(write_ragged, monkeypatch, options, min_blocks):
    monkeypatch.setattr(store_module, "MIN_BLOCKS", min_blocks)
    store = open_store("data.train", write_ragged(101, **options), FIELDS)
    mean_values = sum(n * 7 % 5 for n in range(101)) / 101
    assert store.fields["items"] == Field(np.dtype("i4"), (), mean_values, ITEMS)
    assert len(store.block_rows) >= min_blocks
    rows = read_scattered(store)
    assert rows["number"].tolist() == list(range(101))
    assert is_ragged(rows["items"], range(101))


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("dtype", ["<u8", ">i4", "<i2"])
def test_item_numbers_of_any_integer_type_become_int32(write_ragged, dtype):
    path = write_ragged(101)
    with h5py.File(path) as file:
        values = file["items/indices"][:]
    rewrite(path, "items/indices", values.astype(dtype))
    store = open_store("data.train", path, FIELDS)
    assert store.fields["items"].dtype == np.int32
    assert is_ragged(read_scattered(store)["items"], range(101))


def test_values_of_a_matrix_that_are_not_read_are_told(write_ragged, capsys):
    path = write_ragged(40)
    with h5py.File(path) as file:
        n_values = len(file["items/indices"])
    with h5py.File(path, "a") as file:
        file["items/data"] = np.ones(n_values)
    open_store("data.train", path, FIELDS)
    assert capsys.readouterr().out == ""
    rewrite(path, "items/data", np.arange(n_values) % 2)
    open_store("data.train", path, FIELDS)
    assert "items/data has values other than 1, which are not read" in capsys.readouterr().out
    open_store("data.train", path, {**FIELDS, "weights": "items/data"})
    assert capsys.readouterr().out == ""


def test_shards_of_ragged_rows_are_one_after_the_other(write_ragged):
    paths = [write_ragged(n, f"{n}.h5", start) for n, start in ((40, 0), (25, 40), (3, 65))]
    rows = read_scattered(open_store("data.train", paths, FIELDS))
    assert rows["number"].tolist() == list(range(68))
    assert is_ragged(rows["items"], range(68))
    other = write_ragged(5, "other.h5", items=99)
    message = r"other.h5 holds items as int32 \(N, any number\) below 99, .*; files must agree"
    with pytest.raises(UserError, match=message):
        open_store("data.train", [*paths, other], FIELDS)


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
    rewrite(path, "items/indptr", np.zeros(21, np.int32))
    rewrite(path, "items/indices", np.zeros(0, np.int32))
    rows = read_scattered(open_store("data.train", path, FIELDS))
    assert rows["number"].tolist() == list(range(20))
    assert rows["items"].offsets.tolist() == [0] * 21


DAMAGED = "items is damaged: its indptr should rise from 0 to the 40 values"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoding-type", "csc_matrix", "should be a CSR matrix.*is a csc_matrix"),
        ("shape", None, r"should be a CSR matrix with the attribute shape, \(rows, items\)"),
        ("shape", (20, 0), "should be a CSR matrix"),
        ("shape", (20,), "should be a CSR matrix"),
        ("indptr", np.arange(21)[::-1], DAMAGED),
        ("indptr", np.array([*range(20), 3]), DAMAGED),  # falls at the end
        ("indptr", np.arange(1, 22), DAMAGED),
        ("indptr", np.zeros((21, 1), int), DAMAGED),
        ("indptr", np.zeros(0, int), DAMAGED),
        ("indices", None, "has no dataset items/indices; it has items, number"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused(write_ragged, name, value, message):
    path = write_ragged(20)
    with h5py.File(path, "a") as file:
        holder = file["items"] if name.startswith("ind") else file["items"].attrs
        del holder[name]
        if value is not None:
            holder[name] = value
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, FIELDS)


def test_a_row_with_more_values_than_fit_the_device_is_refused(write_ragged, monkeypatch):
    monkeypatch.setattr("fastgpu.storage.store.MAX_VALUES", 3)
    with pytest.raises(UserError, match="items is damaged: its indptr should rise"):
        open_store("data.train", write_ragged(20, items=3), FIELDS)


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
