import gzip
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from fastgpu.convert import cifar_celeba
from fastgpu.convert.cifar_celeba import CIFAR_TRAIN, list_celeba, open_cifar10
from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import attributes_of

STEMS = [*CIFAR_TRAIN, "test_batch"]
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ROWS = 20  # of a batch, where CIFAR-10 has 10,000


def batch_of(stem: str) -> tuple[np.ndarray, np.ndarray]:
    """(ROWS, 3072) uint8, (ROWS,): all pixels of a row are its number in the data set."""
    numbers = np.arange(ROWS) + ROWS * STEMS.index(stem)
    return np.repeat(numbers[:, None], 3072, axis=1).astype(np.uint8), numbers % 10


def cifar_files(kind: str) -> dict[str, bytes]:
    """{name in the archive: bytes}, as published."""
    folder, files = {"python": "cifar-10-batches-py", "binary": "cifar-10-batches-bin"}[kind], {}
    for stem in STEMS:
        pixels, labels = batch_of(stem)
        if kind == "binary":
            files[f"{folder}/{stem}.bin"] = np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()
        else:
            files[f"{folder}/{stem}"] = pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2)
    if kind == "binary":
        files[f"{folder}/batches.meta.txt"] = ("\n".join(NAMES) + "\n\n").encode()
    else:
        files[f"{folder}/batches.meta"] = pickle.dumps({b"label_names": [name.encode() for name in NAMES]}, protocol=2)
    return files | {f"{folder}/readme.html": b"<html>"}


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar10_as_published(tmp_path, kind, packed):
    if packed:
        source = tar_of(tmp_path / "cifar.tar.gz", cifar_files(kind))
    else:
        for name, data in cifar_files(kind).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        source = (tmp_path / name).parent
    parts = open_cifar10(source)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 5 * ROWS, "test": ROWS}
    for name, start in (("train", 0), ("test", 5 * ROWS)):
        images = parts[name].column("images")
        assert images.shape[1:] == (3, 32, 32)
        assert (images == np.arange(start, start + len(images))[:, None, None, None]).all()
        assert parts[name].column("labels").tolist() == [n % 10 for n in range(start, start + len(images))]
        assert parts[name].attributes["class_names"] == NAMES


def test_python_2_pickles_of_numpy_1_are_read():
    data, labels = batch_of("test_batch")
    text = pickle.dumps({b"data": data, b"labels": labels.tolist()}, protocol=2)
    old = text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert old != text
    images, found = cifar_celeba.parse_batch(old, is_binary=False)
    assert (images == data.reshape(-1, 3, 32, 32)).all()
    assert (found == labels).all()


def test_cifar10_to_a_file_that_can_be_trained_on(tmp_path, convert):
    tar_of(tmp_path / "cifar-10-python.tar.gz", cifar_files("python"))
    result = convert("cifar10", "cifar-10-python.tar.gz", "cifar10.h5")
    assert result.returncode == 0, result.stderr
    with h5py.File(tmp_path / "cifar10-train.h5") as file:
        numbers = file["images"][:, 0, 0, 0]
        assert sorted(numbers) == list(range(5 * ROWS)) != numbers.tolist()
        assert (file["labels"][:] == numbers % 10).all()
        assert attributes_of(file, "")["class_names"] == NAMES
    assert (tmp_path / "cifar10-test.h5").exists()


class Hostile:
    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cifar-10-batches-py/data_batch_3": pickle.dumps(Hostile(), protocol=2)}, "wants posix.system"),
        ({"cifar-10-batches-py/data_batch_3": b"garbage"}, "data_batch_3 is not a batch of CIFAR-10"),
        ({"cifar-10-batches-py/data_batch_3": pickle.dumps({b"data": [1]})}, "data_batch_3 is not a batch of CIFAR-10"),
        ({"cifar-10-batches-py/data_batch_3": None}, "has no data_batch_3"),
        ({"../batch": b""}, "member ../batch, which leads out of it"),
        ({"/etc/batch": b""}, "member /etc/batch, which leads out of it"),
    ],
)
def test_a_bad_archive_is_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    files = {name: data for name, data in (cifar_files("python") | change).items() if data is not None}
    with pytest.raises(UserError, match=message):
        open_cifar10(tar_of(tmp_path / "x.tar.gz", files))
    assert not (tmp_path / "owned").exists()


def test_an_archive_that_would_explode_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar_celeba, "MAX_MEMBER_BYTES", 1 << 20)
    source = tar_of(tmp_path / "x.tar.gz", {"cifar-10-batches-py/data_batch_1": bytes(2 << 20)})
    assert source.stat().st_size < 1 << 14
    with pytest.raises(UserError, match="member .* of 2,097,152 bytes"):
        open_cifar10(source)


@pytest.mark.parametrize("kind", ["zeros", "members", "header"])
def test_an_archive_is_not_unpacked_beyond_its_limit(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(cifar_celeba, "MAX_MEMBER_BYTES", 1 << 20)
    source = tar_of(tmp_path / "x.tar.gz", {f"other{n}": bytes((1 << 19) * (kind == "members")) for n in range(4)})
    with gzip.open(source) as file:
        content = file.read()
    if kind == "zeros":
        content += bytes(4 << 20)
    if kind == "header":  # a header of the format pax, which tarfile reads as a whole
        member = tarfile.TarInfo("x")
        member.type, member.size = tarfile.XHDTYPE, 4 << 20
        content = member.tobuf() + bytes(4 << 20)
    source.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="x.tar.gz unpacks to more than 1,048,576 bytes"):
        open_cifar10(source)


def test_a_cut_archive_is_refused(tmp_path):
    source = tar_of(tmp_path / "x.tar.gz", cifar_files("python"))
    whole = source.read_bytes()
    for damaged in (whole[:-300], whole[:1000], whole[:-6] + b"xx" + whole[-4:]):
        source.write_bytes(damaged)
        with pytest.raises(UserError, match="fetch it again"):
            open_cifar10(source)


# ---------------------------------------------------------------------------------------------- CelebA


def celeba_in(folder: Path, packed: bool, rows: int = 12) -> np.ndarray:
    """The published files with so many images, whose grey is 20 times their number; returns the attributes."""
    folder.mkdir()
    signs = np.random.default_rng(0).choice([-1, 1], (rows, 40))
    names = [f"attribute_{number}" for number in range(40)]
    lines = [f"{row + 1:06d}.jpg  " + " ".join(f"{sign:2d}" for sign in signs[row]) for row in range(rows)]
    (folder / "list_attr_celeba.txt").write_text("\n".join([str(rows), " ".join(names), *lines]) + "\n")
    parts = [f"{row + 1:06d}.jpg {0 if row < rows // 2 else 1 if row < rows * 3 // 4 else 2}" for row in range(rows)]
    (folder / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
    images = {}
    for row in range(rows):
        file = io.BytesIO()
        Image.new("RGB", (178, 218), (20 * row,) * 3).save(file, "JPEG", quality=95)
        images[f"img_align_celeba/{row + 1:06d}.jpg"] = file.getvalue()
    if packed:
        with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as archive:
            for name, data in images.items():
                archive.writestr(name, data)
    else:
        (folder / "img_align_celeba").mkdir()
        for name, data in images.items():
            (folder / name).write_bytes(data)
    return (signs > 0).astype(np.uint8)


@pytest.mark.parametrize("packed", [True, False])
def test_celeba_as_published(tmp_path, packed, convert):
    expected = celeba_in(tmp_path / "celeba", packed)
    result = convert("celeba", "celeba", "out.h5")
    assert result.returncode == 0, result.stderr
    seen = {}
    for split, rows in (("train", 6), ("val", 3), ("test", 3)):
        with h5py.File(tmp_path / f"out-{split}.h5") as file:
            assert file["images"].shape == (rows, 3, 218, 178)
            assert file["labels"].dtype == np.uint8
            assert len(file.attrs["class_names"]) == 40
            for image, attributes in zip(file["images"], file["labels"], strict=True):
                number = round(float(image.mean()) / 20)
                seen[number] = split
                np.testing.assert_array_equal(attributes, expected[number])
    assert [seen[n] for n in range(12)] == ["train"] * 6 + ["val"] * 3 + ["test"] * 3


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("list_attr_celeba.txt", " 1 ", " 2 ", r"list_attr_celeba.txt:3: a file and 40 times 1 or -1"),
        ("list_attr_celeba.txt", "12\n", "13\n", r"has 12 files, but its first line says 13"),
        (
            "list_attr_celeba.txt",
            "attribute_0 ",
            "",
            r"should begin with a line with the number of files and a line with 40 names",
        ),
        ("list_eval_partition.txt", "000002.jpg 0", "000002.jpg 3", r"list_eval_partition.txt:2: a file and 0, 1 or 2"),
        ("list_eval_partition.txt", "000002.jpg 0\n", "", r"has no line for 000002.jpg"),
    ],
)
def test_a_bad_list_is_named_with_its_line(tmp_path, file, old, new, message):
    celeba_in(tmp_path / "celeba", packed=False)
    path = tmp_path / "celeba" / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        list_celeba(tmp_path / "celeba")


def test_an_image_that_is_missing_from_the_zip_is_named(tmp_path, convert):
    celeba_in(tmp_path / "celeba", packed=True)
    with zipfile.ZipFile(tmp_path / "celeba/img_align_celeba.zip") as old:
        kept = {name: old.read(name) for name in old.namelist() if "000003" not in name}
    with zipfile.ZipFile(tmp_path / "celeba/img_align_celeba.zip", "w") as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
    result = convert("celeba", "celeba", "out.h5")
    assert result.returncode == 2
    assert "000003.jpg does not exist" in result.stderr
    assert not list(tmp_path.glob("*out*"))


def test_a_zip_that_would_explode_is_refused(tmp_path, monkeypatch, convert):
    celeba_in(tmp_path / "celeba", packed=True)
    path = tmp_path / "celeba/img_align_celeba.zip"
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert "it is compressed by method 12 of zip, not by deflate" in convert("celeba", "celeba", "out.h5").stderr
    monkeypatch.setattr(cifar_celeba, "MAX_CELEBA_BYTES", 1000)
    result = convert("celeba", "celeba", "out.h5")
    assert "img_align_celeba.zip unpacks to more than 1,000 bytes: this is another archive" in result.stderr
