import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from fastgpu.process.launch import UserError
from fastgpu.storage import hdf5, part
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.hdf5 import open_file
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import open_store
from support.rows import DENSE_FIELDS

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

ITEMS = {"items": "items"}
BAD_FIELDS = ("zero", "words", "link", "virtual", "no chunk", "no chunk of many")
BAD_INDPTR = {
    "falls at the end": np.array([*range(20), 3]),
    "falls in between": np.array([0, 9, 5, *[40] * 18]),
    "begins with 1": np.array([1, *[40] * 20]),
    "has two dimensions": np.zeros((21, 1), int),
    "is empty": np.zeros(0, int),
}


def write_bad_fields(path: str) -> None:
    """Add datasets that cannot be rows to a file."""
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource("source.h5", "images", (10, 1, 4, 2))
    with h5py.File(path, "a") as file:
        file["zero"] = 3
        file["words"] = ["a", "b"]
        file["four"] = np.arange(4)
        file["empty"] = np.arange(0)
        file["link"] = h5py.ExternalLink("source.h5", "images")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("no chunk", (45,), "u1", chunks=(10,))
        file.create_dataset("no chunk of many", (2**62,), "u1", chunks=(1,))


ELSEWHERE = (
    "link to a pipe",
    "soft link to a link",
    "behind a link/x",
    "stored in a pipe",
    "made of a pipe",
    "made of a link",
    "made of a virtual dataset",
    "made of several names",
)
BAD_CHECKSUMS = {
    "of another length": np.zeros((4, 32), np.uint8),
    "that are one number": np.uint8(0),
    "of another type": np.zeros((5, 32)),
}
BAD_PATHS = {"with a 0": "a\0b.h5", "with half of a character": "a\ud800.h5", "that is too long": "a" * 5000}


def write_elsewhere(path: str, *, pipe: str = "pipe.h5") -> None:
    """Write a file whose datasets lead to a pipe, or to other places where their bytes should not be read."""
    wide = h5s.UNLIMITED
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(8)
        file["x%b"] = np.arange(8)  # HDF5 would look for x0, x1, ...
        file["link to a pipe"] = h5py.ExternalLink(pipe, "x")
        file["soft link to a link"] = h5py.SoftLink("/link to a pipe")
        file["behind a link"] = h5py.ExternalLink(pipe, "/")
        file["round and round"] = h5py.SoftLink("round and round")
        file.create_dataset("stored in a pipe", (8,), "u1", external=[(pipe, 0, 8)])
        for name, source in {
            "made of a pipe": h5py.VirtualSource(pipe, "x", (8,), "i8", maxshape=(None,)),
            "made of a link": h5py.VirtualSource(".", "link to a pipe", (8,), "i8", maxshape=(None,)),
            "made of a virtual dataset": h5py.VirtualSource(".", "made of a pipe", (8,), "i8", maxshape=(None,)),
        }.items():
            layout = h5py.VirtualLayout((8,), "i8", maxshape=(None,))
            layout[0:wide] = source[0:wide]
            file.create_virtual_dataset(name, layout)
        blocks, plan = h5s.create_simple((8,), (wide,)), h5p.create(h5p.DATASET_CREATE)
        blocks.select_hyperslab((0,), (wide,), (8,), (8,))
        plan.set_virtual(blocks, b".", b"x%b", h5s.create_simple((8,)))
        h5d.create(file.id, b"made of several names", h5t.STD_I64LE, blocks, plan)
        file.create_group("sums/fastgpu_sha256")["x"] = h5py.ExternalLink(pipe, "x")
        file["sums/x"] = np.arange(8)
        file["stored/x"] = np.arange(8)
        file.create_dataset("stored/fastgpu_sha256/x", (1, 32), "u1", external=[(pipe, 0, 32)])
        matrix = file.create_group("matrix")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": (2, 9)})
        matrix["indptr"], matrix["indices"] = [0, 1, 2], [3, 4]
        matrix.create_dataset("data", (2,), "f4", external=[(pipe, 0, 8)])


def described(name: str, attributes: Mapping[str, Sequence[object]]) -> ArrayDataset:
    """Rows with these attributes."""
    return ArrayDataset(name, {"x": np.zeros((2, 3), np.uint8)}, attributes)


def test_messages_of_storage(compare_messages, dense_file, ragged_file, tmp_path, monkeypatch):
    def opens(paths: str | list[str], fields: dict[str, str] = DENSE_FIELDS, **more: str) -> Callable[[], object]:
        return lambda: open_store("data.train", paths, fields | more)

    def opens_damaged(place: str, value: object) -> Callable[[], object]:
        """Open a copy of ragged.h5 with another dataset or attribute in its group `items`, or without one."""

        def call() -> None:
            shutil.copyfile("ragged.h5", "damaged.h5")
            with h5py.File("damaged.h5", "a") as file:
                holder: Any = file["items"] if place.startswith("ind") else file["items"].attrs
                del holder[place]
                if value is not None:
                    holder[place] = value
            open_store("data.train", "damaged.h5", ITEMS)

        return call

    def opens_long_rows() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(part, "MAX_VALUES", 3)
            open_store("data.train", "long.h5", ITEMS)

    def compares(attribute: str, ours: Sequence[object], theirs: Sequence[object]) -> Callable[[], None]:
        sources = described("a", {attribute: ours}), described("b", {attribute: theirs})
        return lambda: check_meaning("data.val", *sources)

    def opens_with_checksums(checksums: np.ndarray) -> Callable[[], object]:
        def call() -> None:
            with h5py.File(dense_file(40, name="checksums.h5"), "a") as file:
                file["fastgpu_sha256/images"] = checksums
            open_store("data.train", "checksums.h5", DENSE_FIELDS)

        return call

    def opens_with_little_memory() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(hdf5, "GIB", 100)
            patch.setattr(hdf5, "free_host_bytes", lambda: 200)
            open_store("data.train", "ragged.h5", ITEMS)

    def reads_sources() -> None:
        with h5py.File(dense_file(8, name="sources.h5"), "a") as file:
            file.create_dataset("fastgpu_source", (8,), "S4", external=[("text.h5", 0, 32)])
        open_store("data.train", "sources.h5", DENSE_FIELDS).origins()

    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.h5")
    write_elsewhere("elsewhere.h5")
    Path("text.h5").write_text("no")
    dense_file(10, (1, 2, 4), name="other.h5")
    dense_file(10, name="source.h5")
    dense_file(40, name="bitshuffle.h5", compression=hdf5plugin.Bitshuffle())
    with h5py.File("many.h5", "w") as file:
        for number in range(100):
            file[f"{number:02}/x"] = [0]
    ragged_file(20)
    ragged_file(20, "long.h5", items=3)
    write_bad_fields(dense_file(10))
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda _: False)
    mistakes = {
        "no file": opens("nowhere.h5"),
        "no file of a pattern": opens("nowhere-*.h5"),
        "no HDF5": opens("text.h5"),
        "a folder": opens("."),
        "no dataset": opens("rows.h5", labels="targets"),
        "no dataset among many": opens("many.h5", {"x": "x"}),
        "no group": opens("rows.h5::/train"),
        **{f"a field that is {name}": opens("rows.h5", images=name) for name in BAD_FIELDS},
        "no file is named": opens([]),
        "no field is named": opens("rows.h5", {}),
        "files of other shapes": opens(["rows.h5", "other.h5"]),
        "fields of other lengths": opens("rows.h5", labels="four"),
        "no rows": opens("rows.h5", {"images": "empty"}),
        "a filter of a plugin": opens("bitshuffle.h5"),
        "a matrix by columns": opens_damaged("encoding-type", "csc_matrix"),
        "a matrix without a shape": opens_damaged("shape", None),
        "a matrix without columns": opens_damaged("shape", (20, 0)),
        "a matrix without indices": opens_damaged("indices", None),
        **{f"indptr {how}": opens_damaged("indptr", value) for how, value in BAD_INDPTR.items()},
        "a row longer than fits": opens_long_rows,
        "a pipe": opens("pipe.h5"),
        **{f"a path {how}": opens(path) for how, path in BAD_PATHS.items()},
        **{f"a dataset {name}": opens("elsewhere.h5", {"x": name}) for name in ELSEWHERE},
        "a link in circles": opens("elsewhere.h5", {"x": "round and round"}),
        "a name that is no text": opens("elsewhere.h5", {"x": "\ud800"}),
        "a group in another file": opens("elsewhere.h5::/behind a link", {"x": "x"}),
        "checksums behind a link": opens("elsewhere.h5::/sums", {"x": "x"}),
        "checksums in another file": opens("elsewhere.h5::/stored", {"x": "x"}),
        "values of a matrix in another file": opens("elsewhere.h5", {"x": "matrix"}),
        "sources in another file": reads_sources,
        **{f"checksums {how}": opens_with_checksums(checksums) for how, checksums in BAD_CHECKSUMS.items()},
        "indptr that is one number": opens_damaged("indptr", np.int64(3)),
        "indptr larger than memory": opens_with_little_memory,
        "other items": compares("item_ids", [7, 3, 9], [3, 7, 9]),
        "other classes": compares("class_names", ["a", "b"], ["b", "a"]),
        "fewer targets": compares("target_names", ["row", "column"], ["row"]),
    }
    compare_messages(mistakes)


def test_storage_file_locked_by_its_writer(dense_file):
    path = dense_file()
    code = f"import h5py; file = h5py.File({path!r}, 'r+'); print('open', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as writer:
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="is locked by a process that writes it"):
            open_store("data.train", path, DENSE_FIELDS)
        writer.communicate("\n")


def test_storage_errors_of_h5py_are_one_line(dense_file):
    path = dense_file(5)
    with pytest.raises(UserError, match="cannot be read as HDF5: .* doesn't exist"), open_file(path, path) as (_, file):
        file["nothing"]
    with pytest.raises(TypeError, match="bug"), open_file(path, path):
        raise TypeError("bug")


IDS = np.array([7, 3, 9])
SHORTER, EXACT = ({"preprocessing": f'{{"size": [8, 8], "resize": "{resize}"}}'} for resize in ("shorter", "exact"))


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"item_ids": IDS}, {"item_ids": [7, 3, 9]}, ""),
        ({"item_ids": IDS}, {}, ""),
        ({"class_names": ["cat", "dog"]}, {"class_names": ["cat"]}, ""),  # rows of fewer classes
        (SHORTER, SHORTER, ""),
        (SHORTER, {}, ""),
        (SHORTER, EXACT, "the images of b were prepared with .*exact.*, and a with .*shorter"),
    ],
)
def test_storage_warns_of_other_meanings(ours, theirs, told, capsys):
    check_meaning("data.val", described("a", ours), described("b", theirs))
    printed = capsys.readouterr().out
    assert re.search(told, printed)
    assert bool(printed) == bool(told)
