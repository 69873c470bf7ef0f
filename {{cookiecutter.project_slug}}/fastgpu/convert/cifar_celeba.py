"""CIFAR-10 and CelebA as they are published, read where they lie: archives are streamed, nothing is extracted.

CIFAR-10   https://www.cs.toronto.edu/~kriz/cifar.html, the python or the binary version, .tar.gz or its folder
CelebA     https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html: img_align_celeba, a folder or .zip, and its two lists
"""

import gzip
import io
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from fastgpu.convert.image_files import ImageFiles, Listing, OnError, Shape, choose
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import Arrays

MEMBER_BYTES = 256 << 20  # no file of either data set is larger; an archive that says so is another, or a bomb
GZIP = b"\x1f\x8b"
CIFAR_SHAPE = (3, 32, 32)
CIFAR_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
CELEBA_SPLITS = ("train", "val", "test")  # 0, 1, 2 of list_eval_partition.txt
ATTRIBUTES = 40


def cifar10(source: Path) -> dict[str, Arrays]:
    """{"train": 50,000 rows, "test": 10,000}: images uint8 (N, 3, 32, 32), labels (N,) int64, class_names.

    Raises UserError if a batch is missing, cut or not of this format.
    """
    batches, names = {}, list[str]()
    for member, data in _members(source):
        stem = member.name.removesuffix(".bin")
        try:
            if stem in (*CIFAR_TRAIN, "test_batch"):
                batches[stem] = _cifar_binary(data) if member.suffix == ".bin" else _cifar_pickled(data)
            elif member.name == "batches.meta":
                names = [name.decode() for name in _plain(data)[b"label_names"]]
            elif member.name == "batches.meta.txt":
                names = data.decode().split()
        except Exception as error:  # garbage bytes can make a pickle fail in any way
            raise UserError(f"{source}: {member} is not a batch of CIFAR-10: {error}; fetch it again") from None
    if missing := [name for name in (*CIFAR_TRAIN, "test_batch") if name not in batches]:
        raise UserError(
            f"{source} has no {missing[0]}; give cifar-10-python.tar.gz, cifar-10-binary.tar.gz or its folder"
        )
    attributes = {"class_names": names} if len(names) == 10 else {}

    def join(stems: list[str]) -> Arrays:
        images, labels = (np.concatenate(parts) for parts in zip(*(batches[stem] for stem in stems), strict=True))
        return Arrays(str(source), {"images": images, "labels": labels}, attributes, np.ones(len(labels), np.int32))

    return {"train": join(CIFAR_TRAIN), "test": join(["test_batch"])}


def _cifar_binary(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + int(np.prod(CIFAR_SHAPE)))
    return _checked(rows[:, 1:], rows[:, 0].astype(np.int64))


def _cifar_pickled(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    found = _plain(data)
    return _checked(found[b"data"], np.array(found[b"labels"], np.int64))


def _checked(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    images = pixels.reshape(-1, *CIFAR_SHAPE)
    if images.dtype != np.uint8 or len(images) != len(labels) or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"{len(images)} images of {images.dtype}, {len(labels)} labels up to {labels.max()}")
    return images, labels


_OF_AN_ARRAY = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
_BYTES = ("_codecs", "encode")  # Python 3 writes bytes so for Python 2


class _Plain(pickle.Unpickler):
    """Numbers, text, containers and NumPy arrays: a pickle that names anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _BYTES:
            return lambda text, _: text.encode("latin1")
        if (module, name) not in _OF_AN_ARRAY:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which an array does not need")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _plain(data: bytes) -> Any:
    return _Plain(io.BytesIO(data), encoding="bytes").load()


def _members(source: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """(name, bytes) of the files of a folder or a tar archive, one at a time."""
    if source.is_dir():
        for path in sorted(source.glob("*batch*")):
            yield PurePosixPath(path.name), path.read_bytes()
        return
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(source.open("rb"))
            if file.peek(2)[:2] == GZIP:
                file = stack.enter_context(gzip.open(file))
            archive = stack.enter_context(tarfile.open(fileobj=file, mode="r|"))
            for member in archive:
                name = PurePosixPath(member.name)
                _refuse(source, name, member.size)
                if member.isfile() and "batch" in name.name and (content := archive.extractfile(member)):
                    yield name, content.read()
            while file.read(1 << 20):  # gzip's checksum comes last
                pass
    except FileNotFoundError:
        raise UserError(f"{source} does not exist (looked in {Path.cwd()})") from None
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{source} is not a whole tar archive: {error}; fetch it again") from None


def _refuse(archive: Path, member: PurePosixPath, size: int) -> None:
    if member.is_absolute() or ".." in member.parts:
        raise UserError(f"{archive} has a member {member}, which leads out of it: it is not what it should be")
    if size > MEMBER_BYTES:
        raise UserError(f"{archive} has a member {member} of {size:,} bytes: it is not what it should be")


def celeba(folder: Path, shape: Shape, on_error: OnError) -> dict[str, ImageFiles]:
    """{"train", "val", "test"}: the official split; labels are 40 attributes, uint8 (N, 40), 1 where one is present.

    folder: holds img_align_celeba (or .zip), list_attr_celeba.txt and list_eval_partition.txt. Raises UserError if one
    is missing, or a line of the lists is not what it should be.
    """
    attributes_path, partition_path = folder / "list_attr_celeba.txt", folder / "list_eval_partition.txt"
    lines = _lines(attributes_path)
    names = lines[1].split() if len(lines) > 1 else []
    if len(names) != ATTRIBUTES or not lines[0].strip().isdecimal():
        raise UserError(f"{attributes_path}: a line with their number and {ATTRIBUTES} names should come first")
    files, labels = [], np.empty((len(lines) - 2, ATTRIBUTES), np.uint8)
    for row, line in enumerate(lines[2:]):
        file, *signs = line.split()
        if len(signs) != ATTRIBUTES or set(signs) - {"1", "-1"}:
            raise UserError(f"{attributes_path}:{row + 3}: a file and {ATTRIBUTES} times 1 or -1 should stand here")
        files.append(file)
        labels[row] = [sign == "1" for sign in signs]
    if len(files) != int(lines[0]):
        raise UserError(f"{attributes_path} has {len(files):,} files and says {int(lines[0]):,}: fetch it again")
    part_of = {}
    for number, line in enumerate(_lines(partition_path), 1):
        file, _, part = line.partition(" ")
        if part.strip() not in ("0", "1", "2"):
            raise UserError(f"{partition_path}:{number}: a file and 0, 1 or 2 should stand here")
        part_of[file] = int(part)
    if missing := set(files) - set(part_of):
        raise UserError(f"{partition_path} has no line for {min(missing)}")
    listing = Listing(files, labels, None, {"class_names": names})
    parts, open_file = np.array([part_of[file] for file in files]), _opener(folder)
    return {
        split: ImageFiles(str(folder), choose(listing, rows), open_file, shape, on_error)
        for number, split in enumerate(CELEBA_SPLITS)
        if len(rows := np.flatnonzero(parts == number))
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist (looked in {Path.cwd()})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not the published list: {error}") from None


def _opener(folder: Path) -> Callable[[str], IO[bytes]]:
    """Opens images by name, in the folder or the zip file; from any thread."""
    images, packed = folder / "img_align_celeba", folder / "img_align_celeba.zip"
    if images.is_dir():
        return lambda name: (images / name).open("rb")
    try:
        archive = zipfile.ZipFile(packed)
    except FileNotFoundError:
        raise UserError(f"{folder} has neither img_align_celeba nor img_align_celeba.zip") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{packed} is not a whole zip archive: {error}; fetch it again") from None
    members = {}
    for info in archive.infolist():
        name = PurePosixPath(info.filename)
        _refuse(packed, name, info.file_size)
        members[name.name] = info

    def open_member(name: str) -> IO[bytes]:
        if name not in members:
            raise FileNotFoundError(name)
        return io.BytesIO(archive.read(members[name]))

    return open_member
