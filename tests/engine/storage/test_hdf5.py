import subprocess
import sys

import h5py
import numpy as np
import pytest
from harness import numbered

from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import open_file
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}


def refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, FIELDS)


def test_a_file_that_is_locked_by_its_writer(write):
    path = write()
    code = f"import h5py; file = h5py.File({path!r}, 'r+'); print('open', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as writer:
        assert writer.stdout.readline() == "open\n"
        refused(path, "is locked by a process that writes it")
        writer.communicate("\n")


def test_a_group_has_attributes_of_plain_python(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/images"] = numbered(5)
        file["train/labels"] = np.arange(5)
        attributes = {"class_names": ["a", "b"], "bytes": np.bytes_(b"c"), "mean": np.array([1.5]), "n": np.int64(1)}
        file["train"].attrs.update(attributes)
    store = open_store("data.train", f"{tmp_path}/x.h5::/train", FIELDS)
    assert len(store) == 5
    assert store.attributes == {"class_names": ["a", "b"], "bytes": "c", "mean": [1.5], "n": 1}
    assert type(store.attributes["n"]) is int


def test_what_h5py_raises_is_one_line_and_a_bug_of_ours_is_not(write):
    path = write(5)
    with h5py.File(path, "a") as file:
        file["a"] = h5py.SoftLink("/b")
        file["b"] = h5py.SoftLink("/a")
    refused(f"{path}::/a", r"rows.h5 cannot be read: .*too many (soft )?links.*: copy or write it again$")
    with pytest.raises(UserError, match="cannot be read: .* doesn't exist"), open_file(path, path) as file:
        file["nothing"]
    with pytest.raises(KeyError, match="bug"), open_file(path, path):
        {}["bug"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content.replace(b"FAHD", bytes(4)), ""),  # the index of chunks
        (lambda content: content[:20_000], ".*truncated"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, reason):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("images", data=numbered(40, (1, 96, 96)), chunks=(8, 1, 96, 96))
        file["labels"] = np.arange(40)
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    refused(str(path), rf"x.h5 cannot be read: {reason}.*: copy or write it again$")
