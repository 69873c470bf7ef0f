"""convert.py with HDF5 files, Datasets and arrays: repack, dataset, info, check and arrays."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy import sparse

from fastgpu.convert.summary import fields_of, inspect
from fastgpu.feed import sizes
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import arrays
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.layout import Layout
from fastgpu.storage.store import open_store
from support import PROJECT
from support.datasets import Made
from support.rows import is_ragged, numbered, numbers_of, read_rows


def numbers_and_labels(path: Path) -> tuple[list[int], list[int]]:
    with h5py.File(path) as file:
        return numbers_of(file["images"][:]), file["labels"][:].tolist()


def damage(path: Path, name: str, *rows: int, data: bytes | None = None) -> None:
    """Change a byte of the blocks that have these rows, or write `data` there."""
    with h5py.File(path) as file:
        offsets = [file[name].id.get_chunk_info(row // file[name].chunks[0]).byte_offset + 5 for row in rows]
    content = bytearray(path.read_bytes())
    for offset in offsets:
        content[offset : offset + len(data or b"x")] = data or bytes([content[offset] ^ 1])
    path.write_bytes(content)


def test_repack_keeps_every_row(dense_file, tmp_path, convert):
    source = dense_file(500, classes=500)
    convert("repack", source, "x.h5 --seed 1")
    numbers, labels = numbers_and_labels(tmp_path / "x.h5")
    assert numbers == labels != list(range(500))
    assert sorted(numbers) == list(range(500))
    convert("repack x.h5 kept.h5 --keep-order")
    assert numbers_and_labels(tmp_path / "kept.h5") == (numbers, labels)
    for name in ("x.h5", "kept.h5"):  # not "as in the source", which the file calls the original one
        with h5py.File(tmp_path / name) as file:
            found = attributes_of(file)
        assert (found["row_order"], found["source"], found["fastgpu_format"]) == ("random, seed 1", source, 1)
    assert "convert.py repack" not in convert("info x.h5").out
    assert "convert.py repack" in convert("info", source).out


def test_repack_keeps_attributes_and_names(tmp_path, convert):
    known = {"class_names": ["cat", "dog"], "mean": [3.0], "std": [4.0], "source": "a camera"}
    with h5py.File(tmp_path / "old.h5", "w") as file:
        group = file.create_group("photos")
        group["x"], group["y"] = numbered(40), np.arange(40)
        group["names"] = np.array(["a"] * 40, dtype=object)
        group.attrs.update(known)
    convert("repack old.h5::/photos new.h5 --keep-order --compression gzip --fields images=x labels=y")
    assert numbers_and_labels(tmp_path / "new.h5") == (list(range(40)), list(range(40)))
    with h5py.File(tmp_path / "new.h5") as file:
        assert attributes_of(file) == known | {"row_order": "as in the source", "fastgpu_format": 1}
        assert file["images"].compression == "gzip"


def test_repack_ragged_rows(ragged_file, tmp_path, convert):
    source, target = ragged_file(300), tmp_path / "new.h5"
    convert("repack", source, target)
    with h5py.File(target) as file:
        number = file["number"][:]
        assert is_ragged(RaggedArray(file["items/indices"][:], file["items/indptr"][:]), number)
        assert sorted(number) == list(range(300)) != number.tolist()
    assert convert("check", target).out.strip().endswith("whole")
    damage(target, "items/indices", 0)
    assert "/items/indices: block 0 is damaged" in convert("check", target, code=1).out
    with h5py.File(source, "a") as file:  # values of a CSR matrix
        file["items/data"] = file["items/indices"][:] / 8
    fields = fields_of(inspect(source))
    assert fields == {"/": {"items": "items", "items_values": "items/data", "number": "number"}}
    assert len(open_store("data.train", source, fields["/"])) == 300


def test_repack_of_an_own_dataset(tmp_path, convert):
    words = "support.datasets:Numbered any x.h5 --fields images number=labels"
    assert convert("dataset", words).out.startswith("support.datasets:Numbered called with any\n")
    with h5py.File(tmp_path / "x.h5") as file:
        numbers = numbers_of(file["images"][:])
        assert sorted(numbers) == list(range(150)) != numbers
        assert file["number"][:].tolist() == [number % 4 for number in numbers]


@pytest.mark.parametrize(
    ("kind", "fields", "warning"),
    [
        ("random", "a b c", "draw random numbers (numpy.random, random, torch): the file will have one draw of each"),
        ("any", "images labels", ""),
    ],
)
def test_dataset_that_draws_is_frozen_with_a_warning(kind, fields, warning, convert):
    printed = convert("dataset", f"support.datasets:Numbered {kind} x.h5 --dry-run --fields {fields}").out
    assert warning in printed
    assert ("warning" in printed) == bool(warning)


def test_dataset_item_that_fails_is_shown_by_a_flag(convert):
    """Without workers, its traceback."""
    with pytest.raises(RuntimeError, match="an item of the Dataset cannot be read") as raised:
        convert("dataset support.datasets:Numbered raise x.h5 --num-workers 0")
    assert "in row 70 of " in raised.value.__cause__.__notes__[0]


class Odd(Made):
    """Items of which some raise, have another type or shape, or values that are NaN."""

    ragged = ("c",)

    def __init__(self, _: str):
        super().__init__(self.odd_item)

    def odd_item(self, row: int) -> dict[str, object]:
        if row in (0, 149):  # the first ones that are read
            raise OSError(f"disk {row}\nis lost")
        item: dict[str, object] = {"a": np.full(2, row, "f4"), "b": row, "c": np.full(row % 3, row)}
        return item | {7: {"b": "seven"}, 9: {"a": np.zeros(3, "f4")}, 11: {"a": np.full(2, np.nan, "f4")}}.get(row, {})


@pytest.mark.parametrize("n_workers", [0, 2])
def test_dataset_lists_all_broken_items(tmp_path, convert, n_workers):
    words = f"dataset test_convert_commands:Odd any x.h5 --fields a b c --num-workers {n_workers} --keep-order"
    printed = convert(words, "--on-error stop", code=2).err
    assert printed.startswith("error: 5 of 150 rows are broken, which x.h5.broken.txt lists; nothing else was written")
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5.broken.txt"]
    lines = (tmp_path / "x.h5.broken.txt").read_text().splitlines()
    name = "test_convert_commands:Odd called with any: row"
    expected = ["0 cannot be read: OSError", "7 has b as str, row 0 as int64", "9 has a as float32 (N, 3)"]
    expected += ["11: a is NaN or infinite", "149 cannot be read: OSError"]
    assert all(line.startswith(f"{name} {each}") for line, each in zip(lines, expected, strict=True))
    assert "disk 0 is lost (test_convert_commands.py:" in lines[0]
    convert(words, "--on-error skip=10%")
    assert (tmp_path / "x.h5.skipped.txt").read_text().splitlines() == lines
    whole = [row for row in range(149) if row not in (0, 7, 9, 11)]
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["b"][:].tolist() == file["a"][:, 1].tolist() == whole
        assert file["c/values"][:].tolist() == [row for row in whole for _ in range(row % 3)]


def test_repack_names_rows_that_are_not_finite(tmp_path, convert):
    """By their file, and their number in it."""
    for name in "ab":
        values = np.arange(30, dtype="f4")
        values[7 if name == "b" else 0] = np.inf
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["g/x"] = values
    convert("repack ?.h5::/g all.h5 --on-error skip=10%")
    lines = (tmp_path / "all.h5.skipped.txt").read_text().splitlines()
    assert lines == ["a.h5::/g: row 0: x is NaN or infinite", "b.h5::/g: row 7: x is NaN or infinite"]


def test_repack_patterns(tmp_path, convert):
    for part in (1, 2):
        with h5py.File(tmp_path / f"a-{part}.h5", "w") as file:
            file["g/images"], file["g/labels"] = numbered(20), np.arange(20) + 20 * part
    convert("repack a-*.h5::/g a-all.h5")
    refused = convert("repack a-*.h5::/g a-all.h5 --force", code=2)
    assert "a-all.h5 is one of the 3 files of SOURCE; choose another name" in refused.err
    convert("repack a-all.h5 a-all.h5 --seed 1 --force")
    assert sorted(numbers_and_labels(tmp_path / "a-all.h5")[1]) == list(range(20, 60))


def test_check_finds_damage_before_repack(dense_file, tmp_path, convert):
    convert("repack", dense_file(100), "a.h5")
    assert convert("check a.h5").out == "a.h5: whole\n"
    damage(tmp_path / "a.h5", "images", 3, 70)
    first, second, sum_up = convert("check a.h5", code=1).out.splitlines()
    assert first.startswith("rows 3 to 3: ")
    assert second.startswith("rows 70 to 70: ")
    assert sum_up == "a.h5: 2 blocks are damaged"
    refused = convert("repack a.h5 b.h5", code=2).err
    assert refused.startswith("error: a.h5::/ has 2 damaged blocks:\n  rows 3 to 3: ")
    assert refused.count("is damaged: checksum mismatch") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "rows.h5"]


def test_check_without_checksums(dense_file, convert):
    path = Path(dense_file(64, (1, 32, 32), 8, compression="gzip"))
    assert "/images was read, but has no checksums" in convert("check", path).out
    damage(path, "images", 16, data=b"\xff" * 20)
    assert "rows 16 to 23: " in convert("check", path, code=1).out


def test_check_compares_with_hdf5(dense_file, monkeypatch, convert):
    path = dense_file(2000, (1, 4, 4), 8)
    assert convert("check", path).out.startswith(f"{path}: readable\n")
    monkeypatch.setattr(Layout, "read_chunk", lambda layout, chunk: np.full(layout.field.shape, 1000))
    assert "/images: block 128 has other values than h5py reads" in convert("check", path, code=1).out


@pytest.mark.parametrize(
    ("labels", "pool_bytes", "is_told"),
    [
        (np.arange(1000) // 100, 1000, True),
        (np.arange(1000) // 100, 1 << 20, False),  # one pool mixes all rows
        (np.random.default_rng(0).permutation(1000) // 100, 1000, False),
        (np.zeros(1000, int), 1000, False),  # there is only one class
    ],
    ids=["sorted", "one pool", "mixed", "one class"],
)
def test_check_tells_of_a_file_in_class_order(tmp_path, convert, monkeypatch, labels, pool_bytes, is_told):
    monkeypatch.setattr(sizes, "POOL_BYTES", pool_bytes)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/images"], file["train/labels"] = numbered(1000), labels
    told = "/train/labels: sorted by class: 99% of neighbouring rows share a label"
    assert (told in convert("check a.h5").out) == is_told


LEFT_OUT = {
    "elsewhere": "elsewhere takes its bytes from other files; name those files",
    "empty": "it is float64 (0,), no rows of numbers",
    "nothing": "its name is no UTF-8, or it is a link that leads to nothing",
    "one": "it is int64 (), no rows of numbers",
    "text": "it is object (8,), no rows of numbers",
}


@pytest.mark.parametrize("command", ["info x.h5", "check x.h5", "repack x.h5 w.h5 y.h5"])
def test_commands_list_what_they_leave_out(dense_file, convert, command):
    shutil.copyfile(dense_file(8), "w.h5")
    with h5py.File(dense_file(8, name="x.h5"), "a") as file:
        file["elsewhere"] = h5py.ExternalLink("z.h5", "x")
        file["nothing"] = h5py.SoftLink("/none")
        file["empty"], file["one"], file["text"] = np.zeros(0), 1, np.array(["a"] * 8, object)
        file["other/x"] = np.zeros(8)
    with h5py.File("w.h5", "a") as file:
        file["text"], file["more text"] = np.array(["a"] * 8, object), np.array(["a"] * 8, object)
    shown = convert(command).out
    assert "whole" not in shown
    for name, why in LEFT_OUT.items():
        assert f"/{name} is left out: {why}" in shown
    if command.startswith("repack"):
        assert "warning: x.h5: the rows in /other are left out\n" in shown
        assert "/more text is left out" in shown
        assert shown.count("/text is left out") == 1
        assert "is left out" not in convert(command, "--force --fields images").out  # as that was asked for


def test_check_goes_on_after_a_dataset_that_cannot_be_read(dense_file, tmp_path, convert):
    convert("repack", dense_file(100), "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.create_dataset("begun", (40,), "u1", chunks=(10,))
        file["fastgpu_sha256"].pop("labels")
        file["fastgpu_sha256/labels"] = 1
    damage(tmp_path / "a.h5", "images", 3)
    printed = convert("check a.h5", code=1).out
    assert "a.h5: /begun: 4 of 4 chunks were never written" in printed
    assert "a.h5: /labels: its checksums are int64 () instead of uint8 (1, 32)" in printed
    assert "rows 3 to 3: " in printed


FAULTS_OF_LABELS = (
    (np.arange(6) % 3 - 1, {}, "2 rows have other values than 0 to 1, for classes; the first is row 0"),
    (np.arange(6) % 3, {"n_classes": 2}, "2 rows have other values than 0 to 1, for classes; the first is row 2"),
    (np.arange(12).reshape(6, 2) // 3, {}, "3 rows have other values than 0 and 1, for attributes; the first is row 3"),
    (np.array([0, np.nan, 1, np.inf, 0, 0]), {}, "2 rows have other values than finite numbers; the first is row 1"),
    (20240101 + np.arange(6) // 3, {}, "numbers up to 20,240,102, but only 2 of them occur; if they are ids, number"),
    (np.arange(6) % 3, {"class_names": "cat"}, "says of its classes"),
    (np.arange(6) % 3 + 5, {"n_classes": 2000}, ""),
    (np.arange(24).reshape(6, 2, 2), {}, ""),
)
"""(labels, attributes, what `check` says)"""


@pytest.mark.parametrize(("labels", "described", "fault"), FAULTS_OF_LABELS)
def test_check_finds_labels_that_training_would_refuse(tmp_path, convert, labels, described, fault):
    with h5py.File("x.h5", "w") as file:
        file["a/images"], file["a/labels"] = numbered(6), labels
        file["a"].attrs.update(described)
    shown = [line for line in convert("check x.h5").out.splitlines() if "checksums" not in line]
    assert shown[0] == "x.h5: readable"
    assert len(shown) == 1 + bool(fault)
    assert fault in shown[-1]


def test_check_reads_where_rows_came_from(dense_file, tmp_path, convert):
    with h5py.File(dense_file(100), "a") as file:
        file["fastgpu_source"] = np.array([f"{n}.png" for n in range(100)], "S6")
    convert("repack rows.h5 a.h5")
    assert convert("check a.h5").out == "a.h5: whole\n"
    damage(tmp_path / "a.h5", "fastgpu_source", 0)
    assert "a.h5: /fastgpu_source cannot be read" in convert("check a.h5", code=1).out


@pytest.mark.parametrize("command", ["info pipe", "check pipe", "repack pipe y.h5"])
def test_commands_read_no_pipe(tmp_path, convert, command):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is a pipe, a socket or a device, which is not read" in convert(command, code=2).err


def test_info_shows_layout_and_rows(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a/images", data=np.zeros((90, 3, 64, 64), "f4"), chunks=(8, 1, 64, 64), compression=4)
        file["a/labels"] = np.arange(90) % 3
        file["a"].attrs["class_names"] = ["cat", "dog", "owl", "yak"]
        file["odd/images"], file["odd/labels"] = np.zeros((5, 8, 8), "u1"), np.zeros(4, int)
        file["targets/x"] = np.zeros((4, 9))
        file["targets/labels"] = np.array([0.5, np.nan, 2.5, np.inf])
        file["text"], file["scalar"], file["empty"] = ["a", "b"], 3, np.zeros(0)
    shown = convert("info x.h5").out
    for part in (
        "  images   float32 (N, 3, 64, 64), blocks (8, 1, 64, 64) of 128.0 KiB, deflate, no checksums\n",
        "  images   uint8 (5, 8, 8), blocks (5, 8, 8) of 0.3 KiB, plain, no checksums\n",
        "3 of 4 classes: cat 30, dog 30, owl 30",
        "has fields of lengths {'images': 5, 'labels': 4}",
        "targets from 0.5 to 2.5, 2 NaN or infinite\n",
    ):
        assert part in shown


@pytest.mark.slow
def test_info_ends_quietly_in_a_closed_pipe(tmp_path, dense_file):
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does
    words = [sys.executable, str(PROJECT / "convert.py"), "info", dense_file(50)]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


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


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_arrays_of_raw_numbers_keep_their_order(tmp_path, monkeypatch, convert, kind):
    """Also if their first bytes are those of a packed file."""
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1000)
    numbers = np.random.default_rng(0).integers(0, 60_000, 9_000).astype(kind)
    numbers[:1] = np.frombuffer(b"\x1f\x8b\0\0"[: numbers.itemsize], kind)
    numbers.tofile(tmp_path / "x.bin")
    convert("arrays x=x.bin out.h5 --dtype", kind)
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["x"].dtype == kind
        np.testing.assert_array_equal(file["x"][:], numbers)


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


def test_arrays_larger_than_memory_are_not_unpacked(tmp_path, monkeypatch, convert):
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros(1000), y=np.zeros(2000))
    monkeypatch.setattr("fastgpu.convert.arrays.free_host_bytes", lambda: 20_000)
    assert "x.npz holds 0.0 GB of arrays, and 0.0 GB of memory are free" in convert("arrays x.npz o.h5", code=2).err
    convert("arrays x=x.npz::x o.h5")


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
