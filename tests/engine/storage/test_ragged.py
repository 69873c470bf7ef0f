import h5py
import numpy as np
import pytest

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field
from fastgpu.storage import part
from fastgpu.storage.store import open_store
from support.rows import ITEMS, RAGGED_FIELDS, is_ragged, read_rows

LAYOUTS = {
    "one piece": {},
    "gzip": {"chunks": (64,), "compression": "gzip", "shuffle": True},
    "<u8": {"dtype": "<u8"},
    ">i4": {"dtype": ">i4"},
    "<i2": {"dtype": "<i2", "chunks": (7,)},
}


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("min_blocks", [1, 30])
def test_ragged_rows_of_any_layout(ragged_file, monkeypatch, layout, min_blocks):
    monkeypatch.setattr(part, "MIN_BLOCKS", min_blocks)
    store = open_store("data.train", ragged_file(101, **LAYOUTS[layout]), RAGGED_FIELDS)
    mean_values = sum(n * 7 % 5 for n in range(101)) / 101
    assert store.fields["items"] == Field(np.dtype("i4"), (), mean_values, ITEMS)
    assert len(store.block_rows) >= min_blocks
    rows = read_rows(store)
    assert rows["number"].tolist() == list(range(101))
    assert is_ragged(rows["items"], range(101))


@pytest.mark.parametrize("long_row_bytes", [0, 1 << 20], ids=["row by row", "by indices"])
def test_ragged_values_of_other_types_and_shapes(ragged_file, monkeypatch, long_row_bytes):
    monkeypatch.setattr("fastgpu.storage.columns.LONG_ROW_BYTES", long_row_bytes)
    monkeypatch.setattr(part, "MIN_BLOCKS", 1)  # several rows in a block
    path = ragged_file(30)
    with h5py.File(path, "a") as file:
        items = file["items/indices"][:]
        boxes = np.outer(items, np.arange(4)).astype("f4")
        file["items/data"] = items / 8
        file["boxes/indptr"] = file["items/indptr"][:]
        file.create_dataset("boxes/values", data=boxes, chunks=(7, 4))
    store = open_store("data.train", path, {"items": "items", "weights": "items/data", "boxes": "boxes"})
    described = [f"int32 (N, any number) below {ITEMS}", "float64 (N, any number)", "float32 (N, any number, 4)"]
    assert [*map(str, store.fields.values())] == described
    rows = read_rows(store)
    assert is_ragged(rows["items"], range(30))
    for name, values in (("weights", items / 8), ("boxes", boxes)):
        np.testing.assert_array_equal(rows[name].offsets, rows["items"].offsets)
        np.testing.assert_array_equal(rows[name].values, values)


@pytest.mark.usefixtures("either_cached_or_not")
def test_ragged_values_of_files_with_other_byte_orders(ragged_file):
    points = np.arange(6).reshape(3, 2)
    options = [{"dtype": ">u2"}, {"dtype": "<u2", "chunks": (7, 3, 2)}, {"dtype": ">u2", "compression": "gzip"}]
    paths = []
    for number, option in enumerate(options):
        paths.append(ragged_file(30, f"{number}.h5", number * 30))
        with h5py.File(paths[-1], "a") as file:
            file["points/indptr"] = file["items/indptr"][:]
            values = file["items/indices"][:][:, None, None] * 360 + points  # up to 64,805, more than int16 has
            file.create_dataset("points/values", data=values, **option)
    store = open_store("data.train", paths, {"items": "items", "points": "points"})
    assert str(store.fields["points"]) == "uint16 (N, any number, 3, 2)"
    rows = read_rows(store)
    assert is_ragged(rows["items"], range(90))
    assert rows["points"].values.dtype == np.dtype("u2")
    np.testing.assert_array_equal(rows["points"].offsets, rows["items"].offsets)
    np.testing.assert_array_equal(rows["points"].values, rows["items"].values[:, None, None] * 360 + points)


def test_ragged_values_not_read_are_reported(ragged_file, capsys):
    path = ragged_file(40)
    for value, fields, is_told in (
        (1, RAGGED_FIELDS, False),
        (2, RAGGED_FIELDS, True),
        (2, RAGGED_FIELDS | {"data": "items/data"}, False),
    ):
        with h5py.File(path, "a") as file:
            data = file.require_dataset("items/data", file["items/indices"].shape, "f8")
            data[:] = 1
            data[-1] = value
        open_store("data.train", path, fields)
        printed = capsys.readouterr().out
        assert ("items/data has values other than 1, which are not read" in printed) == bool(printed) == is_told


def test_ragged_rows_without_values(ragged_file):
    path = ragged_file(20)
    with h5py.File(path, "a") as file:
        file["items/indptr"][:] = 0
        del file["items/indices"]
        file["items/indices"] = np.zeros(0, np.int32)
    rows = read_rows(open_store("data.train", path, RAGGED_FIELDS))
    assert rows["number"].tolist() == list(range(20))
    assert rows["items"].offsets.tolist() == [0] * 21


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("wrong", [ITEMS, -1])
@pytest.mark.parametrize("layout", ["one piece", "gzip"])
def test_ragged_item_out_of_range_stops_the_run(ragged_file, wrong, layout):
    path = ragged_file(50, **LAYOUTS[layout])
    with h5py.File(path, "a") as file:
        file["items/indices"][17] = wrong
    store = open_store("data.train", path, RAGGED_FIELDS)
    with pytest.raises(UserError, match=f"ragged.h5: items: item numbers .*{wrong}.* are not in 0 to 999"):
        read_rows(store)
