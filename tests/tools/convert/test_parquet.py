"""Parquet files as a source of images and of arrays: what is written is what polars reads."""

import json
import os
from itertools import chain, pairwise
from typing import Any

import h5py
import numpy as np
import polars as pl
import pytest

from fastgpu.convert.images.parquet import ParquetImages
from fastgpu.convert.parquet import ParquetFiles, RecentGroups, explain
from fastgpu.convert.parquet_rows import ParquetRows
from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import attributes_of
from support.images import photo
from support.sources import IMAGE, numbered_png, numbers_of_images, write_parquet

NUMBERS = {
    "number": pl.Series(range(20), dtype=pl.UInt16),
    "share": pl.Series(np.arange(20) / 8, dtype=pl.Float32),
    "is_odd": [row % 2 == 1 for row in range(20)],
    "vector": pl.Series(np.arange(80.0).reshape(20, 4)),
    "picture": pl.Series(np.arange(20 * 24, dtype=np.int64).reshape(20, 2, 4, 3)),
    "triple": [[row, 2 * row, 3 * row] for row in range(20)],
    "items": [[*range(row % 4)] for row in range(20)],
    "boxes": pl.Series([[[row, 1.5]] * (row % 3) for row in range(20)], dtype=pl.List(pl.Array(pl.Float64, 2))),
    "labels": [row % 3 for row in range(20)],
}


# ---------------------------------------------------------------------------------------------- files


def test_parquet_rows_are_those_of_all_row_groups(tmp_path):
    """Also where a file has none, and in a folder whose name looks like a pattern."""
    folder = tmp_path / "year=2026 [x]"
    folder.mkdir()
    counts = {"a": 16, "b": 0, "c": 3}
    numbers = iter(range(19))
    for name, count in counts.items():
        rows = pl.DataFrame({"x": [next(numbers) for _ in range(count)], "y": ["word"] * count})
        rows.write_parquet(folder / f"{name}.parquet", row_group_size=7)
    os.chdir(folder)
    files = ParquetFiles("*.parquet")
    assert files.group_rows.tolist() == [7, 7, 2, 3]
    assert files.column("x").to_list() == [*range(19)]
    assert [frame["x"].to_list() for frame in files.frames(["x"])] == [
        [*range(start, stop)] for start, stop in pairwise([0, 7, 14, 16, 19])
    ]
    assert files.origins(np.array([18, 0, 15])) == ["c.parquet: row 2", "a.parquet: row 0", "a.parquet: row 15"]


def test_parquet_footers_of_wide_files_are_read(tmp_path):
    """A long list has its length in another form than a short one."""
    rows = pl.DataFrame({f"column {number}": np.arange(60.0) for number in range(40)})
    rows.write_parquet(tmp_path / "x.parquet", row_group_size=2)
    assert ParquetFiles(tmp_path / "x.parquet").group_rows.tolist() == [2] * 30


def test_parquet_row_groups_are_read_once_for_neighbours(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", [photo(number) for number in range(20)])
    files = ParquetFiles(path)
    asked: list[int] = []
    read = files.read
    monkeypatch.setattr(files, "read", lambda group, columns: asked.append(group) or read(group, columns))
    recent = RecentGroups(files, ["image"])
    for group in (0, 0, 1, 0, 1, 2):
        assert len(recent[group]) == files.group_rows[group]
    assert asked == [0, 1, 2]
    monkeypatch.setattr("fastgpu.convert.parquet.RECENT_BYTES", 0)
    for group in (0, 0, 1, 2, 0):
        recent[group]
    assert asked == [0, 1, 2, 1, 2, 0]


# ---------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("n_rows", [1, 3, 4000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_parquet_images_are_those_that_polars_reads(tmp_path, convert, n_rows):
    size = max(1, -(-n_rows // 3))
    for number, start in enumerate(range(0, n_rows, size)):
        rows = range(start, min(start + size, n_rows))
        images = [numbered_png(row % 50_000) for row in rows]
        write_parquet(tmp_path / f"part-{number}.parquet", images, group_rows=1000, label=[row % 5 for row in rows])
    plain = pl.read_parquet(tmp_path / "part-*.parquet")
    convert("images 'part-*.parquet' kept.h5 --keep-encoded --keep-order")
    convert("images 'part-*.parquet' mixed.h5")
    with h5py.File("kept.h5") as file, h5py.File("mixed.h5") as mixed:
        content = plain["image"].struct.field("bytes")
        assert file["images/values"][:].tobytes() == b"".join(content)
        assert np.diff(file["images/indptr"][:]).tolist() == content.bin.size().to_list()
        assert file["labels"][:].tolist() == plain["label"].to_list()
        assert attributes_of(file)["class_names"] == list("01234")[: min(5, n_rows)]
        numbers = numbers_of_images(mixed["images"][:])
        rows = [int(text.rpartition(" ")[2]) for text in mixed["fastgpu_source"].asstr()[:]]
        files = [int(text[len("part-")]) for text in mixed["fastgpu_source"].asstr()[:]]
        places = [file * size + row for file, row in zip(files, rows, strict=True)]
        assert sorted(places) == [*range(n_rows)]
        assert numbers == [place % 50_000 for place in places]
        assert mixed["labels"][:].tolist() == [place % 5 for place in places]


@pytest.mark.parametrize("n_threads", [1, 4])
def test_parquet_images_are_shuffled_and_split(tmp_path, convert, n_threads):
    write_parquet(tmp_path / "x.parquet", [numbered_png(n) for n in range(60)], label=[n % 2 for n in range(60)])
    told = convert(f"images x.parquet x.h5 --split 0.5,0.3,0.2 --threads {n_threads}").out
    assert "columns of x.parquet: image has the images, label the labels" in told
    numbers = []
    for split in ("train", "val", "test"):
        with h5py.File(f"x-{split}.h5") as file:
            found = numbers_of_images(file["images"][:])
            assert file["labels"][:].tolist() == [number % 2 for number in found]
            assert found != sorted(found)
            numbers.append(found)
    assert [len(found) for found in numbers] == [30, 18, 12]
    assert sorted(chain.from_iterable(numbers)) == [*range(60)]


def test_parquet_images_may_be_bytes_or_paths(tmp_path, convert):
    files = [numbered_png(number) for number in range(6)]
    (tmp_path / "data").mkdir()
    for number, content in enumerate(files):
        (tmp_path / f"data/{number}.png").write_bytes(content)
    paths = [f"{number}.png" for number in range(6)]
    mixed = [{"bytes": None if n % 2 else files[n], "path": paths[n]} for n in range(6)]
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "bytes": (pl.Binary, files),
        "structs": (IMAGE, mixed),
        "paths": (pl.String, paths),
    }
    for name, (kind, images) in kinds.items():
        write_parquet(tmp_path / f"data/{name}.parquet", images, kind, group_rows=2, label=["cat"] * 6)
        convert(f"images data/{name}.parquet x.h5 --columns image,label --keep-order --force")
        with h5py.File("x.h5") as file:
            assert numbers_of_images(file["images"][:]) == [*range(6)], name


@pytest.mark.parametrize(
    ("labels", "expected", "attributes"),
    [
        (pl.Series([1, 0, 3], dtype=pl.Int32), [1, 0, 3], {"class_names": list("0123")}),
        (["dog", "cat", "dog"], [1, 0, 1], {"class_names": ["cat", "dog"]}),
        (pl.Series(["dog", "cat", "dog"], dtype=pl.Categorical), [1, 0, 1], {"class_names": ["cat", "dog"]}),
        (pl.Series(["dog", "cat", "dog"], dtype=pl.Enum(["dog", "cat"])), [1, 0, 1], {"class_names": ["cat", "dog"]}),
        ([True, False, True], [1, 0, 1], {"class_names": ["0", "1"]}),
        ([0.5, 2.0, -1e-3], np.float32([0.5, 2.0, -1e-3]).tolist(), {}),
    ],
)
def test_parquet_labels_are_those_of_a_table(tmp_path, labels, expected, attributes):
    path = write_parquet(tmp_path / "x.parquet", [photo(number) for number in range(3)], label=labels, group_rows=2)
    reader = ParquetImages(path, encoded=True)
    assert (reader.labels.tolist(), reader.attributes) == (expected, attributes)


def test_parquet_labels_of_several_columns_are_attributes(tmp_path, convert):
    columns = {"smile": [1, 0, 1], "hat": [0, 0, 1], "patient": ["a", "b", "a"]}
    write_parquet(tmp_path / "x.parquet", [numbered_png(number) for number in range(3)], **columns)
    convert("images x.parquet x.h5 --columns image,smile,hat --split-by patient --split 0.6 --keep-order")
    with h5py.File("x-train.h5") as file:
        assert file["labels"][:].tolist() == [[1, 0], [1, 1]]


def test_parquet_class_names_are_those_that_datasets_writes(tmp_path, convert):
    """As it writes a column of the type ClassLabel: numbers, and the names in the metadata of the file."""
    names = ["cat", "dog", "owl"]
    feature = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pl.DataFrame({"image": [numbered_png(number) for number in range(4)], "label": [2, 0, 0, 3]})
    metadata = {"huggingface": json.dumps({"info": {"features": feature}})}
    table[:3].write_parquet(tmp_path / "x.parquet", metadata=metadata)
    convert("images x.parquet x.h5 --keep-order")
    with h5py.File("x.h5") as file:
        assert (file["labels"][:].tolist(), attributes_of(file)["class_names"]) == ([2, 0, 0], names)
    table[:3].write_parquet(tmp_path / "y.parquet")
    with pytest.raises(UserError, match=r"y.parquet has other names of classes in label than x.parquet"):
        ParquetImages("*.parquet")
    table.write_parquet(tmp_path / "x.parquet", metadata=metadata)
    told = convert("images x.parquet x.h5 --force", code=2).err
    assert "x.parquet: row 3: label is '3'; it should be a whole number from 0 to 2; the file names 3 classes" in told


def test_parquet_lists_all_broken_rows(tmp_path, convert):
    images = [numbered_png(number) for number in range(10)]
    images[2], images[7] = b"no image", images[7][:-9]
    values = [{"bytes": each, "path": None} for each in images] + [None]
    write_parquet(tmp_path / "x.parquet", values, group_rows=4, label=[*"abcdefgh", None, "i", "j"])
    shown = convert("images x.parquet x.h5", code=2).err
    assert "1 of 11 rows are broken, which x.h5.broken.txt lists" in shown  # labels are looked at first
    convert("images x.parquet x.h5 --on-error skip=50%")
    lines = (tmp_path / "x.h5.skipped.txt").read_text().splitlines()
    assert [line.partition(" cannot")[0] for line in lines] == [
        "x.parquet: row 2",
        "x.parquet: row 7",
        "x.parquet: row 8: label is ''; it is missing",
        "x.parquet: row 10",
    ]
    with h5py.File("x.h5") as file:
        assert sorted(numbers_of_images(file["images"][:])) == [0, 1, 3, 4, 5, 6, 9]


def test_parquet_lists_the_rows_of_a_damaged_row_group(tmp_path, convert):
    table = pl.DataFrame({"image": [photo(number) for number in range(20)], "label": [0, 1] * 10})
    path = tmp_path / "x.parquet"
    table.write_parquet(path, row_group_size=7, compression="uncompressed", statistics=False)
    content = bytearray(path.read_bytes())
    place = content.index(photo(7))
    content[place - 12 : place] = bytes(12)  # of the header of the page
    path.write_bytes(content)
    convert("images x.parquet x.h5 --keep-encoded --on-error skip=60%")
    lines = (tmp_path / "x.h5.skipped.txt").read_text().splitlines()
    assert [line.partition(" cannot")[0] for line in lines] == [f"x.parquet: row {row}" for row in range(7, 14)]
    with h5py.File("x.h5") as file:
        assert len(file["labels"]) == 13


def test_parquet_panics_are_silent(tmp_path, capfd):
    """polars ends some damaged files by a panic, which Rust writes to standard error before it is an exception."""

    def panic() -> None:
        os.write(2, b"thread panicked at")
        raise pl.exceptions.PanicException("index out of bounds")

    with (
        pytest.raises(UserError, match="x.parquet cannot be read as Parquet: index out of bounds"),
        explain("x.parquet"),
    ):
        panic()
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


# ---------------------------------------------------------------------------------------------- arrays


def test_parquet_arrays_are_those_that_polars_reads(tmp_path, convert):
    table = pl.DataFrame(NUMBERS)
    for number, start in enumerate((0, 9)):
        rows = table[start : [9, 20][number]]
        rows.write_parquet(tmp_path / f"part-{number}.parquet", row_group_size=4)
    convert("arrays 'part-*.parquet' x.h5 --keep-order --layout nhwc")
    with h5py.File("x.h5") as file:
        for name in ("number", "share", "is_odd", "vector", "labels"):
            np.testing.assert_array_equal(file[name][:], table[name].to_numpy())
            assert file[name].dtype == table[name].to_numpy().dtype
        np.testing.assert_array_equal(file["triple"][:], table["triple"].to_list())
        np.testing.assert_array_equal(file["picture"][:], np.moveaxis(table["picture"].to_numpy(), 3, 1))
        for name in ("items", "boxes"):
            rows = np.split(file[name]["values"][:], file[name]["indptr"][1:-1])
            assert [row.tolist() for row in rows] == table[name].to_list()
        assert file["fastgpu_source"].asstr()[[0, 19]].tolist() == ["part-0.parquet: row 0", "part-1.parquet: row 10"]


@pytest.mark.parametrize("n_rows", [1, 3, pytest.param(100_000, marks=pytest.mark.slow)])
def test_parquet_arrays_keep_rows_together(tmp_path, convert, n_rows):
    """In a random order, of columns that are named."""
    lists = [[row] * (row % 5) for row in range(n_rows)]
    table = pl.DataFrame(
        {"id": range(n_rows), "list": pl.Series(lists, dtype=pl.List(pl.Int32)), "text": ["x"] * n_rows}
    )
    table.write_parquet(tmp_path / "x.parquet", row_group_size=1000)
    convert("arrays x=x.parquet::id x.parquet::list x.h5")
    with h5py.File("x.h5") as file:
        ids = file["x"][:]
        assert sorted(ids.tolist()) == [*range(n_rows)]
        np.testing.assert_array_equal(np.diff(file["list/indptr"][:]), ids % 5)
        np.testing.assert_array_equal(file["list/values"][:], np.repeat(ids, ids % 5))


def test_parquet_arrays_list_rows_with_nulls(tmp_path, convert):
    columns = {
        "x": pl.Series([0, None, 2, 3, 4], dtype=pl.Int8),
        "pair": pl.Series([[0, 1], [0, 1], [None, 1], [0, 1], None], dtype=pl.Array(pl.Int16, 2)),
        "list": [[1], [], [1, 2], [3, None], [4]],
        "labels": [True, None, False, False, True],
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "x.parquet", row_group_size=2)
    assert "4 of 5 rows are broken" in convert("arrays x.parquet x.h5", code=2).err
    convert("arrays x.parquet x.h5 --on-error skip=90%")
    assert "1 of 5 rows" in convert("arrays x.parquet::labels y.h5 --split 0.6", code=2).err
    reasons = [f"x.parquet: row {row} cannot be read" for row in (1, 2, 3, 4)]
    lines = (tmp_path / "x.h5.skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] + ": " + line.split(": ")[1] for line in lines] == reasons
    with h5py.File("x.h5") as file:
        assert (file["x"][:].tolist(), file["pair"][:].tolist()) == ([0], [[0, 1]])
        assert file["list/values"][:].tolist() == [1]


def test_parquet_arrays_are_split_by_a_column_of_text(tmp_path, convert):
    table = pl.DataFrame({"x": range(40), "labels": [0, 1] * 20, "patient": [f"p{row // 4}" for row in range(40)]})
    table.write_parquet(tmp_path / "x.parquet", row_group_size=16)
    told = convert("arrays x.parquet x.h5 --split 0.8 --split-by patient").out
    assert "patient is text, which rows cannot hold: it decides the split, and is not written" in told
    patients = []
    for split in ("train", "val"):
        with h5py.File(f"x-{split}.h5") as file:
            assert {*file} == {"x", "labels", "fastgpu_sha256", "fastgpu_source"}
            patients.append({row // 4 for row in file["x"][:].tolist()})
    assert not patients[0] & patients[1]
    assert len(patients[0] | patients[1]) == 10


def test_parquet_files_of_other_types_are_refused(tmp_path):
    pl.DataFrame({"x": [1]}).write_parquet(tmp_path / "a.parquet")
    pl.DataFrame({"x": [1.0]}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        UserError, match=r"b.parquet has x as Float64; in .*a.parquet it is Int64: write all files alike"
    ):
        ParquetRows(str(tmp_path / "*.parquet"))
