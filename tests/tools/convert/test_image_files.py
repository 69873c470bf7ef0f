import io
import itertools
import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from fastgpu.convert.images.readers import ImageFolder, ImageTable, Masks, PixelTable
from fastgpu.convert.summary import fields_of, inspect
from fastgpu.dataset.source import open_dataset
from fastgpu.imagefiles import read_image, read_preprocessing
from fastgpu.images.crops import Preprocessing
from fastgpu.process.launch import UserError
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.store import open_store
from support import PROJECT
from support.ranks import printed_by
from support.rows import read_rows


def folder_of(root: Path, classes: dict[str, int], size: tuple[int, int] = (8, 10)) -> Path:
    """PNG files whose pixels are their running number, a sub-folder a class."""
    number = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for _ in range(count):
            Image.fromarray(np.full((*size, 3), number, np.uint8)).save(root / name / f"photo {number:03d} é.png")
            number += 1
    return root


def labels_by_number(path: Path) -> dict[int, int]:
    """{the number that an image is made of: its label}."""
    with h5py.File(path) as file:
        images = file["images"][:]
        assert (images == images[:, :1, :1, :1]).all()
        return dict(zip(images[:, 0, 0, 0].tolist(), file["labels"][:].tolist(), strict=True))


# ---------------------------------------------------------------------------------------------- folders and tables


def test_folder_is_a_class_a_sub_folder(tmp_path, capsys):
    """Links to folders are followed once, and not back into the folder."""
    photos = folder_of(tmp_path / "photos", {"cat": 2, "dog": 3, "dog/old": 1, ".ipynb_checkpoints": 1})
    elsewhere = folder_of(tmp_path, {"elsewhere": 4})
    for name in ("cat/x.eps", "dog/1.HEIC", "dog/2.heic"):
        (photos / name).write_bytes(b"no image that Pillow reads by itself")
    Image.new("RGB", (4, 4)).save(photos / "loose.png")
    links = {"cat/loop": "..", "cat/other": "../dog/old", "kitty": "cat", "dog/again.PNG": "photo 002 é.png"}
    links |= {name: str(elsewhere / "elsewhere") for name in ("owl", "owls")}
    for name, target in links.items():
        (photos / name).symlink_to(target)
    listing = ImageFolder(photos)
    assert listing.class_names == ["cat", "dog", "owl"]
    assert np.bincount(listing.labels).tolist() == [2, 3 + 1 + 1, 4]
    assert {"dog/again.PNG", "dog/old/photo 005 é.png"} <= {*listing.paths}
    shown = capsys.readouterr().out
    assert f"left out of {photos}: 2 .heic, 1 .ipynb_checkpoints, 1 .eps (" in shown
    assert "which are left out: 1\n" in shown


def test_folder_named_like_splits(tmp_path):
    folder_of(tmp_path, {"Training/cat": 2, "Training/dog": 3, "valid/cat": 1, "valid/owl": 1})
    listing = ImageFolder(tmp_path)
    assert listing.class_names == ["cat", "dog", "owl"]
    assert listing.labels[listing.splits == 0].tolist() == [0, 0, 1, 1, 1]
    assert listing.labels[listing.splits == 1].tolist() == [0, 2]


def test_folder_becomes_two_files(tmp_path, convert):
    folder_of(tmp_path / "my photos", {"cat": 20, "dog": 10, "größe": 10})
    shown = convert("images 'my photos' new/out.h5 --split 0.8 --dry-run").out
    for part in ("32 train, 8 val", "uint8 (N, 3, 8, 10)", "3 of 3 classes: cat 16, dog 8, größe 8"):
        assert part in shown
    assert not (tmp_path / "new").exists()
    convert("images 'my photos' out.h5 --split 0.8")
    train, val = labels_by_number(tmp_path / "out-train.h5"), labels_by_number(tmp_path / "out-val.h5")
    assert (len(train), len(val)) == (32, 8)
    assert train | val == {n: 0 if n < 20 else 1 if n < 30 else 2 for n in range(40)}
    convert("images 'my photos' small.h5 --size 4x5 --resize exact")
    with h5py.File(tmp_path / "out-train.h5") as file, h5py.File(tmp_path / "small.h5") as small:
        assert attributes_of(file)["class_names"] == ["cat", "dog", "größe"]
        assert [data["images"].shape for data in (file, small)] == [(32, 3, 8, 10), (40, 3, 4, 5)]
        assert read_preprocessing(file.attrs["preprocessing"]) == Preprocessing((8, 10))
        assert read_preprocessing(small.attrs["preprocessing"]) == Preprocessing((4, 5), "exact")


def test_folder_leaves_out_broken_images(tmp_path, convert):
    """And each row names its file, also once its file was repacked."""
    folder = folder_of(tmp_path / "photos", {"a": 15, os.fsdecode(b"b/\xff"): 10})
    (folder / "a/photo 005 é.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")  # for Ghostscript
    Image.new("RGB", (9, 9)).save(folder / "a/photo 007 é.png")
    convert("images photos x.h5 --on-error skip=10% --split 0.5")
    assert (tmp_path / "x.h5.skipped.txt").read_text(encoding="utf-8").splitlines() == [
        "photos/a/photo 005 é.png cannot be read: it is not an image that Pillow knows",
        "photos/a/photo 007 é.png cannot be read: images are uint8 (N, 3, 9, 9), in the first row uint8 (N, 3, 8, 10) "
        "(--size makes images alike)",
    ]
    convert("repack x-train.h5 x-val.h5 again.h5 --seed 3")
    assert labels_by_number(tmp_path / "again.h5") == {n: int(n >= 15) for n in range(25) if n not in (5, 7)}
    for name in ("x-train.h5", "x-val.h5", "again.h5"):
        assert fields_of(inspect(name)) == {"/": {"images": "images", "labels": "labels"}}
        with h5py.File(tmp_path / name) as file:
            numbers = file["images"][:, 0, 0, 0].tolist()
            found = file["fastgpu_source"].asstr()[:].tolist()
        folders = ["a" if number < 15 else r"b/\xff" for number in numbers]
        assert found == [f"photos/{each}/photo {n:03d} é.png" for each, n in zip(folders, numbers, strict=True)]


@pytest.mark.parametrize("kind", ["table", "folder"])
def test_images_of_a_patient_stay_together(tmp_path, convert, kind):
    patients = [f"p{n % 20:02d}" for n in range(60)]
    for n, patient in enumerate(patients):
        path = tmp_path / f"photos/{'ab'[n % 2]}/{patient}-{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 2), n, np.uint8)).save(path)
    lines = [f"photos/{'ab'[n % 2]}/{patient}-{n}.png,{n % 2},{patient}" for n, patient in enumerate(patients)]
    (tmp_path / "x.csv").write_text("\n".join(["path,label,who", *lines]))
    words = "x.csv x.h5 --split-by who" if kind == "table" else "photos x.h5 --split-by '(p[0-9]+)-'"
    printed = convert("images", words, "--split 0.8,0.1,0.1").out
    assert "whose values stay together: train 16 with 80.0%, val 2 with 10.0%, test 2 with 10.0% of the rows" in printed
    numbers = [[*labels_by_number(tmp_path / f"x-{split}.h5")] for split in ("train", "val", "test")]
    found = [{patients[n] for n in each} for each in numbers]
    assert sum(map(len, numbers)) == 60
    assert len(set.union(*found)) == sum(map(len, found)) == 20
    if kind == "folder":
        refused = convert("images photos y.h5 --split 0.8 --split-by p0.", code=2).err
        assert "30 of 60 rows are broken" in refused
        assert "photos/a/p10-10.png: nothing in its path fits --split-by p0." in refused


def test_table_lists_all_broken_rows(tmp_path, convert):
    """Those of the table before an image is read. Rows that are left out are in no count."""
    folder_of(tmp_path, {"all": 20})
    paths = [f"all/photo {n:03d} é.png" for n in range(20)]
    lines = [f"{path},{n % 3}" for n, path in enumerate(paths)]
    lines[4], lines[5], lines[7], lines[9] = f"{paths[4]},x", ",1", f"{paths[7]},1,2", f"{paths[9]},"
    (tmp_path / "x.csv").write_text("\n".join(["path,label", *lines]), encoding="utf-8")
    (tmp_path / paths[2]).write_text("no image")
    reasons = [
        "x.csv:6: label is 'x'; labels should be numbers",
        "x.csv:7: path is ''; it is missing",
        "x.csv:9: 3 columns; its header has 2; complete the row",
        "x.csv:11: label is ''; it is missing",
    ]
    for words in ("images x.csv out.h5", "images x.csv out.h5 --dry-run", "images x.csv out.h5 --on-error skip=15%"):
        printed = convert(words, code=2).err.splitlines()
        assert printed[0].startswith("error: 4 of 20 rows are broken")
        assert [line.startswith(f"  {reason}") for line, reason in zip(printed[1:], reasons, strict=True)] == [True] * 4
    listed = (tmp_path / "out.h5.broken.txt").read_text().splitlines()
    assert [f"  {line}" for line in listed] == printed[1:]

    printed = convert("images x.csv out.h5 --on-error skip=30% --split 0.5").out
    assert "rows     7 train, 9 val\n" in printed
    assert "broken   4 rows, which are left out; the first is x.csv:6: label is 'x'" in printed
    found = labels_by_number(tmp_path / "out-train.h5") | labels_by_number(tmp_path / "out-val.h5")
    assert found == {n: n % 3 for n in range(20) if n not in (2, 4, 5, 7, 9)}
    skipped = (tmp_path / "out.h5.skipped.txt").read_text(encoding="utf-8").splitlines()
    assert f"{paths[2]} cannot be read: " in skipped[0]
    assert skipped[1:] == listed
    with pytest.raises(ValueError, match="x.csv:6: label is 'x'"):
        ImageTable("x.csv")[4]


def test_table_with_labels_and_splits(tmp_path, convert):
    folder_of(tmp_path / "photos", {"all": 6})
    words = ["Training", "PublicTest", "PrivateTest"]
    lines = [f"photos/all/photo {n:03d} é.png\t{n % 2}\t{-1 if n % 3 else 1}\t{words[n % 3]}" for n in range(6)]
    (tmp_path / "x.csv").write_text("\n".join(["path\tlabel\tthird\tUsage", *lines]), encoding="utf-8")
    assert "2 attributes" in convert("images x.csv made/here/out.h5 --split-by Usage --columns path,label,third").out
    for number, split in enumerate(("train", "val", "test")):
        found = labels_by_number(tmp_path / f"made/here/out-{split}.h5")
        assert found == {n: [n % 2, int(n % 3 == 0)] for n in (number, number + 3)}
    assert "drop one" in convert("images x.csv o.h5 --split-by Usage --split 0.5", code=2).err


def test_table_without_a_header_loses_no_row(tmp_path, convert):
    folder_of(tmp_path / "photos", {"all": 4})
    lines = [f"train,{'cat' if n % 2 else 'dog'},photos/all/photo {n:03d} é.png" for n in range(4)]
    (tmp_path / "x.csv").write_text("\n".join(lines))
    told = convert("images x.csv x.h5", code=2).err
    assert "it seems to have no header: --no-header calls the columns 1, 2, ..." in told
    convert("images x.csv x.h5 --no-header --columns 3,2 --split-by 1 --keep-order")
    with h5py.File(tmp_path / "x-train.h5") as file:
        assert file["labels"][:].tolist() == [1, 0, 1, 0]
        assert file["images"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_names_unfit_for_a_terminal_are_escaped(tmp_path):
    names = ["고양이".encode("cp949"), b"\x1b[31m", "é".encode()]
    folder_of(tmp_path / "photos", {os.fsdecode(name): 4 for name in names})
    (tmp_path / "photos" / os.fsdecode(names[0]) / "broken\x1b[2J.png").write_text("no image")
    command = [sys.executable, PROJECT / "convert.py", "images", "photos", "x.h5", "--on-error", "skip"]
    shown = printed_by(command, tmp_path, PYTHONIOENCODING="ascii")
    assert all(f"{name} " in shown for name in (r"\xb0\xed\xbe\xe7\xc0\xcc", r"\x1b[31m", r"\xe9"))
    assert "\x1b" not in shown + (tmp_path / "x.h5.skipped.txt").read_text(encoding="utf-8")
    with h5py.File(tmp_path / "x.h5") as file:
        assert {*attributes_of(file)["class_names"]} == {r"\xb0\xed\xbe\xe7\xc0\xcc", "\x1b[31m", "é"}


def test_files_not_regular_are_reported(tmp_path, convert):
    folder = folder_of(tmp_path / "photos", {"a": 4})
    os.mkfifo(folder / "a/pipe.png")
    (folder / "a/null.png").symlink_to("/dev/null")
    (folder / "a/._photo.png").write_text("a part of a file from a Mac")
    assert "left out of photos: 1 hidden files (" in convert("images photos x.h5 --on-error skip=50%").out
    lines = (tmp_path / "x.h5.skipped.txt").read_text().splitlines()
    assert lines == [f"photos/a/{name}.png cannot be read: it is no regular file" for name in ("null", "pipe")]
    with pytest.raises(ValueError, match="it is no regular file"):
        read_image(folder / "a/pipe.png", Preprocessing(), (3, 8, 10))


def test_table_with_an_image_twice(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("path,label\na.png,dog\nb.png,cat\n./a.png,cat\n")
    assert ImageTable(tmp_path / "x.csv", encoded=True).labels.tolist() == [1, 0, 0]
    assert "an earlier line names, perhaps for another split: 1\n" in capsys.readouterr().out


def test_reader_is_a_dataset(tmp_path, convert):
    """It gives the rows that the file would have, and the names of the classes."""
    folder_of(tmp_path / "photos", {"cat": 3, "dog": 5})
    convert("images photos x.h5 --keep-order")
    fields = {"images": "images", "labels": "labels"}
    source = open_dataset("data.train", "photos", fields, factory="fastgpu.convert.images.readers:ImageFolder")
    assert source.attributes["class_names"] == ["cat", "dog"]
    with h5py.File("x.h5") as file:
        for name in fields:
            np.testing.assert_array_equal([source.dataset[row][name] for row in range(8)], file[name][:])


# ---------------------------------------------------------------------------------------------- masks


def test_masks_follow_their_images(tmp_path, convert):
    """Images of one name in two folders, masks with another suffix, and one without an image."""
    for number in range(8):
        for kind in ("images", "masks"):
            (tmp_path / f"{kind}/{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 10, 3), number, np.uint8)).save(tmp_path / f"images/{number % 2}/{number // 2}.png")
        mask = np.full((8, 10), number % 4, np.uint8)
        mask[0] = 255
        Image.fromarray(mask).save(tmp_path / f"masks/{number % 2}/{number // 2}.tif")
    Image.fromarray(mask).save(tmp_path / "masks/stray.tif")
    assert "left out: 1\n" in convert("images images out.h5 --masks masks --split 0.75 --size 3").out
    numbers = []
    for split in ("train", "val"):
        with h5py.File(tmp_path / f"out-{split}.h5") as file:
            numbers += file["images"][:, 0, 0, 0].tolist()
            assert (file["masks"].shape[1:], file["masks"].dtype) == ((3, 3), np.uint8)
            np.testing.assert_array_equal(file["masks"][:], file["images"][:, 0] % 4)
            assert file.attrs["n_classes"] == 4  # of both splits together
    assert sorted(numbers) == [*range(8)]
    Image.fromarray(mask).save(tmp_path / "masks/1/3.png")
    with pytest.raises(UserError, match="masks has masks of the same name with different suffixes"):
        Masks(tmp_path / "images", tmp_path / "masks")


def test_masks_of_two_values(tmp_path, convert):
    values = np.tile(np.array([0, 255], np.uint8), (4, 2))
    folder_of(tmp_path, {"images": 9}, (4, 4))
    for folder in ("masks", "grey"):
        (tmp_path / folder).mkdir()
    for number, image in enumerate((tmp_path / "images").iterdir()):
        Image.fromarray(values).save(tmp_path / "grey" / image.name)
        Image.fromarray(values).convert("1" if number % 3 == 0 else "L").save(tmp_path / "masks" / image.name)
    refused = convert("images images out.h5 --masks grey", code=2).err
    assert refused == "error: images: no mask has a class above 0; if 255 is one, --binary-masks says so\n"
    convert("images images out.h5 --masks masks --binary-masks")
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["masks"][:], np.broadcast_to(values // 255, (9, 4, 4)))
        assert file.attrs["n_classes"] == 2


def masked(root: Path, masks: list[np.ndarray], name: str = "{}.png", orientations: tuple[int, ...] = ()) -> None:
    """Images that are 255 where their mask is 1, with EXIF orientations, and the masks as they were drawn on them."""
    for number, mask in enumerate(masks):
        exif = Image.Exif()
        exif[0x0112] = orientations[number] if orientations else 1
        for kind in ("images", "masks"):
            (root / kind).mkdir(exist_ok=True)
        image = np.repeat(np.uint8(255) * (mask == 1)[..., None], 3, 2)
        Image.fromarray(image).save(root / f"images/{number}.png", exif=exif)
        Image.fromarray(mask).save(root / "masks" / name.format(number))


@pytest.mark.parametrize("size", [(16, 16), (16, 12)])
def test_masks_of_stored_pixels_are_never_turned_in_silence(tmp_path, convert, size):
    mask = np.zeros(size, np.uint8)
    mask[2:7, 1:4] = 1
    orientations = range(1, 9)
    masked(tmp_path, [mask] * 8, orientations=tuple(orientations))
    n_unclear = 7 if size[0] == size[1] else 3
    told = convert("images images x.h5 --masks masks --size 16 --resize exact", code=2).err
    assert f"{n_unclear} of 8 rows are broken" in told
    assert told.count("nothing says whether its mask is turned; --masks-fit shown, or stored") == n_unclear
    done = convert("images images x.h5 --masks masks --size 16 --resize exact --masks-fit stored").out
    assert "changed  masks turned as the EXIF orientation of their images says: 7 of 8 images" in done
    with h5py.File("x.h5") as file:
        wrong = (file["masks"][:] == 1) != (file["images"][:, 0] > 127)
        assert wrong.mean() < 0.05  # borders of resized images
        assert file["masks"][:].any((1, 2)).all()


def test_masks_of_shown_pixels_are_kept_where_exif_turns_images(tmp_path, convert):
    mask = np.zeros((8, 8), np.uint8)
    mask[1, 2] = 1
    masked(tmp_path, [mask] * 3, orientations=(1, 3, 9))
    convert("images images x.h5 --masks masks --masks-fit shown")
    with h5py.File("x.h5") as file:
        assert (file["masks"][:] == mask).all()
    assert "--masks-fit has no meaning for images" in convert("images images y.h5 --masks-fit shown", code=2).err


def test_masks_with_a_common_ending_are_found(tmp_path, convert):
    masks = [np.full((4, 4), 1 + number % 2, np.uint8) for number in range(12)]
    masked(tmp_path, masks, "{}_mask.tif")
    told = "masks in masks are taken for the images without _mask at the end of the name\n"
    assert told in convert("images images x.h5 --masks masks --keep-order").out
    with h5py.File("x.h5") as file:
        order = [int(Path(each).stem) for each in file["fastgpu_source"].asstr()[:]]
        assert file["masks"][:, 0, 0].tolist() == [1 + number % 2 for number in order]
    (tmp_path / "masks/3_mask.tif").rename(tmp_path / "masks/3-mask.tif")
    refused = convert("images images y.h5 --masks masks", code=2).err
    assert "12 of 12 images have no mask in masks: 0.png, 1.png, " in refused
    assert "names have to be equal but for the suffix; there are 0_mask.tif, 10_mask.tif, 11_mask.tif\n" in refused
    for number in range(12):  # two masks of each image
        for ending in ("a", "b"):
            Image.fromarray(masks[0]).save(tmp_path / f"masks/{number}{ending}.png")
    assert "12 of 12 images have no mask" in convert("images images y.h5 --masks masks", code=2).err


def test_masks_show_and_doubt_their_classes(tmp_path, convert):
    def shown(*masks: np.ndarray) -> str:
        masked(tmp_path, [mask.astype(np.uint8).reshape(4, -1) for mask in masks])
        return convert("images images x.h5 --masks masks --force").out

    classes = np.arange(8)
    assert "warning" not in (told := shown(classes, classes // 2, np.append(classes[1:], 255)))
    assert "3 rows in x.h5, n_classes 8\n" in told
    assert "warning: 3 values of 201 classes occur in the masks: " in shown(*3 * [classes // 3 * 100])
    assert "warning: 144 values of 144 classes occur" in shown(*(np.arange(48) + 48 * n for n in range(3)))
    mixed = shown(classes % 2, classes % 2 * 255, classes % 2)
    assert "warning: masks/1.png and others of 0 and 255 alone have no class but 0; if 255 is one, write all" in mixed
    masked(tmp_path, 3 * [np.arange(64, dtype=np.uint8).reshape(8, 8)])
    refused = convert("images images x.h5 --masks masks --force", code=2).err
    assert "its mask has 64 values, as soft edges and photos have; save the number of a class for each" in refused


# ---------------------------------------------------------------------------------------------- files as they are


def files_in(path: Path) -> list[bytes]:
    """The image files that are the rows of a file."""
    column = read_rows(open_store("x", str(path), {"images": "images"}))["images"]
    return [column.values[start:stop].tobytes() for start, stop in itertools.pairwise(column.offsets)]


def test_encoded_files_are_kept_byte_for_byte(convert, tmp_path):
    y, x = np.mgrid[:40, :60]
    files = {}
    for number in range(40):
        path = tmp_path / f"photos/{'ab'[number % 2]}/{number:02d}.{'png' if number % 10 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        waves = np.stack([y * 3, x * 2, (x + y + number) % 128], 2).astype(np.uint8)
        Image.fromarray(waves[: 30 + number % 7]).save(path)
        files[path.read_bytes()] = number % 2
    convert("images photos x.h5 --keep-encoded")
    convert("images photos pixels.h5 --size 30x60")
    convert("repack x.h5 y.h5 --seed 3")
    rows, again = files_in(tmp_path / "x.h5"), files_in(tmp_path / "y.h5")
    assert rows != again
    assert sorted(rows) == sorted(again)
    with h5py.File("x.h5") as file, h5py.File("pixels.h5") as pixels:
        assert dict(zip(rows, file["labels"][:], strict=True)) == files
        assert file["images"].attrs["codec"] == b"jpeg+png"
        for name in ("mean", "std"):
            np.testing.assert_allclose(file.attrs[name], pixels.attrs[name], atol=8)
    convert("check x.h5")
    assert "images of any size" in convert("info x.h5").out
    convert("images photos small.h5 --keep-encoded --size 20")
    images = [Image.open(io.BytesIO(data)) for data in files_in(tmp_path / "small.h5")]
    assert {(image.format, min(image.size)) for image in images} == {("JPEG", 20)}


@pytest.mark.parametrize("flags", ["", "--keep-encoded"])
def test_images_that_lose_something_are_counted(tmp_path, convert, flags):
    folder = folder_of(tmp_path / "photos", {"a": 2})
    Image.fromarray(np.full((8, 10), 300, np.uint16)).save(folder / "a/deep.png")
    Image.fromarray(np.zeros((8, 10), np.int32)).save(folder / "a/deeper.tif")
    Image.new("RGBA", (10, 8)).save(folder / "a/clear.png")
    Image.new("CMYK", (10, 8)).save(folder / "a/print.jpg")
    frames = [Image.new("RGB", (10, 8), (value, 0, 0)) for value in (0, 90)]
    for kind in ("webp", "png", "tiff", "gif"):
        frames[0].save(folder / f"a/frames.{kind}", save_all=True, append_images=frames[1:])
    shown = convert("images photos x.h5 --on-error skip=20%", flags).out
    of = "of 9 images"
    assert sorted(line.strip() for line in shown.splitlines() if line.startswith("  changed")) == [
        f"changed  16 bits to 8 (to keep them: a float32 array of the images, `convert.py arrays`): 1 {of}",
        *([f"changed  re-encoded: too large, not upright, or neither RGB nor grey: 1 {of}"] if flags else []),
        f"changed  the first of several frames or pages, without the others: 4 {of}",
        f"changed  without the transparency: 1 {of}",
    ]
    (deeper,) = Path("x.h5.skipped.txt").read_text().splitlines()
    assert "a/deeper.tif cannot be read: its pixels are integers of 32 bits, or floats; scale them" in deeper


# ---------------------------------------------------------------------------------------------- pixels in a CSV


@pytest.mark.parametrize(("names", "separator"), [("pixels", " "), ("pixel0;pixel1;pixel2;pixel10", ";")])
def test_pixels_in_one_column_or_many(tmp_path, convert, names, separator):
    usage = {"Training": "train", "PublicTest": "val", "PrivateTest": "test"}
    lines = [f"{n};{separator.join([str(n), '2', '3', '4'])};{word}" for n, word in enumerate(usage)]
    (tmp_path / "fer.csv").write_text("\n".join([f"label;{names};Usage", *lines]))
    convert("pixels fer.csv fer.h5 --split-by Usage")
    for number, split in enumerate(usage.values()):
        with h5py.File(tmp_path / f"fer-{split}.h5") as file:
            assert file["images"][:].tolist() == [[[[number, 2], [3, 4]]]]
            assert file["labels"][:].tolist() == [number]
            assert attributes_of(file)["class_names"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("header", "end", "options"),
    [
        ("mood , pixels\n", "", {}),
        ("mood , pixels,note\n", ",x", {"label": "mood"}),
        ("", "", {"label": "1", "has_header": False}),
    ],
)
def test_pixels_label_column(tmp_path, header, end, options):
    rows = [f"{row}{end}" for row in ("very sad,1 2 3 4", "very sad,5 6 7 8", "glad,9 10 11 12")]
    (tmp_path / "x.csv").write_text(header + "\n".join(rows))
    source = PixelTable(tmp_path / "x.csv", **options)
    assert np.ravel([source[row]["images"] for row in range(3)]).tolist() == [*range(1, 13)]
    assert source.labels.tolist() == [1, 1, 0]
    assert source.class_names == ["glad", "very sad"]
