"""CIFAR-10 and CelebA as they are published. Archives are streamed: nothing is unpacked to the disk.

CIFAR-10   https://www.cs.toronto.edu/~kriz/cifar.html, the python or the binary version, .tar.gz or its folder
CelebA     https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html: img_align_celeba, a folder or .zip, and its two lists
"""

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from fastgpu.convert.image_files import Listing, OpenFile
from fastgpu.convert.reading import MAX_ERROR_CHARS, explain_errors
from fastgpu.convert.splits import SPLITS
from fastgpu.images.files import open_file
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import Arrays

MAX_MEMBER_BYTES = 256 << 20
"""No file of either data set is larger, nor is CIFAR-10 as a whole. A larger one is none, or a decompression bomb."""
MAX_CELEBA_BYTES = 8 << 30
"""Maximum size of all unpacked images. They have 1.4 GB."""
CIFAR_SHAPE = (3, 32, 32)
CIFAR_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR_TEST = "test_batch"
N_ATTRIBUTES = 40
ARRAY_GLOBALS = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy._core.multiarray", "_reconstruct")}
"""Functions that a pickle of NumPy arrays needs."""


def open_cifar10(source: Path) -> dict[str, Arrays]:
    """{"train": 50,000 rows, "test": 10,000 rows}: images uint8 (N, 3, 32, 32), labels int64 (N,), class_names.

    Raises UserError if a batch is missing, cut off, or in another format.
    """
    batches = {}
    class_names: list[str] = []
    for name, content in _read_batches(source):
        stem = name.removesuffix(".bin")
        try:
            if stem in (*CIFAR_TRAIN, CIFAR_TEST):
                batches[stem] = parse_batch(content, is_binary=name != stem)
            elif name == "batches.meta":
                class_names = [name.decode() for name in _unpickle(content)[b"label_names"]]
            elif name == "batches.meta.txt":
                class_names = content.decode().split()
        except Exception as error:  # garbage bytes can make a pickle fail in any way
            reason = str(error)[:MAX_ERROR_CHARS]
            raise UserError(f"{source}: {name} is not a batch of CIFAR-10: {reason}; fetch it again") from None
    if missing := [stem for stem in (*CIFAR_TRAIN, CIFAR_TEST) if stem not in batches]:
        archives = "cifar-10-python.tar.gz, cifar-10-binary.tar.gz or its folder"
        raise UserError(f"{source} has no {missing[0]}; give {archives}")
    attributes = {"class_names": class_names} if len(class_names) == 10 else {}

    def join(stems: Sequence[str]) -> Arrays:
        images, labels = (np.concatenate(column) for column in zip(*(batches[stem] for stem in stems), strict=True))
        columns = {"images": images, "labels": labels}
        return Arrays(str(source), columns, attributes, block_rows=np.ones(len(labels), np.int32))

    return {"train": join(CIFAR_TRAIN), "test": join([CIFAR_TEST])}


def _read_batches(source: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the files of a folder or a tar archive that have "batch" in their name, one at a time."""
    if source.is_dir():
        for path in sorted(source.glob("*batch*")):
            with explain_errors(path, "a batch of CIFAR-10"):
                _check_member(source, path.name, path.stat().st_size)
                yield path.name, path.read_bytes()
        return
    with (
        explain_errors(source, "a whole tar archive"),
        LimitedGzip(source) as file,
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        for member in archive:
            name = _check_member(source, member.name, member.size)
            if member.isfile() and "batch" in name and (content := archive.extractfile(member)):
                yield name, content.read()
        while file.read(1 << 20):  # gzip's checksum comes last
            pass


class LimitedGzip(gzip.GzipFile):
    """A gzip file of which at most MAX_MEMBER_BYTES are read. What its headers claim does not matter."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() + (size or 0) > MAX_MEMBER_BYTES:
            raise UserError(f"{self.name} unpacks to more than {MAX_MEMBER_BYTES:,} bytes: this is another archive")
        return super().read(size)


def _check_member(archive: Path, member: str, size: int) -> str:
    """The name of a member of an archive without its folders. Raises UserError if this is another archive."""
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{archive} has a member {member}, which leads out of it: this is another archive")
    if size > MAX_MEMBER_BYTES:
        raise UserError(f"{archive} has a member {member} of {size:,} bytes: this is another archive")
    return path.name


def parse_batch(content: bytes, *, is_binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 (N, 3, 32, 32), labels int64 (N,)) of a file of the binary or of the python version."""
    if is_binary:
        rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + int(np.prod(CIFAR_SHAPE)))
        pixels = rows[:, 1:]
        labels = rows[:, 0].astype(np.int64)
    else:
        batch = _unpickle(content)
        pixels = batch[b"data"]
        labels = np.array(batch[b"labels"], np.int64)
    images = pixels.reshape(-1, *CIFAR_SHAPE)
    if images.dtype != np.uint8 or len(images) != len(labels) or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"{len(images)} images of {images.dtype}, {len(labels)} labels up to {labels.max()}")
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, text, containers and NumPy arrays. A pickle that needs anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes that Python 2 should be able to read
            return lambda text, _: text.encode("latin1")
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in ARRAY_GLOBALS:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which an array does not need")
        return super().find_class(module, name)


def _unpickle(content: bytes) -> Any:
    return _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()


# ---------------------------------------------------------------------------------------------- CelebA


def list_celeba(folder: Path) -> Listing:
    """The images and the official split. Labels are 40 attributes, uint8 (N, 40), 1 where one is present.

    folder: it holds img_align_celeba (or .zip), list_attr_celeba.txt and list_eval_partition.txt. Raises UserError if
    one is missing, or a line of the lists is wrong.
    """
    listing = _read_attributes(folder / "list_attr_celeba.txt")
    part_of = {}
    path = folder / "list_eval_partition.txt"
    for number, line in enumerate(_read_lines(path), 1):
        file, _, part = line.partition(" ")
        if part.strip() not in ("0", "1", "2"):
            raise UserError(f"{path}:{number}: a file and 0, 1 or 2 should stand here")
        part_of[file] = int(part)
    if missing := set(listing.names) - set(part_of):
        raise UserError(f"{path} has no line for {min(missing)}")
    parts = np.array([part_of[name] for name in listing.names])
    splits = {split: np.flatnonzero(parts == number) for number, split in enumerate(SPLITS) if number in parts}
    return listing._replace(splits=splits, open=_image_opener(folder))


def _read_attributes(path: Path) -> Listing:
    lines = _read_lines(path)
    attribute_names = lines[1].split() if len(lines) > 1 else []
    if len(attribute_names) != N_ATTRIBUTES or not lines[0].strip().isdecimal():
        head = f"a line with the number of files and a line with {N_ATTRIBUTES} names"
        raise UserError(f"{path} should begin with {head}")
    n_files = int(lines[0])
    if len(lines) - 2 != n_files:
        raise UserError(f"{path} has {len(lines) - 2:,} files, but its first line says {n_files:,}; fetch it again")
    files = []
    labels = np.empty((n_files, N_ATTRIBUTES), np.uint8)
    for row, line in enumerate(lines[2:]):
        file, *signs = line.split()
        if len(signs) != N_ATTRIBUTES or set(signs) - {"1", "-1"}:
            raise UserError(f"{path}:{row + 3}: a file and {N_ATTRIBUTES} times 1 or -1 should stand here")
        files.append(file)
        labels[row] = [sign == "1" for sign in signs]
    return Listing(str(path.parent), files, labels, {"class_names": attribute_names})


def _read_lines(path: Path) -> list[str]:
    with explain_errors(path, "the published list"):
        return path.read_text(encoding="ascii").splitlines()


def _image_opener(folder: Path) -> OpenFile:
    """Opens images by name, in the folder or in the zip file."""
    images = folder / "img_align_celeba"
    if images.is_dir():
        return lambda name: open_file(images / name)
    packed = images.with_suffix(".zip")
    if not packed.exists():
        raise UserError(f"{folder} has neither img_align_celeba nor img_align_celeba.zip")
    with explain_errors(packed, "a whole zip archive"):
        archive = zipfile.ZipFile(packed)
    members = {_check_member(packed, info.filename, info.file_size): info for info in archive.infolist()}
    if sum(info.file_size for info in members.values()) > MAX_CELEBA_BYTES:
        raise UserError(f"{packed} unpacks to more than {MAX_CELEBA_BYTES:,} bytes: this is another archive")

    def open_member(name: str) -> IO[bytes]:
        if name not in members:
            raise FileNotFoundError(name)
        info = members[name]
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others cannot be unpacked in parts
            raise ValueError(f"it is compressed by method {info.compress_type} of zip, not by deflate")
        with archive.open(info) as member:  # read() alone would unpack more than the size, to check it afterwards
            return io.BytesIO(member.read(info.file_size))

    return open_member
