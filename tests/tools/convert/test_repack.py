from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import is_ragged, numbered, numbers_of

from fastgpu.convert.summary import fields_of, inspect
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.layout import DIGESTS
from fastgpu.storage.store import open_store


def rows_of(path: Path) -> tuple[list[int], list[int]]:
    with h5py.File(path) as file:
        return numbers_of(file["images"][:]), file["labels"][:].tolist()


def test_repack_writes_every_row_once(write, tmp_path, convert):
    source = write(500, classes=500)
    convert("repack", source, "x.h5", "--seed", "1")
    numbers, labels = rows_of(tmp_path / "x.h5")
    assert numbers == labels != list(range(500))
    assert sorted(numbers) == list(range(500))
    with h5py.File(tmp_path / "x.h5") as file:
        assert attributes_of(file)["row_order"] == "random, seed 1"
        assert attributes_of(file)["source"] == source
        assert file.attrs["fastgpu_format"] == 1


def test_repack_keeps_the_order_the_attributes_and_the_names_that_are_asked_for(tmp_path, convert):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        group = file.create_group("photos")
        group["x"], group["y"] = numbered(40), np.arange(40)
        group["names"] = np.array(["a"] * 40, dtype=object)
        group.attrs.update(class_names=["cat", "dog"], mean=[3.0], std=[4.0], source="a camera")
    convert("repack old.h5::/photos new.h5 --keep-order --compression gzip --fields images=x labels=y")
    assert rows_of(tmp_path / "new.h5") == (list(range(40)), list(range(40)))
    with h5py.File(tmp_path / "new.h5") as file:
        assert attributes_of(file)["class_names"] == ["cat", "dog"]
        assert (file.attrs["mean"], file.attrs["std"]) == (3, 4)
        attributes = attributes_of(file)
        assert (attributes["source"], attributes["row_order"]) == ("a camera", "as in the source")
        assert file["images"].compression == "gzip"


def test_rows_that_keep_a_random_order_are_said_to_have_it(write, tmp_path, convert):
    """Not "as in the source", which the file calls the original one."""
    convert("repack", write(100), "shuffled.h5", "--seed", "3")
    result = convert("repack shuffled.h5 kept.h5 --keep-order")
    assert "  row_order: random, seed 3\n" in result.stdout
    with h5py.File(tmp_path / "shuffled.h5") as shuffled, h5py.File(tmp_path / "kept.h5") as kept:
        assert numbers_of(kept["images"][:]) == numbers_of(shuffled["images"][:])
        assert attributes_of(kept)["row_order"] == attributes_of(shuffled)["row_order"] == "random, seed 3"


def test_repack_info_and_verify_know_ragged_rows(write_ragged, tmp_path, convert):
    target = tmp_path / "new.h5"
    convert("repack", write_ragged(300), target, "--compression", "gzip")
    with h5py.File(target) as file:
        number = file["number"][:]
        assert is_ragged(RaggedArray(file["items/indices"][:], file["items/indptr"][:]), number)
        assert sorted(number) == list(range(300)) != number.tolist()
    shown = convert("info", target).stdout
    assert "/items/indices  int32 (600,)" in shown
    assert "fields of lengths" not in shown
    assert convert("check", target).stdout.strip().endswith("whole")
    data = bytearray(target.read_bytes())
    with h5py.File(target) as file:
        data[file["items/indices"].id.get_chunk_info(0).byte_offset + 40] ^= 1
    target.write_bytes(data)
    result = convert("check", target, code=1)
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
    result = convert("dataset mine:Photos 60 new.h5")
    assert result.stdout.startswith("mine:Photos called with 60\n")
    (tmp_path / "own.py").write_text(
        "from mine import Photos\nclass Table(Photos):\n    def __getitem__(self, i): return {'x': i, 'y': 2 * i}\n"
    )
    refused = convert("dataset own:Table 60 table.h5", code=2)
    assert " have x, y; data.fields (--fields of convert.py) names images, labels: name what" in refused.stderr
    convert("dataset own:Table 60 table.h5 --fields x y")
    with h5py.File(tmp_path / "new.h5") as file:
        labels = file["labels"][:]
        assert sorted(labels.tolist()) == list(range(60))
        assert labels.tolist() != list(range(60))
        np.testing.assert_array_equal(file["images"][:, 0, 0, 0], labels)


def test_repack_takes_patterns_as_training_does(tmp_path, convert):
    for part in range(3):
        with h5py.File(tmp_path / f"old-{part}.h5", "w") as file:
            file["a/images"], file["a/labels"] = numbered(20), np.arange(20) + 20 * part
    convert("repack old-*.h5::/a new.h5")
    assert sorted(rows_of(tmp_path / "new.h5")[1]) == list(range(60))
    result = convert("repack none-*.h5 new.h5", code=2)
    assert result.stderr.count("\n") == 1
    assert "no file matches none-*.h5" in result.stderr


def test_a_pattern_does_not_take_in_the_file_that_is_written(tmp_path, convert):
    for part in (1, 2):
        with h5py.File(tmp_path / f"a-{part}.h5", "w") as file:
            file["images"], file["labels"] = numbered(20), np.arange(20)
    convert("repack a-*.h5 a-all.h5")
    result = convert("repack a-*.h5 a-all.h5 --force", code=2)
    assert result.stderr.count("\n") == 1
    assert "a-all.h5 is one of the 3 files of SOURCE; choose another name" in result.stderr
    convert("repack a-[12].h5 a-all.h5 --force")
    convert("repack a-all.h5 a-all.h5 --seed 1 --force")
    assert sorted(rows_of(tmp_path / "a-all.h5")[1]) == sorted([*range(20)] * 2)


def test_what_was_repacked_is_verified_on_the_way(write, tmp_path, convert):
    convert("repack", write(100), tmp_path / "a.h5")
    assert convert("check", tmp_path / "a.h5").stdout == f"{tmp_path / 'a.h5'}: whole\n"
    damage(tmp_path / "a.h5", rows=(3, 70))
    result = convert("check", tmp_path / "a.h5", code=1)
    assert "rows 3 to 3: " in result.stdout
    assert "rows 70 to 70: " in result.stdout
    assert result.stdout.endswith("a.h5: 2 blocks are damaged\n")
    result = convert("repack", tmp_path / "a.h5", tmp_path / "b.h5", code=2)
    assert "is damaged: its SHA-256 is another one" in result.stderr
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
    assert "/images was read, but has no checksums" in result.stdout
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(2)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + 10)
        raw.write(b"\xff" * 20)
    result = convert("check", path, code=1)
    assert "rows 16 to 23: " in result.stdout


def test_info_shows_the_layout_and_what_the_rows_hold(tmp_path, convert):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a/images", data=np.zeros((90, 3, 64, 64), "f4"), chunks=(8, 1, 64, 64), compression=4)
        file["a/labels"] = np.arange(90) % 3
        file["a"].attrs.update(class_names=["cat", "dog", "owl", "yak"], mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
        file["odd/images"], file["odd/labels"] = np.zeros((5, 8, 8), "u1"), np.zeros(4, int)
        file["sorted/images"] = np.zeros((3000, 3, 200, 200), "u1")  # more than a pool holds
        file["sorted/labels"] = np.arange(3000) // 300
        file["targets/x"] = np.zeros((4, 9))
        file["targets/labels"] = np.array([0.5, np.nan, 2.5, np.inf])
        file["text"], file["scalar"], file["empty"] = ["a", "b"], 3, np.zeros(0)
    result = convert("info x.h5")
    for part in (
        "/a/images  float32 (90, 3, 64, 64)",
        "blocks (8, 1, 64, 64) of 0.12 MiB, deflate, no checksums",
        "rows     90",
        "3 of 4 classes: cat 30, dog 30, owl 30",
        "mean: [1.0, 2.0, 3.0]",
        "has fields of lengths {'images': 5, 'labels': 4}",
        "/sorted is sorted by class: 100% of neighbouring rows share a label",
        "targets from 0.5 to 2.5, 2 NaN or infinite\n",
        "`python convert.py repack` writes such rows",
    ):
        assert part in result.stdout


def test_a_file_as_repack_writes_it_needs_no_repack(write, tmp_path, convert):
    convert("repack", write(300), "new.h5")
    assert [str(each.path) for each in inspect("new.h5")] == ["/images", "/labels"]  # and not those of the checksums
    assert "convert.py repack" not in convert("info new.h5").stdout
    convert("repack new.h5 small.h5 --compression gzip")
    assert "convert.py repack" in convert("info small.h5").stdout
    with h5py.File(tmp_path / "new.h5") as file:
        assert set(file[DIGESTS]) == {"images", "labels"}


def test_the_fields_of_a_file_can_be_opened(write_ragged):
    path = write_ragged(30)
    with h5py.File(path, "a") as file:
        file["items/data"] = file["items/indices"][:] / 8
    fields = fields_of(inspect(path))
    assert fields == {"/": {"items": "items", "items_values": "items/data", "number": "number"}}
    assert len(open_store("data.train", path, fields["/"])) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("repack rows.h5 x.h5", "rows.h5 has no rows in /, but /train, /val"),
        ("repack rows.h5::/test x.h5", "rows.h5 has no group /test; it has train, val"),
        ("repack absent.h5 x.h5", "absent.h5 does not exist"),
        ("info text.h5", "text.h5 is not an HDF5 file"),
        ("check absent.h5", "absent.h5 does not exist"),
    ],
)
def test_what_a_person_can_mend_is_one_line(tmp_path, arguments, message, convert):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for group in ("train", "val"):
            file[f"{group}/images"], file[f"{group}/labels"] = numbered(10), np.arange(10)
    (tmp_path / "text.h5").write_text("text")
    result = convert(arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x.h5").exists()
