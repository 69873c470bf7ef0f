import numpy as np
from harness import is_ragged, numbered, numbers_of, ragged
from scattered import read_scattered

from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset


def test_arrays_are_rows_in_blocks_of_two_mib_or_as_they_are_told():
    columns = {"number": np.arange(1000, dtype=">i4"), "images": numbered(1000), "items": ragged(range(1000))}
    fields = {"items": Field(np.dtype("i4"), (), n_items=1000)}
    source = ArrayDataset("x", columns, block_rows=np.array([600, 400], np.int32), fields=fields)
    assert source.fields["number"].dtype == np.dtype("=i4")
    assert source.fields["items"].n_items == 1000
    assert source.column("number").tolist() == list(range(1000))
    assert source.column("items") is None
    rows = read_scattered(source)
    assert rows["number"].tolist() == numbers_of(rows["images"]) == list(range(1000))
    assert is_ragged(rows["items"], range(1000))
    assert ArrayDataset("x", {"a": np.zeros((100, 1 << 16))}).block_rows.tolist() == [4] * 25
