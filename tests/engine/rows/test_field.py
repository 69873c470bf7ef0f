import numpy as np

from fastgpu.rows.rows import Field

FIXED = Field(np.dtype("u1"), (3, 2))
RAGGED = Field(np.dtype("i4"), (), 2.6, 10)


def test_bytes_of_a_row():
    assert FIXED.row_bytes == 6
    assert Field(np.dtype("i8"), ()).row_bytes == 8
    assert RAGGED.row_bytes == 4 + 11  # its offset, and 2.6 values of 4 bytes


def test_a_field_is_described_for_messages():
    assert str(FIXED) == "uint8 (N, 3, 2)"
    assert str(RAGGED) == "int32 (N, any number) below 10"
    assert str(RAGGED._replace(n_items=None)) == "int32 (N, any number)"


def test_rows_may_lie_in_one_pool_if_their_fields_read_alike():
    assert RAGGED.is_ragged
    assert not FIXED.is_ragged
    assert str(RAGGED) == str(RAGGED._replace(mean_values=3.0))
    for other in (RAGGED._replace(n_items=11), RAGGED._replace(mean_values=None), RAGGED._replace(dtype="i8")):
        assert str(RAGGED) != str(other)
    assert str(FIXED) != str(FIXED._replace(shape=(2, 3)))
    jpeg = RAGGED._replace(n_items=None, codec="jpeg")
    assert str(jpeg) == str(jpeg._replace(codec="jpeg+png", mean_values=3.0)) == "encoded images of any size (N)"
