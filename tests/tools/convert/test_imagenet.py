import csv
import io
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from harness import read_rows
from PIL import Image
from scipy.io import savemat

from fastgpu.storage.store import open_store

CLASSES = ["n01440764", "n02119789", "n03000684"]
IDS = {"n01440764": 3, "n02119789": 1, "n03000684": 2}
"""The numbers of the development kit are not in the order of the names."""
WORDS_OF_VAL = [CLASSES[number * 2 % 3] for number in range(9)]


def photo(number: int) -> bytes:
    file = io.BytesIO()
    side = 16 + number % 5
    Image.fromarray(np.full((side, 20, 3), number * 3 % 256, np.uint8)).save(file, "JPEG")
    return file.getvalue()


def tar_of(files: dict[str, bytes], mode: str = "w:") -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def published(n_train: int = 40) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of train (class/name) and of val (name)."""
    train = {}
    for number in range(n_train):
        name = CLASSES[number % 3]
        train[f"{name}/{name}_{number}.JPEG"] = photo(number)
    val = {f"ILSVRC2012_val_{number + 1:08d}.JPEG": photo(100 + number) for number in range(len(WORDS_OF_VAL))}
    return train, val


def devkit() -> bytes:
    synsets = np.array([(number, name) for name, number in IDS.items()], [("ILSVRC2012_ID", "O"), ("WNID", "O")])
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    truth = "".join(f"{IDS[name]}\n" for name in WORDS_OF_VAL)
    root = "ILSVRC2012_devkit_t12/data"
    files = {f"{root}/meta.mat": meta.getvalue(), f"{root}/ILSVRC2012_validation_ground_truth.txt": truth.encode()}
    return tar_of(files, "w:gz")


def imagenet_in(folder: Path, form: str = "tar", n_train: int = 40) -> Path:
    """ImageNet with few rows. form: tar, kaggle or folders."""
    train, val = published(n_train)
    folder.mkdir(parents=True)
    if form == "tar":
        inner = {}
        for name in CLASSES:
            inner[f"{name}.tar"] = tar_of({path.split("/")[1]: train[path] for path in train if path.startswith(name)})
        (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
        (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_of(val))
        (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(devkit())
        return folder
    base = folder / "ILSVRC/Data/CLS-LOC" if form == "kaggle" else folder
    if form == "folders":
        val = {f"{name}/{path}": val[path] for name, path in zip(WORDS_OF_VAL, val, strict=True)}
    for split, files in (("train", train), ("val", val)):
        for name, content in files.items():
            path = base / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if form == "kaggle":
        with (folder / "LOC_val_solution.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["ImageId", "PredictionString"])
            for name, path in list(zip(WORDS_OF_VAL, val, strict=True))[::-1]:
                lines.writerow([Path(path).stem, f"{name} 111 108 353 400 {name} 1 2 3 4 "])
    return folder


def rows_in(path: Path) -> set[tuple[bytes, str]]:
    rows = read_rows(open_store("x", str(path), {"images": "images", "labels": "labels"}))
    images = rows["images"]
    with h5py.File(path) as file:
        classes = [name.decode() for name in file.attrs["class_names"]]
    assert classes == CLASSES
    values = [images.values[images.offsets[row] : images.offsets[row + 1]].tobytes() for row in range(len(images))]
    return set(zip(values, [classes[label] for label in rows["labels"]], strict=True))


@pytest.mark.parametrize("form", ["tar", "kaggle", "folders"])
def test_every_published_form_gives_each_image_with_its_class(convert, tmp_path, form):
    imagenet_in(tmp_path / "imagenet", form)
    done = convert("imagenet", "imagenet", "x.h5", "--keep-encoded")
    assert done.returncode == 0, done.stderr
    train, val = published()
    assert rows_in(tmp_path / "x-train.h5") == {(content, name.split("/")[0]) for name, content in train.items()}
    assert rows_in(tmp_path / "x-val.h5") == set(zip(val.values(), WORDS_OF_VAL, strict=True))


def test_pixels_can_be_written_too(convert, tmp_path):
    imagenet_in(tmp_path / "imagenet")
    assert convert("imagenet", "imagenet", "x.h5", "--size", "8").returncode == 0
    with h5py.File(tmp_path / "x-train.h5") as file:
        assert file["images"].shape == (40, 3, 8, 8)


def remove_labels(folder: Path) -> None:
    (folder / "ILSVRC2012_devkit_t12.tar.gz").unlink()


def cut_train(folder: Path) -> None:
    path = folder / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[:5000])


def cut_val(folder: Path) -> None:
    _, val = published()
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_of(dict(list(val.items())[:-1])))


def remove_val(folder: Path) -> None:
    (folder / "ILSVRC2012_img_val.tar").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_labels, "imagenet does not say the classes of val: put LOC_val_solution.csv or"),
        (cut_train, "ILSVRC2012_img_train.tar is not a whole tar archive"),
        (cut_val, "has the classes of 9 images of val, but there are 8"),
        (remove_val, "imagenet has neither val/, ILSVRC/Data/CLS-LOC/val/ nor ILSVRC2012_img_val.tar"),
    ],
)
def test_what_is_missing_is_named(convert, tmp_path, damage, message):
    damage(imagenet_in(tmp_path / "imagenet"))
    done = convert("imagenet", "imagenet", "x.h5", "--keep-encoded")
    assert done.returncode != 0
    assert message in done.stderr
