import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from harness import numbered
from test_meaning import described

from fastgpu.storage import store
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import open_store

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

FIELDS = {"images": "images", "labels": "labels"}
ITEMS = {"items": "items"}
BAD_FIELDS = ("zero", "words", "link", "virtual", "external", "nothing", "no chunk", "no gzip", "no chunk of many")
BAD_INDPTR = {
    "falls": np.arange(21)[::-1],
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
        file["group"] = h5py.ExternalLink("source.h5", "/")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (10, 1, 4, 2), "u1", external=[("raw", 0, 80)])
        file.create_dataset("nothing", (2**34,), "u1")
        file.create_dataset("no chunk", (40,), "u1", chunks=(10,))
        file.create_dataset("no gzip", (2**34,), "u1", chunks=(2**33,), compression="gzip")
        file.create_dataset("no chunk of many", (2**62,), "u1", chunks=(1,))


def test_messages(compare_messages, write, write_ragged, tmp_path, monkeypatch):
    def opens(paths: str | list[str], fields: dict[str, str] = FIELDS, **more: str) -> Callable[[], object]:
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
            patch.setattr(store, "MAX_VALUES", 3)
            open_store("data.train", "long.h5", ITEMS)

    def compares(attribute: str, ours: Sequence[object], theirs: Sequence[object]) -> Callable[[], None]:
        sources = described("a", {attribute: ours}), described("b", {attribute: theirs})
        return lambda: check_meaning("data.val", *sources)

    monkeypatch.chdir(tmp_path)
    Path("text.h5").write_text("no")
    Path("raw").write_bytes(numbered(10).tobytes())
    write(10, (1, 2, 4), name="other.h5")
    write(10, name="source.h5")
    write(40, name="bitshuffle.h5", compression=hdf5plugin.Bitshuffle())
    write_ragged(20)
    write_ragged(5, "fewer.h5", items=99)
    write_ragged(20, "long.h5", items=3)
    write_bad_fields(write(10))
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda _: False)
    mistakes = {
        "no file": opens("nowhere.h5"),
        "no file of a pattern": opens("nowhere-*.h5"),
        "no HDF5": opens("text.h5"),
        "a folder": opens("."),
        "no dataset": opens("rows.h5", labels="targets"),
        "no group": opens("rows.h5::/train"),
        "a group of another file": opens("rows.h5::/group"),
        **{f"a field that is {name}": opens("rows.h5", images=name) for name in BAD_FIELDS},
        "no file is named": opens([]),
        "no field is named": opens("rows.h5", {}),
        "files of other shapes": opens(["rows.h5", "other.h5"]),
        "fields of other lengths": opens("rows.h5", labels="four"),
        "no rows": opens("rows.h5", {"images": "empty"}),
        "a filter of a plugin": opens("bitshuffle.h5"),
        "matrices of other items": opens(["ragged.h5", "fewer.h5"], ITEMS),
        "a matrix by columns": opens_damaged("encoding-type", "csc_matrix"),
        "a matrix without a shape": opens_damaged("shape", None),
        "a matrix without columns": opens_damaged("shape", (20, 0)),
        "a matrix of one dimension": opens_damaged("shape", (20,)),
        "a matrix without indices": opens_damaged("indices", None),
        **{f"indptr {how}": opens_damaged("indptr", value) for how, value in BAD_INDPTR.items()},
        "a row longer than fits": opens_long_rows,
        "other items": compares("item_ids", [7, 3, 9], [3, 7, 9]),
        "other classes": compares("class_names", ["a", "b"], ["b", "a"]),
        "other targets": compares("target_names", ["row", "column"], ["column", "row"]),
        "fewer targets": compares("target_names", ["row", "column"], ["row"]),
    }
    compare_messages(mistakes)
