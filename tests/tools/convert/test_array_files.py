import sys
import zipfile

import h5py
import numpy as np
import pytest
from harness import arrays_of, numbered, numbers_of, read_rows
from scipy import sparse

from fastgpu.convert.arrays import open_arrays
from fastgpu.convert.writing import write_files
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.rows.selection import Share
from fastgpu.storage import arrays
from fastgpu.storage.store import open_store


def test_arrays_to_a_file(tmp_path, convert):
    np.save(tmp_path / "x.npy", numbered(300))
    np.savez(tmp_path / "y.npz", labels=np.arange(300, dtype=">i4"))
    convert("arrays images=x.npy y.npz out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert numbers_of(file["images"][:]) == file["labels"][:].tolist()
        assert sorted(file["labels"][:]) == list(range(300))


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


def npy_of(shape: str) -> bytes:
    """A file .npy whose header claims a shape, with 8 bytes of data."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (117 - len(header)) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x.npy"], "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone"),
        (["a=y.npz"], "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone"),
        (["matrix.npz"], "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone"),
        (["a=none.npy"], "none.npy cannot be read as .*No such file"),
        (["a=none.h5::a"], "none.h5::a cannot be read as .*No such file"),
        (["a=x.h5::none"], "cannot be read as NumPy arrays"),
        (["a=text.npy"], "text.npy cannot be read as NumPy arrays"),
        (["a=objects.npy"], "Object arrays|Python objects"),
        (["objects.npz"], "Object arrays|Python objects"),
        (["a=words.npy"], "a is <U1"),
        (["a=x.npy", "b=short.npy"], "the arrays have lengths {'a': 4, 'b': 3}"),
        (["a=empty.npy"], "at least one"),
        (["a=large.npy"], "cannot be read as NumPy arrays"),
        (["large.npz"], "cannot be read as NumPy arrays"),
        (["a=bsr.npz"], "cannot be read as NumPy arrays"),
        (["a=far.npz"], "indices"),
        (["a=cut.npz"], "index pointer size"),
        (["a=wide.npz"], "fewer than 2.31 columns"),
        (["a=zeros.npz"], "at least one value"),
    ],
)
def test_what_is_no_array_of_rows_is_one_line(tmp_path, monkeypatch, sources, message):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((4, 2)))
    np.save("short.npy", np.zeros(3))
    np.save("empty.npy", np.zeros((0, 2)))
    np.save("words.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}]))
    np.savez("y.npz", labels=np.zeros(4))
    np.savez("objects.npz", a=np.array([{}]))
    (tmp_path / "text.npy").write_text("text")
    (tmp_path / "large.npy").write_bytes(npy_of("(10**15,)"))
    with zipfile.ZipFile("large.npz", "w") as archive:
        archive.writestr("a.npy", npy_of("(1000000000000000,)"))
    with h5py.File("x.h5", "w") as file:
        file["a/b"] = np.arange(3)
    sparse.save_npz("matrix.npz", sparse.eye_array(3, format="csr"))
    sparse.save_npz("zeros.npz", sparse.csr_array((3, 3)))
    np.savez("bsr.npz", format=np.array(b"bsr"), shape=(4, 5), data=np.ones(2))
    csr = {"format": np.array(b"csr"), "data": np.ones(2)}
    np.savez("far.npz", indices=[0, 5], indptr=[0, 1, 2], shape=(2, 5), **csr)
    np.savez("cut.npz", indices=[0, 4], indptr=[0, 1, 2], shape=(9, 5), **csr)
    np.savez("wide.npz", format=np.array(b"coo"), row=[0], col=[3], data=[1.0], shape=(2, 10**12))
    with pytest.raises(UserError, match=message) as error:
        open_arrays(sources)
    assert len(str(error.value).splitlines()) == 1


def test_a_member_that_is_no_array_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
    with pytest.raises(UserError, match="x is .*; allowed are rows of bool, integers and floats"):
        open_arrays([f"{tmp_path}/x.npz"])


@pytest.mark.parametrize("source", ["images=x.npy", "images=x.h5::/raw/x"])
def test_channels_last_become_channels_first(tmp_path, convert, source):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 6, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["raw/x"] = images
    convert("arrays", source, "out.h5", "--layout", "nhwc", "--keep-order")
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["images"][:], images.transpose(0, 3, 1, 2))


def test_a_layout_without_images_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 3)))
    with pytest.raises(UserError, match="--layout nhwc has no effect: no field has four axes"):
        open_arrays([f"x={tmp_path}/x.npy"], channels_last=True)


# ---------------------------------------------------------------------------------------------- sparse matrices


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
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(dense).asformat(kind))
    result = convert("arrays items=x.npz y.h5 --keep-order")
    assert ("warning: x.npz has values from 1 to 3" in result.stdout) != ones
    names = ["items"] if ones else ["items", "items_values"]
    found = open_store("x", "y.h5", {name: name for name in names})
    assert found.fields["items"].n_items == 12
    np.testing.assert_array_equal(as_dense(read_rows(found)), dense)


def test_values_that_stand_twice_are_summed_and_zeros_are_none(tmp_path):
    values = [1.0, 2.0, 0.0, 1.0]
    sparse.save_npz(tmp_path / "x.npz", sparse.coo_array((values, ([0, 0, 1, 2], [3, 3, 1, 0])), shape=(4, 5)))
    columns = arrays_of(open_arrays([f"items={tmp_path}/x.npz"]))
    assert (columns["items"].values.tolist(), columns["items"].offsets.tolist()) == ([3, 0], [0, 1, 1, 2, 2])
    assert columns["items_values"].values.tolist() == [3, 1]


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_matrices_of_hdf5_files(tmp_path, kind):
    made = sparse.csr_array(matrix()).asformat(kind)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in ("indptr", "indices", "data"):
            file[f"X/{name}"] = getattr(made, name)
        file["X"].attrs.update({"encoding-type": f"{kind}_matrix", "shape": (30, 12)})
        file["obs/number"] = np.arange(30)
    found = open_arrays([f"items={tmp_path}/x.h5::X", f"number={tmp_path}/x.h5::obs/number"])
    np.testing.assert_array_equal(as_dense(arrays_of(found)), matrix())
    assert arrays_of(found)["number"][:].tolist() == list(range(30))


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, convert):
    sparse.save_npz(tmp_path / "x.npz", sparse.eye_array(3, format="csr"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = convert("arrays items=x.npz y.h5", code=2)
    assert "scipy is not installed: pip install" in result.stderr
