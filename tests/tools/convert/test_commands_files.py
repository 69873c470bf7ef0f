import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import is_ragged, numbered, numbers_of

from fastgpu.convert.summary import advise, columns_of
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.layout import DIGESTS


def rows_of(path: Path) -> tuple[list[int], list[int]]:
    with h5py.File(path) as file:
        return numbers_of(file["images"][:]), file["labels"][:].tolist()


def test_repack_writes_every_row_once_in_an_order_that_the_seed_decides(write, tmp_path, convert):
    source = write(500, classes=500)
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        result = convert("repack", source, tmp_path / f"{number}.h5", "--seed", str(seed))
        assert result.returncode == 0, result.stderr
        assert f"500 rows, order random, seed {seed}, in" in result.stdout
        numbers, labels = rows_of(tmp_path / f"{number}.h5")
        assert numbers == labels
        assert sorted(numbers) == list(range(500))
        orders.append(numbers)
    assert orders[0] == orders[1] != orders[2]
    assert 0.4 < np.mean(np.diff(orders[0]) > 0) < 0.6
    with h5py.File(tmp_path / "0.h5") as file:
        assert attributes_of(file, "")["row_order"] == "random, seed 1"
        assert attributes_of(file, "")["source"] == source
        assert file.attrs["fastgpu_format"] == 1


def test_repack_keeps_the_order_the_attributes_and_the_names_that_are_asked_for(tmp_path, convert):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        group = file.create_group("photos")
        group["x"], group["y"] = numbered(40), np.arange(40)
        group["names"] = np.array(["a"] * 40, dtype=object)
        group.attrs.update(class_names=["cat", "dog"], mean=[3.0], std=[4.0], source="a camera")
    source = f"{tmp_path / 'old.h5'}::/photos"
    result = convert(
        "repack",
        source,
        tmp_path / "new.h5",
        "--keep-order",
        "--compression",
        "gzip",
        "--fields",
        "images=x",
        "labels=y",
    )
    assert result.returncode == 0, result.stderr
    assert rows_of(tmp_path / "new.h5") == (list(range(40)), list(range(40)))
    with h5py.File(tmp_path / "new.h5") as file:
        assert attributes_of(file, "")["class_names"] == ["cat", "dog"]
        assert (file.attrs["mean"], file.attrs["std"]) == (3, 4)
        attributes = attributes_of(file, "")
        assert (attributes["source"], attributes["row_order"]) == ("a camera", "as in the source")
        assert file["images"].compression == "gzip"


def test_rows_that_keep_a_random_order_are_said_to_have_it(write, tmp_path, convert):
    """Not "as in the source", which the file calls the original one."""
    convert("repack", write(100), "shuffled.h5", "--seed", "3")
    result = convert("repack", "shuffled.h5", "kept.h5", "--keep-order")
    assert "100 rows, order random, seed 3, in kept.h5" in result.stdout
    with h5py.File(tmp_path / "shuffled.h5") as shuffled, h5py.File(tmp_path / "kept.h5") as kept:
        assert numbers_of(kept["images"][:]) == numbers_of(shuffled["images"][:])
        assert attributes_of(kept, "")["row_order"] == attributes_of(shuffled, "")["row_order"] == "random, seed 3"


def test_repack_info_and_verify_know_ragged_rows(write_ragged, tmp_path, convert):
    target = tmp_path / "new.h5"
    result = convert("repack", write_ragged(300), target, "--compression", "gzip")
    assert result.returncode == 0, result.stderr
    with h5py.File(target) as file:
        number = file["number"][:]
        assert is_ragged(RaggedArray(file["items/indices"][:], file["items/indptr"][:]), number)
        assert sorted(number) == list(range(300)) != number.tolist()
    assert "other than 1" not in result.stdout
    ratings = tmp_path / "ratings.h5"
    ratings.write_bytes(Path(write_ragged(30)).read_bytes())
    with h5py.File(ratings, "a") as file:
        file["items"].pop("data", None)
        file["items/data"] = np.arange(len(file["items/indices"])) % 5
    assert "items/data has values other than 1, such as 0" in convert("repack", ratings, tmp_path / "b.h5").stdout
    shown = convert("info", target).stdout
    assert "/items/indices  int32 (600,)" in shown
    assert "unequal length" not in shown
    assert convert("check", target).stdout.strip().endswith("whole")
    data = bytearray(target.read_bytes())
    with h5py.File(target) as file:
        data[file["items/indices"].id.get_chunk_info(0).byte_offset + 40] ^= 1
    target.write_bytes(data)
    result = convert("check", target)
    assert result.returncode == 1
    assert "/items/indices: block 0 is damaged" in result.stdout


@pytest.mark.slow
def test_repack_reads_a_dataset_of_the_users_own(tmp_path, convert):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from torch.utils.data import Dataset\n"
        "class Photos(Dataset):\n"
        "    def __init__(self, path): self.rows = int(path)\n"
        "    def __len__(self): return self.rows\n"
        "    def __getitem__(self, i): return np.full((3, 8, 8), i, np.uint8), i\n"
    )
    result = convert("dataset", "mine:Photos", "60", "new.h5")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("mine:Photos called with 60\n")
    (tmp_path / "own.py").write_text(
        "from mine import Photos\nclass Table(Photos):\n    def __getitem__(self, i): return {'x': i, 'y': 2 * i}\n"
    )
    refused = convert("dataset", "own:Table", "60", "table.h5")
    assert " have x, y; data.fields (--fields of convert.py) names images, labels: name what" in refused.stderr
    assert convert("dataset", "own:Table", "60", "table.h5", "--fields", "x=x", "y=y").returncode == 0
    with h5py.File(tmp_path / "new.h5") as file:
        labels = file["labels"][:]
        assert sorted(labels.tolist()) == list(range(60))
        assert labels.tolist() != list(range(60))
        np.testing.assert_array_equal(file["images"][:, 0, 0, 0], labels)


def test_repack_takes_patterns_as_training_does(tmp_path, convert):
    for part in range(3):
        with h5py.File(tmp_path / f"old-{part}.h5", "w") as file:
            file["a/images"], file["a/labels"] = numbered(20), np.arange(20) + 20 * part
    result = convert("repack", "old-*.h5::/a", "new.h5")
    assert result.returncode == 0, result.stderr
    assert sorted(rows_of(tmp_path / "new.h5")[1]) == list(range(60))
    result = convert("repack", "none-*.h5", "new.h5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "no file matches none-*.h5" in result.stderr


def test_a_pattern_does_not_take_in_the_file_that_is_written(tmp_path, convert):
    for part in (1, 2):
        with h5py.File(tmp_path / f"a-{part}.h5", "w") as file:
            file["images"], file["labels"] = numbered(20), np.arange(20)
    assert convert("repack", "a-*.h5", "a-all.h5").returncode == 0
    result = convert("repack", "a-*.h5", "a-all.h5", "--force")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "a-all.h5 is one of the 3 files of SOURCE; choose another name" in result.stderr
    assert convert("repack", "a-[12].h5", "a-all.h5", "--force").returncode == 0
    assert convert("repack", "a-all.h5", "a-all.h5", "--seed", "1", "--force").returncode == 0
    assert sorted(rows_of(tmp_path / "a-all.h5")[1]) == sorted([*range(20)] * 2)


def test_what_was_repacked_is_verified_on_the_way(write, tmp_path, convert):
    assert convert("repack", write(100), tmp_path / "a.h5").returncode == 0
    assert convert("check", tmp_path / "a.h5").stdout == f"{tmp_path / 'a.h5'}: whole\n"
    damage(tmp_path / "a.h5", rows=(3, 70))
    result = convert("check", tmp_path / "a.h5")
    assert result.returncode == 1
    assert "rows 3 to 3: " in result.stdout
    assert "rows 70 to 70: " in result.stdout
    assert result.stdout.endswith("a.h5: 2 blocks are damaged\n")
    result = convert("repack", tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.returncode == 2
    assert "is damaged: its SHA-256 is not the recorded one" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "rows.h5"]


def damage(path: Path, rows: tuple[int, ...]) -> None:
    with h5py.File(path) as file:
        data = file["images"]
        offsets = [data.id.get_chunk_info(row // data.chunks[0]).byte_offset for row in rows]
    with path.open("r+b") as raw:
        for offset in offsets:
            raw.seek(offset + 5)
            byte = raw.read(1)
            raw.seek(offset + 5)
            raw.write(bytes([byte[0] ^ 1]))


def test_verify_tells_what_has_no_checksums_and_finds_chunks_that_cannot_be_decoded(write, tmp_path, convert):
    path = Path(write(64, (1, 32, 32), 8, compression="gzip"))
    result = convert("check", path)
    assert result.returncode == 0
    assert "/images was read, but has no checksums" in result.stdout
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(2)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 10)
        raw.write(b"\xff" * 20)
    result = convert("check", path)
    assert result.returncode == 1
    assert "rows 16 to 23: " in result.stdout


def test_info_shows_the_layout_and_what_to_change(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train/images", data=np.zeros((40, 3, 64, 64), "f4"), chunks=(8, 1, 64, 64), compression=4)
        file.create_dataset("val/images", (4000, 3, 64, 64), "u1", chunks=(1, 3, 64, 64))
        file.create_dataset("test/images", (4000, 3, 64, 64), "u1", chunks=(3000, 3, 64, 64))
    result = convert("info", tmp_path / "x.h5")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "/train/images  float32 (40, 3, 64, 64)" in result.stdout
    assert "15 blocks (8, 1, 64, 64) of 0.12 MiB, gzip, no checksums" in result.stdout
    for part in (
        "/train/images: chunks split rows",
        "/train/images: gzip: decoded anew in each epoch, 21 to 23x slower",
        "/train/images: images as float32",
        "/val/images: chunks of 1 rows",
        "/test/images: blocks of 35 MiB",
    ):
        assert any(line.startswith(f"  advice: {part}") for line in lines), part


def test_info_shows_what_the_rows_hold(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((90, 3, 8, 8), "u1"), np.arange(90) % 3
        file.attrs.update(class_names=["cat", "dog", "owl"], mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
    shown = convert("info", tmp_path / "x.h5").stdout
    for part in (
        "rows     90",
        "uint8 (N, 3, 8, 8)",
        "3 classes",
        "  owl          30",
        "mean     [1. 2. 3.], std [4. 5. 6.]",
    ):
        assert part in shown


def test_info_tells_of_a_file_sorted_by_class_and_of_one_that_cannot_be_trained_on(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["sorted/images"] = np.zeros((3000, 3, 200, 200), "u1")  # more than a pool holds
        file["sorted/labels"] = np.arange(3000) // 300
        file["odd/images"], file["odd/labels"] = np.zeros((5, 8, 8), "u1"), np.zeros(4, int)
    result = convert("info", tmp_path / "x.h5")
    assert result.returncode == 0, result.stderr
    assert "/sorted is sorted by class: 100 % of neighbouring rows share a label" in result.stdout
    assert "has fields of unequal length {'images': 5, 'labels': 4}" in result.stdout


def test_a_file_as_repack_writes_it_needs_no_advice(write, tmp_path, convert):
    assert convert("repack", write(300), tmp_path / "new.h5").returncode == 0
    columns = columns_of(str(tmp_path / "new.h5"))
    assert [column.name for column in columns] == ["images", "labels"]  # and not those of the checksums
    assert advise(columns) == []
    with h5py.File(tmp_path / "new.h5") as file:
        assert set(file[DIGESTS]) == {"images", "labels"}


VAL = "rows.h5::/val"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("repack", "rows.h5", "x.h5"), "rows.h5 has no rows in /, but /train, /val; name one"),
        (("repack", "rows.h5::/test", "x.h5"), "rows.h5 has no group /test; it has train, val"),
        (("repack", "absent.h5", "x.h5"), "absent.h5 does not exist"),
        (("repack", VAL, "text.h5"), "text.h5 exists; choose another name, or --force"),
        (("repack", VAL, "text.h5/x.h5"), "text.h5 is not a folder; write to another"),
        (("repack", VAL, "x.h5", "--fields", "images"), "--fields is images; it should be NAME=DATASET"),
        (("info", "text.h5"), "text.h5 is not an HDF5 file"),
        (("check", "absent.h5"), "absent.h5 does not exist"),
    ],
)
def test_what_a_person_can_mend_is_one_line(tmp_path, arguments, message, convert):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for group in ("train", "val"):
            file[f"{group}/images"], file[f"{group}/labels"] = numbered(10), np.arange(10)
    (tmp_path / "text.h5").write_text("text")
    result = convert(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x.h5").exists()


def test_classes_without_rows_are_counted(tmp_path, convert):
    labels = np.tile([2, 5, 42], 10)
    np.savez(tmp_path / "x.npz", images=numbered(30), labels=labels)
    shown = convert("arrays", "x.npz", "x.h5", "--keep-order").stdout
    assert "labels   int64 (N): used as classes 0 to 42, 40 of them without rows\n" in shown
    assert re.search(r"label +rows\n  2 +10\n  5 +10\n  42 +10\n", shown)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.attrs["class_names"] = [str(number) for number in range(43)]
    shown = convert("info", tmp_path / "x.h5").stdout
    assert "43 classes, 40 of them without rows\n" in shown


def test_targets_that_are_no_numbers_are_counted(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = numbered(4)
        file["labels"] = np.array([0.5, np.nan, 2.5, np.inf])
    assert "targets, from 0.5 to 2.5, and 2 that are NaN or infinite\n" in convert("info", tmp_path / "x.h5").stdout
    np.savez(tmp_path / "y.npz", images=numbered(4), labels=np.array([[0.5, 1], [2.5, 3], [0, 0], [1, 1]]))
    assert "targets, from 0 to 3\n" in convert("arrays", "y.npz", "y.h5").stdout


def test_rows_with_nan_are_counted_when_they_are_written(tmp_path, convert):
    x = np.ones((40, 3), np.float32)
    x[[3, 7], [0, 1]] = np.nan, np.inf
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.ones(40, np.float32))
    assert "  x: NaN or infinity in 2 rows\n" in convert("arrays", "x=x.npy", "y=y.npy", "a.h5").stdout
