import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import numbered
from scattered import read_scattered

from fastgpu.process.launch import RankError, UserError
from fastgpu.storage.hdf5 import open_file
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}


def refused(path: str, message: str, fields: dict[str, str] = FIELDS) -> None:
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, fields)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.h5", r"data.train: nowhere.h5 does not exist \(looked in /"),
        ("nowhere-*.h5", r"data.train: no file matches nowhere-\*.h5"),
        ("text.h5", "is not an HDF5 file"),
        (".", "is a folder; name the files in it"),
        ("x.h5", "has no dataset labels; it has images, words, zero"),
        ("x.h5::/train", "has no group /train; it has images, words, zero"),
    ],
)
def test_files_that_cannot_be_opened(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    Path("text.h5").write_text("no")
    with h5py.File("x.h5", "w") as file:
        file["images"] = numbered(2)
        file["zero"] = 3
        file["words"] = ["a", "b"]
    refused(path, message)


def test_fields_that_are_no_rows_of_numbers(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = numbered(2)
        file["zero"] = 3
        file["words"] = ["a", "b"]
    refused(f"{tmp_path}/x.h5", r"is int64 \(\); allowed are rows of bool", {"images": "images", "labels": "zero"})
    refused(f"{tmp_path}/x.h5", r"is object \(2,\); allowed are rows of bool", {"images": "images", "labels": "words"})


def test_a_file_that_is_locked_by_its_writer(write):
    path = write()
    code = f"import h5py, sys; file = h5py.File({path!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "open\n"
        refused(path, "is locked by a process that writes it")
    finally:
        writer.communicate()


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


# ---------------------------------------------------------------------------------------------- damaged and hostile


def test_what_h5py_raises_is_one_line_and_a_bug_of_ours_is_not(write):
    path = write(5)
    with h5py.File(path, "a") as file:
        del file["images"]
        file["images"] = h5py.SoftLink("/images")
        file["a"] = h5py.SoftLink("/b")
        file["b"] = h5py.SoftLink("/a")
    refused(path, r"x?rows.h5 cannot be read: .*too many (soft )?links.*: copy or write it again$")
    refused(f"{path}::/a", "cannot be read: .*too many")
    with pytest.raises(UserError, match="cannot be read: .* doesn't exist"), open_file(path, path) as file:
        file["nothing"]
    with pytest.raises(KeyError, match="bug"), open_file(path, path):
        {}["bug"]


def test_more_rows_and_chunks_than_a_file_can_hold(tmp_path):
    path = str(tmp_path / "x.h5")
    for n_rows, options, message in (
        (40, {"chunks": (10,)}, "4 of 4 chunks were never written"),
        (2**34, {"chunks": (2**33,), "compression": "gzip"}, "2 of 2 chunks were never written"),
        (2**34, {}, "was never written"),
        (2**62, {"chunks": (1,)}, "4611686018427387904 of 4611686018427387904 chunks were never written"),
    ):
        with h5py.File(path, "w") as file:
            file.create_dataset("images", (n_rows,), "u1", **options)
            file.create_dataset("labels", (n_rows,), "u1", **options)
        refused(path, message)
    with h5py.File(path, "w") as file:  # the first byte of the rows is in the file, the last one is not
        file.create_dataset("images", (2**34,), "u1")[0] = 1
        file["labels"] = 0
        offset = file["images"].id.get_offset()
    with Path(path).open("r+b") as raw:
        raw.truncate(offset + 1)
    refused(path, "truncated")


def test_a_damaged_index_of_chunks(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("images", data=numbered(40), chunks=(8, 1, 4, 2))
        file["labels"] = np.arange(40)
    assert path.read_bytes().count(b"FAHD") == 1
    path.write_bytes(path.read_bytes().replace(b"FAHD", bytes(4)))
    refused(str(path), "x.h5 cannot be read: .*: copy or write it again")


def test_a_chunk_that_the_library_cannot_decode(write):
    path = write(40)
    with h5py.File(path, "a") as file:
        file.create_dataset("split", data=numbered(40), chunks=(8, 1, 2, 2), compression="gzip")
        chunk = file["split"].id.get_chunk_info(3)
    with Path(path).open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    store = open_store("data.train", path, {"images": "split", "labels": "labels"})
    with pytest.raises(RankError, match=r"rows.h5: /split from row \d+ on cannot be read \(.*\); restore the file"):
        read_scattered(store)


# ---------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(("group", "name"), [("", "link"), ("", "virtual"), ("", "external"), ("::/group", "images")])
def test_bytes_of_other_files_are_not_followed(write, tmp_path, group, name):
    source = write(10, name="source.h5")
    (tmp_path / "raw").write_bytes(numbered(10).tobytes())
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource(source, "images", (10, 1, 4, 2))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["labels"] = np.arange(10)
        file["link"] = h5py.ExternalLink(source, "images")
        file["group"] = h5py.ExternalLink(source, "/")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (10, 1, 4, 2), "u1", external=[(str(tmp_path / "raw"), 0, 80)])
    fields = {"images": name, "labels": "labels"}
    refused(f"{tmp_path}/x.h5{group}", "takes its bytes from other files; name those files", fields)
