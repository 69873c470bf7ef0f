import numpy as np
import pytest
from harness import PLAN, is_ragged, numbered, numbers_of, ragged, reads_of
from scattered import read_scattered

from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset


def test_blocks_are_rows_that_lie_together():
    columns = {"images": numbered(1000), "labels": np.arange(1000)}
    source = ArrayDataset("x", columns, block_rows=np.array([600, 400], np.int32))
    out = {"images": np.zeros((500, 1, 4, 2), np.uint8), "labels": np.zeros(500, int)}
    places = np.random.default_rng(0).permutation(500)
    source.read(PLAN, reads_of((550, places[:50]), (600, places[50:450]), (0, places[450:])), out)
    expected = [*range(550, 1000), *range(50)]
    assert numbers_of(out["images"][places]) == expected
    assert out["labels"][places].tolist() == expected
    assert ArrayDataset("x", {"a": np.zeros((100, 1 << 16))}).block_rows.tolist() == [4] * 25  # of about 2 MiB


@pytest.mark.parametrize("block_rows", [None, np.full(10, 3, np.int32)])
def test_columns_of_all_rows(block_rows):
    columns = {"number": np.arange(30, dtype=">i4"), "items": ragged(range(30))}
    fields = {"items": Field(np.dtype("i4"), (), n_items=1000)}
    source = ArrayDataset("x", columns, block_rows=block_rows, fields=fields)
    assert len(source) == 30
    assert source.fields["number"].dtype == np.dtype("=i4")
    assert source.fields["items"].n_items == 1000
    assert source.column("number").tolist() == list(range(30))
    assert source.column("items") is None
    rows = read_scattered(source)
    assert is_ragged(rows["items"], range(30))
    assert rows["number"].tolist() == list(range(30))
