import h5py
import numpy as np
import pytest
from conftest import convert, numbered, numbers_of

from fastgpu.arrays import Arrays, open_arrays
from fastgpu.launch import UserError
from fastgpu.order import Read


def test_blocks_are_rows_that_lie_together():
    columns = {"images": numbered(1000), "labels": np.arange(1000)}
    rows = Arrays("x", columns, block_rows=np.array([600, 400], np.int32))
    out = {"images": np.zeros((500, 1, 4, 2), np.uint8), "labels": np.zeros(500, int)}
    places = np.random.default_rng(0).permutation(500)
    rows.read([Read(0, 550, places[:50]), Read(1, 0, places[50:450]), Read(0, 0, places[450:])], out)
    expected = [*range(550, 1000), *range(50)]
    assert numbers_of(out["images"][places]) == expected
    assert out["labels"][places].tolist() == expected
    assert Arrays("x", {"a": np.zeros((100, 1 << 16))}).block_rows.tolist() == [4] * 25


def test_arrays_to_a_file(tmp_path):
    np.save(tmp_path / "x.npy", numbered(300))
    np.savez(tmp_path / "y.npz", labels=np.arange(300, dtype=">i4"))
    result = convert("arrays", "images=x.npy", "y.npz", "out.h5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    with h5py.File(tmp_path / "out.h5") as file:
        assert numbers_of(file["images"][:]) == file["labels"][:].tolist()
        assert sorted(file["labels"][:]) == list(range(300))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x.npy"], "should be name=file.npy, or file.npz alone"),
        (["a=y.npz"], "should be name=file.npy, or file.npz alone"),
        (["a=none.npy"], "none.npy does not exist"),
        (["a=text.npy"], "text.npy holds no NumPy arrays"),
        (["a=objects.npy"], "objects.npy holds no NumPy arrays"),
        (["a=words.npy"], "a is <U1"),
        (["a=x.npy", "b=short.npy"], "unequal length"),
        (["a=empty.npy"], "no rows"),
    ],
)
def test_what_is_no_array_of_rows_is_refused(tmp_path, monkeypatch, sources, message):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((4, 2)))
    np.save("short.npy", np.zeros(3))
    np.save("empty.npy", np.zeros((0, 2)))
    np.save("words.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}]))
    np.savez("y.npz", labels=np.zeros(4))
    (tmp_path / "text.npy").write_text("text")
    with pytest.raises(UserError, match=message):
        open_arrays(sources)
