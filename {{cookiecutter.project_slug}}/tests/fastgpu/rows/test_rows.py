import numpy as np
import pytest
import torch
from harness import ITEMS, is_ragged, ragged

from fastgpu.rows.field import Field
from fastgpu.rows.rows import Ragged, Rows


@pytest.fixture
def rows() -> Rows:
    return Rows({"x": torch.arange(24).reshape(6, 2, 2), "y": torch.arange(6, dtype=torch.uint8)})


def test_length_and_bytes(rows):
    assert len(rows) == 6
    assert rows.nbytes == 24 * 8 + 6


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
    rows = Rows.empty(fields, 5, torch.device("cpu"))
    rows.numpy()["x"][:] = 7
    assert rows["x"].shape == (5, 3, 2)
    assert int(rows["x"].sum()) == 7 * 30
    assert (fields["x"].row_bytes, fields["y"].row_bytes) == (6, 8)


def test_copy_overwrites_in_place(rows):
    other = Rows({name: torch.zeros_like(column) for name, column in rows.columns.items()})
    where = rows["x"].data_ptr()
    rows.copy_(other)
    assert rows["x"].data_ptr() == where
    assert not rows["x"].any()


# ---------------------------------------------------------------------------------------------- ragged columns


@pytest.fixture
def sparse() -> Rows:
    items = ragged(range(20))
    columns = Ragged(torch.from_numpy(items.values), torch.from_numpy(items.offsets), items.offsets)
    return Rows({"items": columns, "number": torch.arange(20)})


def test_ragged_rows_count_their_rows_and_bytes(sparse):
    assert len(sparse) == len(sparse["items"]) == 20
    assert sparse.nbytes == 4 * len(ragged(range(20)).values) + 4 * 21 + 8 * 20
    assert sparse.has_ragged
    assert not Rows({"number": torch.arange(3)}).has_ragged


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (0, 7), (5, 6), (5, 5), (13, 20), (18, 30)])
def test_a_slice_of_ragged_rows_is_a_view_of_their_values(sparse, start, stop):
    part = sparse.slice(start, stop)
    assert is_ragged(part["items"], part["number"].tolist())
    if len(part["items"].values):
        assert part["items"].values.untyped_storage().data_ptr() == sparse["items"].values.untyped_storage().data_ptr()


def test_a_slice_of_a_slice(sparse):
    part = sparse.slice(3, 17).slice(2, 9)
    assert part["number"].tolist() == list(range(5, 12))
    assert is_ragged(part["items"], range(5, 12))


@pytest.mark.parametrize("index", [[], [4], [0, 5, 10], [19, 3, 3, 0, 7], list(range(19, -1, -1))])
def test_taking_ragged_rows_gathers_them(sparse, index):
    taken = sparse.take(torch.tensor(index, dtype=torch.int64))
    assert taken["number"].tolist() == index
    assert is_ragged(taken["items"], index)
    room = Rows({"items": Ragged.empty(np.dtype("i4"), 30, 100, torch.device("cpu")), "number": torch.empty(30).long()})
    where = room["items"].values.data_ptr()
    for part in (sparse, sparse.slice(0, 20)):
        taken = part.take(torch.tensor(index, dtype=torch.int64), out=room)
        assert is_ragged(taken["items"], index)
        assert len(taken["items"].values) == 0 or taken["items"].values.data_ptr() == where


def test_batches_of_ragged_rows_and_the_row_of_each_value(sparse):
    batches = list(sparse.batches(6))
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]
    for batch in batches:
        assert is_ragged(batch["items"], batch["number"].tolist())
        counts = [n * 7 % 5 for n in batch["number"].tolist()]
        assert batch["items"].rows.tolist() == [row for row, count in enumerate(counts) for _ in range(count)]


def test_ragged_rows_copy_to_memory_elsewhere_that_shares_their_offsets_on_the_host(sparse):
    host = Rows.empty({"items": Field(np.dtype("i4"), (), 2.0, ITEMS)}, 30, torch.device("cpu"), values={"items": 99})
    device = host.on(torch.device("cpu"))
    source = sparse["items"]
    host["items"].host[:21] = source.host
    host["items"].values[: len(source.values)] = source.values
    device.slice(0, 20).copy_(host.slice(0, 20))
    assert is_ragged(device.slice(0, 20)["items"], range(20))
    assert is_ragged(device.slice(4, 9)["items"], range(4, 9))
    assert is_ragged(sparse["items"].to(torch.device("cpu")), range(20))


def test_a_field_says_its_bytes_and_what_it_is():
    assert Field(np.dtype("i4"), (), 2.6, 10).row_bytes == 4 + 11
    assert str(Field(np.dtype("i4"), (), 2.6, 10)) == "int32 (N, any number) below 10"
    assert str(Field(np.dtype("u1"), (3, 2))) == "uint8 (N, 3, 2)"
    assert Field(np.dtype("i4"), (), 2.6, 10).kind == Field(np.dtype("i4"), (), 3.0, 10).kind
    assert Field(np.dtype("i4"), (), 2.6, 10).kind != Field(np.dtype("i4"), (), 2.6, 11).kind
