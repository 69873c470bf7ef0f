import json
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5a, h5s, h5t

from fastgpu.process.launch import UserError
from fastgpu.rows.selection import Subset
from fastgpu.storage import part
from fastgpu.storage import store as module
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.chunks import CHECKSUMS
from fastgpu.storage.columns import InMemory
from fastgpu.storage.store import open_store
from support.rows import DENSE_FIELDS, numbered, numbers_of, read_by_jobs, read_rows

BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters


def test_store_of_arrays_has_blocks_of_two_mib():
    assert ArrayDataset("x", {"a": np.zeros((100, 1 << 16))}).block_rows.tolist() == [4] * 25


def test_store_fingerprint_tells_rows_apart(dense_file):
    def fingerprint(field: str = "", row: int = 0, *, has_checksums: bool = False) -> str:
        """Of a file with another value in this row of a field."""
        path = dense_file(40)
        with h5py.File(path, "r+") as file:
            if has_checksums:  # these tell rows apart that are not read
                file[f"{CHECKSUMS}/images"] = np.zeros((5, 32), np.uint8)
            if field:
                file[field][row] += 1
        return open_store("data.train", path, DENSE_FIELDS).stored_fingerprint

    found = [fingerprint(), fingerprint("labels", 3), *(fingerprint("images", row) for row in (0, 13, 39))]
    found += [fingerprint(has_checksums=True), fingerprint(f"{CHECKSUMS}/images", 4, has_checksums=True)]
    assert len({*found}) == len(found)
    assert fingerprint() == found[0]


def test_store_attributes_of_a_group_are_plain_values(tmp_path):
    """Those that JSON does not have are left out."""
    unequal = np.array([np.arange(2), np.arange(3)], object)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("train")
        group["images"] = numbered(5)
        group["labels"] = np.arange(5)
        group.attrs.update({"empty": h5py.Empty("S1"), "reference": file["train/images"].ref, "complex": 1j})
        group.attrs.create("unequal", unequal, dtype=h5py.vlen_dtype("i4"))
        h5a.create(group.id, b"time", h5t.UNIX_D32LE, h5s.create(h5s.SCALAR))
        kept = {
            "class_names": ["a", "b"],
            "bytes": np.bytes_(b"c"),
            "no UTF-8": np.bytes_(b"\xff"),
            "mean": np.array([1.5]),
            "n": np.uint64(2**64 - 1),
            "compound": np.array([(1, 2.5, b"a")], [("a", "i4"), ("b", "f8"), ("c", "S2")]),
        }
        group.attrs.update(kept)
        h5a.create(group.id, b"name\xff", h5t.STD_I32LE, h5s.create(h5s.SCALAR)).write(np.ones((), np.int32))
    store = open_store("data.train", f"{tmp_path}/x.h5::/train", DENSE_FIELDS)
    assert len(store) == 5
    names = {"class_names": ["a", "b"], "bytes": "c", "no UTF-8": r"\xff", r"name\xff": 1}
    assert store.attributes == names | {"mean": [1.5], "n": 2**64 - 1, "compound": [[1, 2.5, "a"]]}
    assert json.dumps(store.attributes, ensure_ascii=False).encode()


def test_store_keeps_small_columns_in_memory(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("pixels", data=numbered(50, BIG), chunks=(8, *BIG))
        file.create_dataset("labels", data=np.arange(50), chunks=(3,))
    for is_small in (True, False):
        monkeypatch.setattr(part, "COLUMN_BYTES", 400 * is_small)
        store = open_store("data.train", str(tmp_path / "x.h5"), {"images": "/pixels", "labels": "labels"})
        assert isinstance(store.parts[0].columns["labels"], InMemory) == is_small
        assert not isinstance(store.parts[0].columns["images"], InMemory)
        rows = read_rows(store)
        assert numbers_of(rows["images"]) == rows["labels"].tolist() == list(range(50))


def test_store_selection_leaves_the_store_as_it_is(store):
    whole = store(40)
    part = whole.select(Subset(whole.block_rows, np.arange(40) % 2 == 0), "even")
    odd = part.select(Subset(whole.block_rows, np.arange(40) % 2 == 1))
    assert (len(whole), len(part), len(odd), whole.name != "even", odd.name) == (40, 20, 20, True, "even")
    assert part.whole is odd.whole is whole
    assert [numbers_of(each[:]["images"])[1] for each in (whole, part, odd)] == [1, 2, 3]


def test_store_reads_any_small_column_when_asked(dense_file, monkeypatch):
    paths = [dense_file(40, name="a.h5"), dense_file(30, name="b.h5", start=40)]
    store = open_store("data.train", paths, DENSE_FIELDS)  # both of them are as long, so one is the largest
    before = store.stored_fingerprint
    assert numbers_of(store.column("images")) == list(range(70))
    np.testing.assert_array_equal(store.column("labels"), np.arange(70) % 4)
    assert store.stored_fingerprint == before
    monkeypatch.setattr(module, "COLUMN_BYTES", 8 * 70 - 1)
    assert store.stored_column("images") is None
    with pytest.raises(
        UserError, match="images is not in memory: HDF5 fields are read if they have one shape and up to 1 GiB"
    ):
        store.column("images")


def test_store_warns_of_packed_numbers_once(dense_file, capsys):
    def printed(**attributes: object) -> str:
        paths = [dense_file(40, name=name) for name in ("a.h5", "b.h5")]
        for path in paths:
            with h5py.File(path, "a") as file:
                file["labels"].attrs.update(attributes)
        open_store("data.train", paths, DENSE_FIELDS)
        return capsys.readouterr().out

    packed = {"scale_factor": 2e-4, "add_offset": [0.05], "_FillValue": np.int16(-32767)}
    warning = printed(**packed)
    assert warning.count("warning: ") == 1
    assert "a.h5: labels has scale_factor, add_offset, _FillValue, which are not applied" in warning
    assert printed(scale_factor=1.0, add_offset=[0], _FillValue=np.float32("nan"), missing_value=[np.nan]) == ""


def test_store_matrix_with_its_shape_as_a_dataset(ragged_file):
    """As 10x Genomics writes it: items x rows, by columns."""
    path = ragged_file(60)
    expected = read_rows(open_store("data.train", path, {"items": "items"}))["items"]
    for shape in ([1000, 60], [60, 1000]):
        with h5py.File(path, "a") as file:
            file["items"].attrs.clear()
            file["items"].pop("shape", None)
            file["items/shape"] = shape
        store = open_store("data.train", path, {"items": "items"})
        assert (len(store), store.fields["items"].n_items) == (60, 1000)
        np.testing.assert_array_equal(read_rows(store)["items"].values, expected.values)


@pytest.mark.usefixtures("all_cached")
@pytest.mark.parametrize("name", ["at odd bytes", "big endian", "in turns with others"])
def test_store_jobs_read_cached_rows_in_any_order(tmp_path, name):
    values = np.arange(1 << 18, dtype=np.float32).reshape(-1, 2048)  # 8 KiB: rows that are gathered
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["number"] = np.arange(len(values))
        file["odd"] = np.zeros(3, np.uint8)
        file["at odd bytes"] = values
        assert file["at odd bytes"].id.get_offset() % 4
        file["big endian"] = values.astype(">f4")
        for part in ("in turns with others", "others"):
            file.create_dataset(part, values.shape, "f4", chunks=(16, 2048))
        for start in range(0, len(values), 16):
            for part in ("in turns with others", "others"):
                file[part][start : start + 16] = values[start : start + 16]
                file.flush()
    for n_files in (1, 2):
        store = open_store("data.train", [str(tmp_path / "x.h5")] * n_files, {"x": name, "number": "number"})
        order = np.random.default_rng(0).permutation(len(store))
        rows = read_by_jobs(store, order)
        np.testing.assert_array_equal(rows["x"], values[order % len(values)])
        np.testing.assert_array_equal(rows["number"], order % len(values))


def test_store_merges_mean_and_std_of_files(dense_file, capsys):
    def found(*attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes of files of 30, 60, ... rows with these attributes."""
        paths = []
        for number, own in enumerate(attributes, 1):
            paths.append(dense_file(30 * number, name=f"{number}.h5"))
            with h5py.File(paths[-1], "a") as file:
                file.attrs.update(own)
        return open_store("data.train", paths, DENSE_FIELDS).attributes

    rows = np.random.default_rng(0).normal(100, 16, (3, 90))  # three channels
    rows[:, 30:] *= 2
    both = found(*({"mean": part.mean(1), "std": part.std(1)} for part in (rows[:, :30], rows[:, 30:])))
    np.testing.assert_allclose(both["mean"], rows.mean(1))
    np.testing.assert_allclose(both["std"], rows.std(1))
    same = {"mean": [0.1234567], "std": [0.3]}
    assert found(same, same)["mean"] == same["mean"]  # exactly: shards of one conversion
    assert capsys.readouterr().out == ""
    assert found(same, {})["mean"] == same["mean"]
    assert "warning: 1 of 2 files have attributes mean and std; the values of " in capsys.readouterr().out
