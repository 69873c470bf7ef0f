"""Tar shards in WebDataset's form, and tar and zip archives of folders, as sources of images."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from fastgpu.convert.images.archives import ImageArchives
from fastgpu.convert.images.members import list_members, read_member
from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import attributes_of
from support.images import photo
from support.sources import numbered_png, numbers_of_images, write_tar, write_zip


def shard(path: Path, numbers: range) -> Path:
    """PNG files, their classes in .cls, and in .json a name, a number and a person."""
    files = {}
    for number in numbers:
        fields = {"label": ["cat", "dog"][number % 2], "age": number / 4, "person": number // 4}
        files[f"some.folder/{number:06d}.png"] = numbered_png(number % 50_000)
        files[f"some.folder/{number:06d}.cls"] = f"{number % 3}\n".encode()
        files[f"some.folder/{number:06d}.json"] = json.dumps(fields).encode()
    return write_tar(path, files)


@pytest.mark.parametrize("n_rows", [1, 3, 500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_tar_shards_are_those_that_tarfile_reads(tmp_path, convert, n_rows):
    size = max(1, -(-n_rows // 3))
    starts = range(0, n_rows, size)
    paths = [shard(tmp_path / f"x-{start:06d}.tar", range(start, min(n_rows, start + size))) for start in starts]
    convert("images 'x-*.tar' kept.h5 --keep-encoded --keep-order")
    told = convert("images 'x-*.tar' mixed.h5").out
    assert "labels: .cls beside each image" in told
    assert f"files of x-*.tar that are not used: {n_rows:,} .json\n" in told
    plain, names = [], []
    for path in paths:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.name.endswith(".png")]
            plain += [archive.extractfile(member).read() for member in members]
            names += [f"{path.name}::{member.name}" for member in members]
    with h5py.File("kept.h5") as file, h5py.File("mixed.h5") as mixed:
        assert file["images/values"][:].tobytes() == b"".join(plain)
        assert np.diff(file["images/indptr"][:]).tolist() == [*map(len, plain)]
        assert file["labels"][:].tolist() == [row % 3 for row in range(n_rows)]
        assert file["fastgpu_source"].asstr()[:].tolist() == names
        row_of = {name: row for row, name in enumerate(names)}
        rows = [row_of[name] for name in mixed["fastgpu_source"].asstr()[:]]
        assert sorted(rows) == [*range(n_rows)]
        assert numbers_of_images(mixed["images"][:]) == [row % 50_000 for row in rows]
        assert mixed["labels"][:].tolist() == [row % 3 for row in rows]


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ("png,cls", [0, 1, 2, 0]),
        ("png,label", [0, 1, 0, 1]),
        ("png,age", [0, 0.25, 0.5, 0.75]),
        ("png,age,cls", [[0, 0], [0.25, 1], [0.5, 2], [0.75, 0]]),
    ],
)
def test_tar_labels_are_files_or_fields_of_json(tmp_path, columns, labels):
    reader = ImageArchives(shard(tmp_path / "x.tar", range(4)), columns=columns.split(","), encoded=True)
    assert reader.labels.tolist() == labels


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"json": '{"any": "owl"}'}, ["owl"]),
        ({"json": '{"label": "owl", "size": 3}'}, ["owl"]),
        ({"txt": " owl\n"}, ["owl"]),
        ({"json": '{"label": true}'}, ["0", "1"]),
    ],
)
def test_tar_labels_are_chosen_if_one_can_be_meant(tmp_path, files, names):
    content = {"a.b/1.jpg": photo(1)} | {f"a.b/1.{suffix}": text.encode() for suffix, text in files.items()}
    assert ImageArchives(write_tar(tmp_path / "x.tar", content), encoded=True).attributes == {"class_names": names}


def test_tar_shards_are_split_by_a_field(tmp_path, convert):
    shard(tmp_path / "x.tar", range(24))
    convert("images x.tar x.h5 --split 0.5 --split-by person")
    people = []
    for split in ("train", "val"):
        with h5py.File(f"x-{split}.h5") as file:
            people.append({number // 4 for number in numbers_of_images(file["images"][:])})
    assert not people[0] & people[1]
    assert len(people[0] | people[1]) == 6


@pytest.mark.parametrize("kind", ["tar", "stored.zip", "deflated.zip"])
def test_archives_of_class_folders_are_read_like_folders(tmp_path, convert, kind):
    """Also if they are in another folder, with files from a Mac, and in folders of splits."""
    names = [f"./photos/{['Training', 'val'][n % 4 == 3]}/{'cat' if n % 2 else 'dog'}/{n}.png" for n in range(20)]
    files = {name: numbered_png(number) for number, name in enumerate(names)}
    files |= {"__MACOSX/photos/Training/cat/._1.png": b"x", "./photos/README": b"x"}
    if kind == "tar":
        write_tar(tmp_path / "x.tar", files)
    else:
        method = zipfile.ZIP_STORED if kind == "stored.zip" else zipfile.ZIP_DEFLATED
        write_zip(tmp_path / f"x.{kind}", files, method)
    told = convert(f"images x.{kind} x.h5").out
    assert f"left out of x.{kind}: 1 hidden files, 1 README" in told
    assert f"classes of x.{kind} are the folders in photos/" in told
    for split, rows in {"train": [n for n in range(20) if n % 4 < 3], "val": range(3, 20, 4)}.items():
        with h5py.File(f"x-{split}.h5") as file:
            numbers = numbers_of_images(file["images"][:])
            assert sorted(numbers) == [*rows]
            assert file["labels"][:].tolist() == [1 - number % 2 for number in numbers]
            assert attributes_of(file)["class_names"] == ["cat", "dog"]
            sources = file["fastgpu_source"].asstr()[:]
            assert [source.rpartition("/")[2] for source in sources] == [f"{number}.png" for number in numbers]


def test_archives_of_folders_are_split_by_their_paths(tmp_path, convert):
    write_zip(tmp_path / "x.zip", {f"cat/p{n // 4}_{n}.png": numbered_png(n) for n in range(24)})
    convert(r"images x.zip x.h5 --split 0.5 --split-by 'p\d+'")
    with h5py.File("x-train.h5") as train, h5py.File("x-val.h5") as val:
        people = [{number // 4 for number in numbers_of_images(file["images"][:])} for file in (train, val)]
    assert not people[0] & people[1]


def test_archives_list_broken_images(tmp_path, convert):
    files = {f"{n}.png": b"no image" if n == 3 else numbered_png(n) for n in range(6)}
    files |= {f"{n}.cls": b"0" for n in range(6) if n != 4}
    write_tar(tmp_path / "x.tar", files)
    assert "1 of 6 rows are broken" in convert("images x.tar x.h5", code=2).err
    assert [path.name for path in tmp_path.glob("*x.h5*")] == ["x.h5.broken.txt"]
    convert("images x.tar x.h5 --on-error skip=50%")
    assert (tmp_path / "x.h5.skipped.txt").read_text().splitlines() == [
        "x.tar::3.png cannot be read: it is not an image that Pillow knows",
        "x.tar::4.png: cls is ''; it is missing",
    ]
    files = {f"cat/{n}.png": numbered_png(n) for n in range(6)}
    content = bytearray(write_zip(tmp_path / "x.zip", files, zipfile.ZIP_STORED).read_bytes())
    content[content.index(numbered_png(2)) + 50] ^= 1
    (tmp_path / "x.zip").write_bytes(content)
    convert("images x.zip y.h5 --on-error skip=20%")
    line = "x.zip::cat/2.png cannot be read: its bytes do not match their checksum in the archive\n"
    assert (tmp_path / "y.h5.skipped.txt").read_text() == line


def test_archive_members_are_read_at_their_places(tmp_path):
    """Whatever the lengths of their names, with an extra field, and in an archive behind something else."""
    files = {"a" * 200 + "/é.txt": b"first", "b": b"", "c": bytes(5000)}
    tar = write_tar(tmp_path / "x.tar", files)
    archive = write_zip(tmp_path / "x.zip", files)
    with zipfile.ZipFile(archive, "a") as file:
        extra = zipfile.ZipInfo("d")
        extra.extra = b"\x01\x99\x04\x00abcd"
        file.writestr(extra, b"last")
    behind = tmp_path / "behind.zip"
    behind.write_bytes(b"#!/bin/sh\n" + archive.read_bytes())
    for path, expected in {tar: files, archive: files | {"d": b"last"}, behind: files | {"d": b"last"}}.items():
        found = {name: read_member(path, place) for name, place in list_members(path).items()}
        assert found == expected


def test_tar_that_ends_early_is_noticed(tmp_path, capsys):
    whole = write_tar(tmp_path / "x.tar", {"a.jpg": photo(1), "a.cls": b"0", "b.jpg": photo(2), "b.cls": b"1"})
    content = whole.read_bytes()
    with tarfile.open(whole) as archive:
        starts = [member.offset for member in archive]
    refused = {
        "inside of a file": content[: starts[2] + 600],
        "a damaged header": content[: starts[2]] + b"x" + content[starts[2] + 1 :],
        "an archive behind another": content + content,
    }
    for name, damaged in refused.items():
        whole.write_bytes(damaged)
        with pytest.raises(UserError, match=r"x.tar cannot be read as a tar archive: "):
            print(name, list_members(whole))
    whole.write_bytes(content[: starts[2]])
    assert [*list_members(whole)] == ["a.jpg", "a.cls"]
    assert "x.tar has no mark of its end: if it was cut off, files are missing" in capsys.readouterr().out


def test_tar_with_links_or_names_that_lead_elsewhere_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    for kind, message in {tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "link", tarfile.FIFOTYPE: "special file"}.items():
        member = tarfile.TarInfo("cat/1.jpg")
        member.type, member.linkname = kind, "/etc/passwd"
        with tarfile.open(path, "w") as archive:
            archive.addfile(member)
        with pytest.raises(UserError, match=f"x.tar: cat/1.jpg is a {message}; pack files alone"):
            list_members(path)
    for name in ("/etc/1.jpg", "../1.jpg", "cat/../../1.jpg"):
        with pytest.raises(UserError, match="which is in no folder of it"):
            list_members(write_tar(path, {name: b"x"}))
    with tarfile.open(path, "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("cat/1.jpg"), io.BytesIO())
    with pytest.raises(UserError, match="x.tar has the file cat/1.jpg twice; pack it again"):
        list_members(path)
