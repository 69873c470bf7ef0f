"""ImageNet (ILSVRC 2012) as it is published. Archives are read where they lie: nothing is unpacked to the disk.

images   train/<class>/*.JPEG and val/*.JPEG, or ILSVRC2012_img_train.tar (a tar of tars) and ILSVRC2012_img_val.tar
labels   of val: val/<class>/*.JPEG, or one of these beside it
         LOC_val_solution.csv (Kaggle; its images are in ILSVRC/Data/CLS-LOC)
         ILSVRC2012_devkit_t12.tar.gz (the number of each image's class; SciPy reads which class that is)

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", arXiv:1409.0575.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from fastgpu.convert.cifar_celeba import LimitedGzip
from fastgpu.convert.image_files import Listing, list_images
from fastgpu.convert.reading import explain_errors
from fastgpu.convert.tables import read_table
from fastgpu.images.files import is_image, open_file
from fastgpu.process.launch import UserError

KAGGLE_FOLDER = "ILSVRC/Data/CLS-LOC"
KAGGLE_LIST = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
DEVKIT_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
DEVKIT_META = "data/meta.mat"


def list_imagenet(folder: Path) -> dict[str, Listing]:
    """{"train", "val"}: the published split. Classes are numbered in the order of their names (WordNet ids).

    Raises UserError if images or the labels of val are missing, or do not belong together.
    """
    listings = {split: _find_images(folder, split) for split in ("train", "val")}
    words = {split: [name.split("/")[1] for name in listing.names] for split, listing in listings.items()}
    if loose := [name for name in listings["train"].names if name.count("/") == 1]:
        raise UserError(f"{folder}: {Path(loose[0]).name} of train is not in the folder of a class")
    names = listings["val"].names
    if not all(name.count("/") > 1 for name in names):
        words["val"] = _read_val_classes(folder, [name.removeprefix("val/") for name in names])
    classes = sorted(set(words["train"]))
    if unknown := sorted(set(words["val"]) - set(classes)):
        raise UserError(f"{folder}: images of val are of the class {unknown[0]}, of which train has none")
    attributes = {"class_names": classes}
    return {
        split: listing._replace(labels=np.searchsorted(classes, words[split]).astype(np.int64), attributes=attributes)
        for split, listing in listings.items()
    }


def _find_images(folder: Path, split: str) -> Listing:
    """The images of a split, in a folder or in a tar file: `split/class/file` or `split/file`, sorted. No labels."""
    root = folder if (folder / split).is_dir() else folder / KAGGLE_FOLDER
    if (root / split).is_dir():
        names = sorted(f"{split}/{name}" for name in list_images(root / split))
        return Listing(str(folder), names, None, {}, open=lambda name: open_file(root / name))
    path = folder / f"ILSVRC2012_img_{split}.tar"
    if not path.exists():
        raise UserError(f"{folder} has neither {split}/, {KAGGLE_FOLDER}/{split}/ nor {path.name}")
    with explain_errors(path, "a whole tar archive"), path.open("rb") as file:
        places = {f"{split}/{name}": place for name, place in _index_tar(file, 0).items()}
    descriptor = os.open(path, os.O_RDONLY)  # for as long as the process lives

    def open_member(name: str) -> IO[bytes]:
        offset, size = places[name]
        return io.BytesIO(os.pread(descriptor, size, offset))

    return Listing(str(folder), sorted(places), None, {}, open=open_member)


def _index_tar(file: IO[bytes], start: int) -> dict[str, tuple[int, int]]:
    """{name: (first byte in the file, size)} of the images in a tar archive, and in the archives in it: `archive/name`.

    start: the byte of the file at which the archive begins.
    """
    places: dict[str, tuple[int, int]] = {}
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        members = [member for member in archive if member.isfile()]
    for member in members:
        path = PurePosixPath(member.name)
        if path.suffix == ".tar":
            inner = _index_tar(file, member.offset_data)
            places |= {f"{path.stem}/{name}": place for name, place in inner.items()}
        elif is_image(path.name):
            places[path.name] = (member.offset_data, member.size)
    return places


def _read_val_classes(folder: Path, names: Sequence[str]) -> list[str]:
    """The class of each image of val. names: sorted."""
    path = folder / KAGGLE_LIST
    if path.exists():
        words, _ = read_table(path, ["ImageId", "PredictionString"], None)
        class_of = dict(zip(words["ImageId"], [word.split()[0] for word in words["PredictionString"]], strict=True))
        if missing := [name for name in names if Path(name).stem not in class_of]:
            raise UserError(f"{path} has no line for {missing[0]}")
        return [class_of[Path(name).stem] for name in names]
    path = folder / DEVKIT
    if not path.exists():
        raise UserError(f"{folder} does not say the classes of val: put {KAGGLE_LIST} or {DEVKIT} into it")
    if not find_spec("scipy"):
        raise UserError(f"{path} has its classes in a file of MATLAB, which SciPy reads: pip install scipy")
    with explain_errors(path, "the published development kit"):
        with LimitedGzip(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            truth, meta = (_read_member(archive, name) for name in (DEVKIT_TRUTH, DEVKIT_META))
        synsets = import_module("scipy.io").loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        wnid_of = dict(zip(synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist(), strict=True))
        classes = [wnid_of[int(line)] for line in truth.split()]
    if len(classes) != len(names):
        raise UserError(f"{path} has the classes of {len(classes):,} images of val, but there are {len(names):,}")
    return classes


def _read_member(archive: tarfile.TarFile, suffix: str) -> bytes:
    """The bytes of the member whose name ends so. Raises LookupError if there is none."""
    for member in archive.getmembers():
        if member.name.endswith(suffix) and (content := archive.extractfile(member)):
            return content.read()
    raise LookupError(f"it has no {suffix}")
