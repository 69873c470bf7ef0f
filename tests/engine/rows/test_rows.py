from dataclasses import replace

import numpy as np
import pytest
import torch

from fastgpu.rows.rows import Field, Rows
from support.ranks import CPU
from support.rows import ITEMS, is_ragged, numbered, numbers_of, ragged

FIELDS = {
    "number": Field(np.dtype("i8"), ()),
    "images": Field(np.dtype("u1"), (3, 2, 2), is_channels_last=True),
    "items": Field(np.dtype("i4"), (), 2.6, ITEMS),
}


def test_rows_bytes_of_a_row():
    assert [field.row_bytes for field in FIELDS.values()] == [8, 12, 4 + 11]  # an offset, and 2.6 values of 4 bytes


def test_rows_fields_that_fit_one_pool():
    items, images = FIELDS["items"], FIELDS["images"]
    jpeg = Field(np.dtype("u1"), (), 900.5, codec="jpeg")
    assert items.fits(items._replace(mean_values=7.0))
    assert images.fits(images._replace(is_channels_last=False))
    assert jpeg.fits(jpeg._replace(codec="jpeg+png"))
    assert not jpeg.fits(jpeg._replace(codec=""))
    others = [items._replace(n_items=7), items._replace(mean_values=None), items._replace(shape=(2,)), jpeg, images]
    assert not any(items.fits(other) for other in others)


def memory() -> Rows:
    return Rows.empty(FIELDS, 30, CPU, lengths={"items": np.repeat([100, 0], [1, 29])})


@pytest.fixture
def rows() -> Rows:
    """The rows 0 to 19."""
    rows = memory()
    arrays = rows.numpy()
    arrays["number"][:20] = range(20)
    arrays["images"][:20] = numbered(20, (3, 2, 2))
    items = ragged(range(20))
    arrays["items"].values[: len(items.values)] = items.values
    arrays["items"].offsets[:21] = items.offsets
    return rows.slice(0, 20)


def check_rows(rows: Rows, numbers: list[int]) -> None:
    """Fails if these are not the rows of those numbers."""
    assert len(rows) == len(rows["items"]) == len(numbers)
    assert rows["number"].tolist() == numbers
    assert not numbers or numbers_of(rows["images"]) == numbers
    assert is_ragged(rows["items"], numbers)
    assert rows["items"].rows.tolist() == np.repeat(range(len(numbers)), [n * 7 % 5 for n in numbers]).tolist()
    assert rows["images"].is_contiguous(memory_format=torch.channels_last)


def addresses(rows: Rows) -> list[int]:
    columns = [rows["number"], rows["images"], rows["items"].values]
    return [column.untyped_storage().data_ptr() for column in columns]


@pytest.mark.parametrize("index", [[], [19, 3, 3, 0, 7]])
def test_rows_taken_are_copies(rows, index):
    out = memory()
    places = torch.tensor(index, dtype=torch.int64)
    copies = [rows.take(places), rows.take(places, out=out)]
    check_rows(rows.slice(5, 9), [5, 6, 7, 8])
    for name in ("number", "images"):
        rows[name].zero_()
    rows["items"].values.zero_()
    for copy in copies:
        check_rows(copy, index)
    assert addresses(copies[1]) == addresses(out)


def test_rows_copied_to_a_device_share_host_offsets(rows):
    device = memory()
    host_offsets = np.pad(rows["items"].host_offsets, (0, 10), mode="edge")
    device.columns["items"] = replace(device["items"], host_offsets=host_offsets)
    before = addresses(device)
    device.slice(0, 20).copy_(rows)
    assert addresses(device) == before != addresses(rows)
    check_rows(device.slice(0, 20), list(range(20)))
    check_rows(device.slice(4, 9), list(range(4, 9)))
