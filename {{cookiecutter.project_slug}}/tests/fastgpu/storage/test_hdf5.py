import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import numbered, numbers_of
from scattered import read_scattered

from fastgpu.process.launch import UserError
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}


def refused(path: str | list[str], message: str, fields: dict[str, str] = FIELDS, **options) -> None:
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, fields, **options)


def write_datasets(tmp_path, **datasets) -> str:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, value in datasets.items():
            file[name] = value
    return str(tmp_path / "x.h5")


# ---------------------------------------------------------------------------------------------- files


def test_missing_files_and_globs_without_a_match():
    refused("nowhere.h5", "data.train: nowhere.h5 does not exist")
    refused("nowhere-*.h5", r"data.train: no file matches nowhere-\*.h5")
    refused(["nowhere.h5"], "does not exist")


def test_folders_and_files_that_are_not_hdf5(tmp_path):
    (tmp_path / "text.h5").write_text("no")
    refused(str(tmp_path / "text.h5"), "is not an HDF5 file")
    refused(str(tmp_path), "is a folder; name the files in it")


def test_a_file_that_is_locked_by_its_writer(write):
    path = write()
    code = f"import h5py, sys; file = h5py.File({path!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "open\n"
        refused(path, "is locked by a process that writes it")
    finally:
        writer.communicate()


# ---------------------------------------------------------------------------------------------- datasets


def test_missing_datasets_and_groups(tmp_path):
    path = write_datasets(tmp_path, images=numbered(5), other=np.arange(4))
    refused(path, "has no dataset labels; it has images, other")
    refused(f"{path}::/train", "has no group /train; it has images, other")


def test_scalars_and_types_that_are_not_numbers(tmp_path):
    refused(write_datasets(tmp_path, images=3, labels=3), "is a single value")
    path = write_datasets(tmp_path, images=numbered(2), labels=["a", "b"])
    refused(path, "is of type object; allowed are bool, integers and floats")


def test_a_group_has_attributes_of_plain_python(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("train")
        group["images"] = numbered(5)
        group["labels"] = np.arange(5)
        group.attrs["class_names"] = ["a", "b"]
        group.attrs["bytes"] = np.bytes_(b"c")
        group.attrs["mean"] = np.array([1.5])
        group.attrs["fastgpu_format"] = np.int64(1)
    store = open_store("data.train", f"{tmp_path}/x.h5::/train", FIELDS)
    assert len(store) == 5
    assert store.attributes == {"class_names": ["a", "b"], "bytes": "c", "mean": [1.5], "fastgpu_format": 1}
    assert type(store.attributes["fastgpu_format"]) is int


# ---------------------------------------------------------------------------------------------- links


def virtual_layout(source: str) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource(source, "images", (10, 1, 4, 2))
    return layout


def write_links(folder: Path, source: str, raw: str) -> str:
    """Write a file with a link, a group, a virtual and an external dataset that lead to other files."""
    with h5py.File(folder / "x.h5", "w") as file:
        file["labels"] = np.arange(10)
        file["link"] = h5py.ExternalLink(source, "images")
        file["group"] = h5py.ExternalLink(source, "/")
        file.create_virtual_dataset("virtual", virtual_layout(source))
        file.create_dataset("external", (10, 1, 4, 2), "u1", external=[(raw, 0, 80)])
    return str(folder / "x.h5")


@pytest.fixture
def linked(write, tmp_path) -> str:
    """A file with links of all kinds that lead to files with numbered rows."""
    (tmp_path / "raw").write_bytes(numbered(10).tobytes())
    return write_links(tmp_path, write(10, name="source.h5"), str(tmp_path / "raw"))


WAYS = [("", "link"), ("", "virtual"), ("", "external"), ("::/group", "images")]


@pytest.mark.parametrize(("group", "name"), WAYS)
def test_bytes_of_other_files_are_not_followed(linked, group, name):
    fields = {"images": name, "labels": "labels"}
    refused(linked + group, "takes its bytes from other files; .* data.trust_links=true", fields)


@pytest.mark.parametrize(("group", "name"), WAYS)
def test_trusted_links_are_followed(linked, group, name):
    store = open_store("data.train", linked + group, {"images": name, "labels": "labels"}, trust_links=True)
    assert numbers_of(read_scattered(pickle.loads(pickle.dumps(store)))["images"]) == list(range(10))


@pytest.mark.parametrize("name", ["link", "virtual", "external"])
def test_a_trusted_link_must_lead_somewhere(tmp_path, name):
    path = write_links(tmp_path, "gone.h5", "gone.h5")
    refused(path, "gone.h5, which is not there", {"images": name, "labels": "labels"}, trust_links=True)
