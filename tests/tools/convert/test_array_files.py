import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import numbered, numbers_of, read_rows

from fastgpu.convert.array_files import open_arrays
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import arrays
from fastgpu.storage.store import open_store


def test_arrays_to_a_file(tmp_path, convert):
    np.save(tmp_path / "x.npy", numbered(300))
    np.savez(tmp_path / "y.npz", labels=np.arange(300, dtype=">i4"))
    result = convert("arrays", "images=x.npy", "y.npz", "out.h5")
    assert result.returncode == 0, result.stderr
    with h5py.File(tmp_path / "out.h5") as file:
        assert numbers_of(file["images"][:]) == file["labels"][:].tolist()
        assert sorted(file["labels"][:]) == list(range(300))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x.npy"], "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone"),
        (["a=y.npz"], "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone"),
        (["a=none.npy"], "none.npy does not exist"),
        (["a=text.npy"], "text.npy is not a file of NumPy arrays"),
        (
            ["a=objects.npy"],
            r"objects.npy is not a file of NumPy arrays.*; save it with a dtype of numbers, such as by",
        ),
        (["objects.npz"], r"objects.npz is not a file of NumPy arrays.*; save it with a dtype of numbers, such as by"),
        (["a=words.npy"], "a is <U1"),
        (["a=x.npy", "b=short.npy"], "unequal length"),
        (["a=empty.npy"], "no rows"),
        (["labels=nan.npy"], "labels=nan.npy: row 2 of labels is nan; leave out such rows, 2 of 4"),
    ],
)
def test_what_is_no_array_of_rows_is_refused(tmp_path, monkeypatch, sources, message):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((4, 2)))
    np.save("short.npy", np.zeros(3))
    np.save("empty.npy", np.zeros((0, 2)))
    np.save("nan.npy", np.array([0, 1, np.nan, np.inf]))
    np.save("words.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}]))
    np.savez("y.npz", labels=np.zeros(4))
    np.savez("objects.npz", a=np.array([{}]))
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(UserError, match=message):
        open_arrays(sources)


# ---------------------------------------------------------------------------------------------- sparse matrices


def matrix(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.random((30, 12)) < 0.3) * rng.integers(1, 4, (30, 12)).astype(np.float32)


def save_npz(path: Path, dense: np.ndarray, kind: str) -> None:
    """The members that scipy.sparse.save_npz writes."""
    rows, columns = np.nonzero(dense if kind != "csc" else dense.T)
    members = {"format": np.array(kind.encode()), "shape": np.array(dense.shape)}
    members["data"] = (dense if kind != "csc" else dense.T)[rows, columns]
    if kind == "coo":
        members |= {"row": rows.astype(np.int32), "col": columns.astype(np.int32)}
    else:
        count = dense.shape[0 if kind == "csr" else 1]
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
        members |= {"indptr": indptr.astype(np.int32), "indices": columns.astype(np.int32)}
    np.savez(path, **members)


def as_dense(rows: dict[str, RaggedArray], width: int = 12) -> np.ndarray:
    items, found = rows["items"], np.zeros((len(rows["items"]), width), np.float32)
    values = rows["items_values"].values if "items_values" in rows else np.ones(len(items.values))
    found[np.repeat(np.arange(len(items)), np.diff(items.offsets)), items.values] = values
    return found


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("ones", [True, False])
def test_a_sparse_matrix_becomes_ragged_rows(tmp_path, kind, ones):
    dense = (matrix() > 0).astype(np.float32) if ones else matrix()
    save_npz(tmp_path / "x.npz", dense, kind)
    found = open_arrays([f"items={tmp_path}/x.npz"])
    assert ("items_values" in found.fields) != ones
    assert found.fields["items"].n_items == 12
    np.testing.assert_array_equal(as_dense(read_rows(found)), dense)


def test_values_that_stand_twice_are_summed_and_zeros_are_none(tmp_path):
    members = {"row": [0, 0, 1, 2], "col": [3, 3, 1, 0], "data": np.array([1.0, 2.0, 0.0, 1.0])}
    np.savez(tmp_path / "x.npz", format=np.array(b"coo"), shape=(4, 5), **members)
    rows = read_rows(open_arrays([f"items={tmp_path}/x.npz"]))
    assert (rows["items"].values.tolist(), rows["items"].offsets.tolist()) == ([3, 0], [0, 1, 1, 2, 2])
    assert rows["items_values"].values.tolist() == [3, 1]


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_datasets_and_matrices_of_hdf5_files(tmp_path, kind):
    save_npz(tmp_path / "x.npz", matrix(), kind)
    with np.load(tmp_path / "x.npz") as members, h5py.File(tmp_path / "x.h5", "w") as file:
        for name in ("indptr", "indices", "data"):
            file[f"X/{name}"] = members[name]
        file["X"].attrs.update({"encoding-type": f"{kind}_matrix", "shape": (30, 12)})
        file["obs/number"] = np.arange(30)
    found = open_arrays([f"items={tmp_path}/x.h5::X", f"number={tmp_path}/x.h5::obs/number"])
    rows = read_rows(found)
    np.testing.assert_array_equal(as_dense(rows), matrix())
    assert rows["number"].tolist() == list(range(30))


def test_what_is_no_sparse_matrix_is_one_line(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/b"] = np.arange(3)
    np.savez(tmp_path / "bsr.npz", format=np.array(b"bsr"), shape=(4, 5), data=np.ones(2))
    shape = {"format": np.array(b"csr"), "shape": (2, 5), "data": np.ones(2), "indptr": np.array([0, 1, 2])}
    np.savez(tmp_path / "far.npz", indices=np.array([0, 5]), **shape)
    for source, message in {
        f"x={tmp_path}/bsr.npz": "bsr.npz is not a file of NumPy arrays",
        f"x={tmp_path}/far.npz": "far.npz is not a whole sparse matrix: indices",
        f"{tmp_path}/far.npz": "should be name=file.npy, name=file.npz of a sparse matrix, or file.npz alone",
        f"x={tmp_path}/x.h5::a": "is not a file of NumPy arrays",
        f"x={tmp_path}/x.h5::none": "is not a file of NumPy arrays",
        f"x={tmp_path}/none.h5::a": "does not exist",
    }.items():
        with pytest.raises(UserError, match=message):
            open_arrays([source])


def test_a_sparse_matrix_goes_through_the_command(tmp_path, convert):
    save_npz(tmp_path / "x.npz", matrix(), "csr")
    result = convert("arrays", f"items={tmp_path}/x.npz", tmp_path / "y.h5", "--keep-order")
    assert result.returncode == 0, result.stderr
    fields = {"items": "items", "items_values": "items_values"}
    store = open_store("data.train", f"{tmp_path}/y.h5", fields)
    np.testing.assert_array_equal(as_dense(read_rows(store)), matrix())
    assert result.stdout.startswith(f"warning: {tmp_path}/x.npz has values from ")
    assert "which become items_values" in result.stdout
    save_npz(tmp_path / "x.npz", matrix() > 0, "csr")
    assert "warning" not in convert("arrays", f"items={tmp_path}/x.npz", tmp_path / "z.h5").stdout


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("csr", {"indptr": np.array([0, 9, 2, *range(3, 30), 30])}, "indptr must be a non-decreasing sequence"),
        ("csr", {"indptr": np.arange(5)}, "index pointer size 5 should be 31"),
        ("csr", {"indptr": None}, "indptr"),
        ("csr", {"indices": None}, "indices"),
        ("csr", {"shape": np.array(30)}, "x.npz is not a file of NumPy arrays"),
        ("csr", {"shape": np.array([10**12, 12])}, "index pointer size 31 should be 1000000000001"),
        ("coo", {"shape": np.array([30, 10**12])}, "allowed are real numbers and fewer than 2.31 columns"),
        ("csr", {"format": np.array(b"\xff\xfe")}, "x.npz is not a file of NumPy arrays"),
        ("csr", {"data": np.array({}, dtype=object)}, "Object arrays cannot be loaded"),
        ("coo", {"col": np.full(3, -1)}, "x.npz is not a file of NumPy arrays"),
    ],
)
def test_a_damaged_sparse_matrix_is_one_line(tmp_path, kind, change, message):
    save_npz(tmp_path / "whole.npz", matrix(), kind)
    members = {
        name: value for name, value in {**np.load(tmp_path / "whole.npz"), **change}.items() if value is not None
    }
    np.savez(tmp_path / "x.npz", **members)
    with pytest.raises(UserError, match=message) as error:
        open_arrays([f"items={tmp_path}/x.npz"])
    assert len(str(error.value).splitlines()) == 1


def npy_of(shape: str) -> bytes:
    """A file .npy whose header claims a shape, with 8 bytes of data."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (117 - len(header)) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


@pytest.mark.parametrize("shape", ["(10**15,)", "(1000000000000000,)", "(-1,)", f"({'9' * 60},)", "[1]", "(1, 0)"])
def test_a_shape_that_the_bytes_do_not_fill_is_one_line(tmp_path, shape):
    (tmp_path / "x.npy").write_bytes(npy_of(shape))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", npy_of(shape))
    for source in (f"a={tmp_path}/x.npy", f"{tmp_path}/x.npz"):
        with pytest.raises(UserError) as error:
            open_arrays([source])
        assert len(str(error.value).splitlines()) == 1


def test_arrays_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1 << 20), b=np.zeros(1 << 20))
    monkeypatch.setattr(arrays, "free_host_bytes", lambda: 1 << 20)
    with pytest.raises(UserError, match=r"x.npz takes 16.0 MiB of memory, 1.0 MiB are free; save its arrays as .npy"):
        open_arrays([f"{tmp_path}/x.npz"])


@pytest.mark.parametrize("in_hdf5", [False, True])
def test_channels_last_become_channels_first(tmp_path, convert, in_hdf5):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 6, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["raw/x"] = images
    source = "images=x.h5::/raw/x" if in_hdf5 else "images=x.npy"
    done = convert("arrays", source, "out.h5", "--layout", "nhwc", "--keep-order")
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["images"][:], images.transpose(0, 3, 1, 2))


def test_a_layout_without_images_is_refused(tmp_path, convert):
    np.save(tmp_path / "x.npy", np.zeros((9, 2)))
    done = convert("arrays", "images=x.npy", "out.h5", "--layout", "nhwc")
    assert done.returncode == 2
    assert "--layout nhwc is for fields of four axes (N, H, W, C), but the fields are images" in done.stderr
    assert not (tmp_path / "out.h5").exists()
