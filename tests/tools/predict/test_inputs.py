import h5py
import numpy as np
import pytest
from harness import ALONE, is_ragged, numbered, numbers_of

from fastgpu.predict.inputs import make_order, open_inputs, open_pools
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field

FIELDS = {"x": Field(np.dtype(np.uint8), (1, 4, 2))}
CARD = {"fields": {"x": {"dataset": "images"}}, "attributes": {}}


def read(inputs):
    """(numbers that the rows carry, their row numbers)"""
    order = make_order(inputs.source, 8)
    numbers, row_ids = [], []
    with open_pools(inputs.source, order, ALONE.device) as pools:
        for plan, rows in pools:
            numbers += numbers_of(rows["x"][: plan.n_real_rows])
            row_ids += plan.row_ids[: plan.n_real_rows].tolist()
    return numbers, row_ids


def test_rows_come_in_the_order_of_the_files(write):
    paths = [write(20, name="a.h5"), write(15, name="b.h5", start=20)]
    numbers, row_ids = read(open_inputs(paths, CARD, FIELDS, "stop"))
    assert numbers == row_ids == list(range(35))


def test_a_dataset_has_the_name_that_it_had_in_training_or_that_of_its_field(tmp_path):
    for name in ("images", "x"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[name] = numbered(5)
        assert read(open_inputs([str(tmp_path / f"{name}.h5")], CARD, FIELDS, "stop"))[0] == [0, 1, 2, 3, 4]


def test_single_whole_numbers_may_have_another_size(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["y"] = np.arange(5, dtype=np.uint8)
        file["x"] = np.zeros((5, 2), np.uint16)
    fields = {"y": Field(np.dtype(np.int64), ()), "x": Field(np.dtype(np.uint8), (2,))}
    card = {"fields": {"y": {"dataset": "y"}, "x": {"dataset": "x"}}, "attributes": {}}
    open_inputs([str(tmp_path / "x.h5")], card, {"y": fields["y"]}, "stop")
    with pytest.raises(UserError, match=r"x is uint16 \(N, 2\); the model was trained on uint8 \(N, 2\)"):
        open_inputs([str(tmp_path / "x.h5")], card, fields, "stop")


def test_ragged_rows(write_ragged):
    fields = {"items": Field(np.dtype(np.int32), (), 2.0, 1000)}
    card = {"fields": {"items": {"dataset": "items"}}, "attributes": {}}
    source = open_inputs([write_ragged(50)], card, fields, "stop").source
    order = make_order(source, 50)
    with open_pools(source, order, ALONE.device) as pools:
        assert is_ragged(next(pools).rows["items"], range(50))
    fewer = {"items": fields["items"]._replace(n_items=60)}
    with pytest.raises(
        UserError,
        match=r"items is int32 \(N, any number\) below 1000; .* trained on .* below 60; .* matrix\[:, item_ids\]",
    ):
        open_inputs([write_ragged(50)], card, fewer, "stop")


def test_array_files(tmp_path):
    np.save(tmp_path / "x.npy", numbered(9))
    np.savez(tmp_path / "x.npz", x=numbered(9), other=np.zeros(2))
    for name in ("x.npy", "x.npz"):
        assert read(open_inputs([str(tmp_path / name)], CARD, FIELDS, "stop"))[0] == list(range(9))
    np.savez(tmp_path / "y.npz", y=numbered(9))
    (tmp_path / "z.npy").write_text("no array")
    (tmp_path / "z.npz").write_bytes((tmp_path / "x.npz").read_bytes().replace(numbered(9).tobytes(), bytes(72)))
    for names, message in (
        (["y.npz"], "y.npz: x is missing; it has y"),
        (["z.npy"], "z.npy is not a file of NumPy arrays of numbers"),
        (["z.npz"], "z.npz is not a file of NumPy arrays of numbers: Bad CRC-32"),
        (["x.npy", "x.npy"], "INPUT is 2 array files; give one"),
    ):
        with pytest.raises(UserError, match=message):
            open_inputs([str(tmp_path / name) for name in names], CARD, FIELDS, "stop")
