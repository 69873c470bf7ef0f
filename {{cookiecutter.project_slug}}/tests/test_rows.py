import numpy as np
import pytest
import torch

from fastgpu.rows import Dense, Field


@pytest.fixture
def rows() -> Dense:
    return Dense({"x": torch.arange(24).reshape(6, 2, 2), "y": torch.arange(6, dtype=torch.uint8)})


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
    assert Dense.cat(batches)["y"].tolist() == list(range(6))


def test_empty_gives_memory_of_the_fields_that_numpy_shares():
    fields = {"x": Field(np.dtype("uint8"), (3, 2)), "y": Field(np.dtype("int64"), ())}
    rows = Dense.empty(fields, 5, torch.device("cpu"))
    rows.numpy()["x"][:] = 7
    assert rows["x"].shape == (5, 3, 2)
    assert int(rows["x"].sum()) == 7 * 30
    assert (fields["x"].row_bytes, fields["y"].row_bytes) == (6, 8)


def test_copy_overwrites_in_place(rows):
    other = Dense({name: torch.zeros_like(column) for name, column in rows.columns.items()})
    where = rows["x"].data_ptr()
    rows.copy_(other)
    assert rows["x"].data_ptr() == where
    assert not rows["x"].any()
