import numpy as np
import pytest
import torch
from harness import ITEMS, is_ragged, ragged

from fastgpu.rows.rows import Field, Ragged, RaggedArray, Rows

CPU = torch.device("cpu")


@pytest.fixture
def rows() -> Rows:
    return Rows({"x": torch.arange(24).reshape(6, 2, 2), "y": torch.arange(6, dtype=torch.uint8)})


def test_slices_are_views_and_takes_are_copies(rows):
    assert rows.slice(2, 4)["x"].data_ptr() == rows["x"][2].data_ptr()
    taken = rows.take(torch.tensor([5, 0, 5]))
    assert taken["y"].tolist() == [5, 0, 5]
    assert taken["x"][0].tolist() == rows["x"][5].tolist()
    taken["x"].zero_()
    assert rows["x"][5].tolist() == [[20, 21], [22, 23]]


def test_batches_cover_the_rows_in_order(rows):
    batches = list(rows.batches(4))
    assert [len(batch) for batch in batches] == [4, 2]
    assert [number for batch in batches for number in batch["y"].tolist()] == list(range(6))


def test_empty_gives_memory_of_the_fields_that_numpy_shares():
    fields = {"x": Field(np.dtype("uint8"), (3, 2)), "y": Field(np.dtype("int64"), ())}
    rows = Rows.empty(fields, 5, CPU)
    rows.numpy()["x"][:] = 7
    assert rows["x"].shape == (5, 3, 2)
    assert int(rows["x"].sum()) == 7 * 30


def test_copy_overwrites_in_place(rows):
    other = Rows({name: torch.zeros_like(column) for name, column in rows.columns.items()})
    address = rows["x"].data_ptr()
    rows.copy_(other)
    assert rows["x"].data_ptr() == address
    assert not rows["x"].any()


# ---------------------------------------------------------------------------------------------- ragged columns


@pytest.fixture
def sparse() -> Rows:
    items = ragged(range(20))
    columns = Ragged(torch.from_numpy(items.values), torch.from_numpy(items.offsets), items.offsets)
    return Rows({"items": columns, "number": torch.arange(20)})


def test_ragged_rows_count_their_rows(sparse):
    assert len(sparse) == len(sparse["items"]) == 20


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (0, 7), (5, 6), (5, 5), (13, 20), (18, 30)])
def test_a_slice_of_ragged_rows_is_a_view_of_their_values(sparse, start, stop):
    part = sparse.slice(start, stop)
    assert is_ragged(part["items"], part["number"].tolist())
    assert is_ragged(part.slice(1, 3)["items"], part["number"].tolist()[1:3])  # a slice of a slice
    if len(part["items"].values):
        assert part["items"].values.untyped_storage().data_ptr() == sparse["items"].values.untyped_storage().data_ptr()


@pytest.mark.parametrize("index", [[], [4], [0, 5, 10], [19, 3, 3, 0, 7], list(range(19, -1, -1))])
def test_taking_ragged_rows_gathers_them(sparse, index):
    taken = sparse.take(torch.tensor(index, dtype=torch.int64))
    assert taken["number"].tolist() == index
    assert is_ragged(taken["items"], index)
    fields = {"items": Field(np.dtype("i4"), (), 2.0), "number": Field(np.dtype("i8"), ())}
    out = Rows.empty(fields, 30, CPU, n_values={"items": 100})
    address = out["items"].values.data_ptr()
    for part in (sparse, sparse.slice(0, 20)):
        taken = part.take(torch.tensor(index, dtype=torch.int64), out=out)
        assert is_ragged(taken["items"], index)
        assert len(taken["items"].values) == 0 or taken["items"].values.data_ptr() == address


def test_batches_of_ragged_rows_and_the_row_of_each_value(sparse):
    batches = list(sparse.batches(6))
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]
    for batch in batches:
        assert is_ragged(batch["items"], batch["number"].tolist())
        counts = [n * 7 % 5 for n in batch["number"].tolist()]
        assert batch["items"].rows.tolist() == np.repeat(np.arange(len(counts)), counts).tolist()


def test_ragged_rows_are_copied_to_memory_that_shares_their_offsets_on_the_host(sparse):
    fields = {"items": Field(np.dtype("i4"), (), 2.0, ITEMS)}
    host = Rows.empty(fields, 30, CPU, n_values={"items": 99})
    device = host.to(CPU)
    source = sparse["items"]
    host["items"].host_offsets[:21] = source.host_offsets
    host["items"].values[: len(source.values)] = source.values
    device.slice(0, 20).copy_(host.slice(0, 20))
    assert is_ragged(device.slice(0, 20)["items"], range(20))
    assert is_ragged(device.slice(4, 9)["items"], range(4, 9))
    assert is_ragged(sparse["items"].to(CPU), range(20))


def test_ragged_rows_share_their_memory_with_numpy(sparse):
    array = sparse.numpy()["items"]
    assert isinstance(array, RaggedArray)
    assert len(array) == 20
    assert is_ragged(array, range(20))
    row_ids = [19, 3, 3, 0, 7]
    assert array.values[array.places(np.array(row_ids))].tolist() == ragged(row_ids).values.tolist()
    assert np.shares_memory(array.values, sparse["items"].values.numpy())
