import sys

import h5py
import numpy as np
import pytest
from harness import arrays_of, numbered, numbers_of, read_rows
from scipy import sparse

from fastgpu.convert.arrays import open_arrays
from fastgpu.convert.writing import write_files
from fastgpu.rows.rows import RaggedArray
from fastgpu.rows.selection import Share
from fastgpu.storage import arrays
from fastgpu.storage.store import open_store


@pytest.mark.parametrize("in_hdf5", [False, True])
@pytest.mark.parametrize("seed", [0, None])
def test_rows_are_taken_from_blocks_in_any_order(tmp_path, monkeypatch, in_hdf5, seed):
    """Blocks of few rows, and a part of the rows of each."""
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 100)
    items = RaggedArray(np.arange(3000, dtype=np.int32), np.arange(0, 3001, 3))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = numbered(1000)
        images = file["images"] if in_hdf5 else file["images"][:]
        columns = {"images": images, "labels": np.arange(1000), "items": items}
        source = arrays.ArrayDataset("x", columns)
        assert len(source.block_rows) > 200
        is_member = np.arange(1000) % 7 < 3
        source.selection = Share(source.block_rows, is_member)
        write_files({"": source}, tmp_path / "out.h5", seed=seed)
    rows = np.flatnonzero(is_member)
    names = {name: name for name in ("images", "labels", "items")}
    found = read_rows(open_store("x", str(tmp_path / "out.h5"), names))
    labels = found["labels"].tolist()
    assert numbers_of(found["images"]) == labels
    assert found["items"].values[::3].tolist() == [3 * label for label in labels]
    assert sorted(labels) == rows.tolist()
    assert (labels == rows.tolist()) == (seed is None)


@pytest.mark.parametrize("source", ["images=x.npy", "images=x.h5::/raw/x"])
def test_channels_last_become_channels_first(tmp_path, convert, source):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 6, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "y.npz", labels=np.arange(60, dtype=">i4"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["raw/x"] = images
    convert("arrays", source, "y.npz out.h5 --layout nhwc")
    with h5py.File(tmp_path / "out.h5") as file:
        labels = file["labels"][:]
        assert sorted(labels) == list(range(60))
        np.testing.assert_array_equal(file["images"][:], images[labels].transpose(0, 3, 1, 2))


def matrix() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.random((30, 12)) < 0.3) * rng.integers(1, 4, (30, 12)).astype(np.float32)


def as_dense(rows: dict[str, RaggedArray], width: int = 12) -> np.ndarray:
    items, found = rows["items"], np.zeros((len(rows["items"]), width), np.float32)
    values = rows["items_values"].values if "items_values" in rows else np.ones(len(items.values))
    found[np.repeat(np.arange(len(items)), np.diff(items.offsets)), items.values] = values
    return found


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("ones", [True, False])
def test_a_sparse_matrix_becomes_ragged_rows(tmp_path, convert, kind, ones):
    dense = (matrix() > 0).astype(np.float32) if ones else matrix()
    made = sparse.csr_array(dense).asformat(kind)
    sparse.save_npz(tmp_path / "x.npz", made)
    result = convert("arrays items=x.npz y.h5 --keep-order")
    assert ("warning: x.npz has values from 1 to 3" in result.stdout) != ones
    found = open_store("x", "y.h5", {name: name for name in ["items", "items_values"][: 2 - ones]})
    assert found.fields["items"].n_items == 12
    np.testing.assert_array_equal(as_dense(read_rows(found)), dense)


def test_values_that_stand_twice_are_summed_and_zeros_are_none(tmp_path):
    values = [1.0, 2.0, 0.0, 1.0]
    sparse.save_npz(tmp_path / "x.npz", sparse.coo_array((values, ([0, 0, 1, 2], [3, 3, 1, 0])), shape=(4, 5)))
    columns = arrays_of(open_arrays([f"items={tmp_path}/x.npz"]))
    assert (columns["items"].values.tolist(), columns["items"].offsets.tolist()) == ([3, 0], [0, 1, 1, 2, 2])
    assert columns["items_values"].values.tolist() == [3, 1]


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, convert):
    sparse.save_npz(tmp_path / "x.npz", sparse.eye_array(3, format="csr"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = convert("arrays items=x.npz y.h5", code=2)
    assert "convert.py needs: pip install" in result.stderr
