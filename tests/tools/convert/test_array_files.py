import sys

import h5py
import numpy as np
import pytest
from scipy import sparse

from fastgpu.storage import arrays
from fastgpu.storage.store import open_store
from support.rows import read_rows


def test_arrays_from_folders_and_archives(tmp_path, convert):
    folder = tmp_path / "year=2024"
    folder.mkdir()
    rows = np.arange(20, dtype=np.float32)
    np.save(folder / "x.npy", rows)
    np.savez(folder / "y.npz", y=rows + 1, z=rows)
    np.savez(tmp_path / "splits.npz", x_train=rows + 2, x_test=rows[:3])
    convert("arrays x=year=2024/x.npy year=2024/y.npz w=splits.npz::x_train out.h5 --keep-order")
    with h5py.File(tmp_path / "out.h5") as file:
        found = {name: (file[name][:] - rows).tolist() for name in "xyzw"}
    assert found == {"x": [0] * 20, "y": [1] * 20, "z": [0] * 20, "w": [2] * 20}


@pytest.mark.parametrize("source", ["images=x.npy", "images=x.h5::/raw/x"])
def test_arrays_channels_last_become_first(tmp_path, monkeypatch, convert, source):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1000)  # six rows
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 6, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "y.npz", number=np.arange(60, dtype=">i4"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["raw/x"] = images
    convert("arrays", source, "y.npz out.h5 --layout nhwc --split 0.5")
    found = []
    for split in ("train", "val"):
        with h5py.File(tmp_path / f"out-{split}.h5") as file:
            numbers = file["number"][:].tolist()
            np.testing.assert_array_equal(file["images"][:], images[numbers].transpose(0, 3, 1, 2))
        assert numbers != sorted(numbers)
        found += numbers
    assert sorted(found) == list(range(60))


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("ones", [True, False])
def test_arrays_sparse_matrix_becomes_ragged(tmp_path, convert, kind, ones):
    """In the file, each value stands twice, as two halves. One of them is a zero."""
    rng = np.random.default_rng(0)
    values = rng.integers(1, 2 if ones else 4, (30, 12)).astype(np.float32)
    matrix = sparse.csr_array(values * (rng.random((30, 12)) < 0.3))
    halves = np.repeat(matrix.data / 2, 2)
    halves[:2] = 1, -1
    doubled = sparse.csr_array((halves, np.repeat(matrix.indices, 2), 2 * matrix.indptr), shape=(30, 12))
    sparse.save_npz(tmp_path / "x.npz", doubled.asformat(kind))
    printed = convert("arrays items=x.npz y.h5 --keep-order").out
    assert ("warning: x.npz has values from 1 to 3" in printed) != ones
    source = open_store("x", "y.h5", {name: name for name in ["items", "items_values"][: 2 - ones]})
    assert source.fields["items"].n_items == 12
    expected = sparse.csr_array(doubled.toarray())
    for name, rows in read_rows(source).items():
        np.testing.assert_array_equal(rows.offsets, expected.indptr)
        np.testing.assert_array_equal(rows.values, expected.indices if name == "items" else expected.data)


@pytest.mark.parametrize("source", ["x=x.h5::/link", "x=x.h5::/virtual", "x=x.h5::/external", "x.h5::/g"])
def test_arrays_take_no_bytes_of_other_files(tmp_path, convert, source):
    (tmp_path / "secret").write_bytes(bytes(4))
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource("y.h5", "x", (4,))
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["x"] = np.arange(4, dtype="u1")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["link"] = h5py.ExternalLink("y.h5", "x")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (4,), "u1", external=[("secret", 0, 4)])
        file["g/x"], file["g/y"] = np.arange(4), h5py.ExternalLink("y.h5", "x")
    assert "takes its bytes from other files; name those files" in convert("arrays", source, "out.h5", code=2).err


def test_arrays_missing_library_is_named(tmp_path, monkeypatch, convert):
    sparse.save_npz(tmp_path / "x.npz", sparse.eye_array(3, format="csr"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert "convert.py needs: pip install" in convert("arrays items=x.npz y.h5", code=2).err
