import io
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from fastgpu.convert.image_files import Listing, list_csv, list_folder, split_listing
from fastgpu.process.launch import UserError

RNG = np.random.default_rng(0)


def pixels(height: int = 30, width: int = 40) -> np.ndarray:
    """A smooth picture, which JPEG keeps, that has no symmetry."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 200 // height, columns * 200 // width, (rows + columns) % 50 * 4], axis=2).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def folder_of(root: Path, classes: dict[str, int], size: tuple[int, int] = (8, 10)) -> Path:
    """PNG files whose pixels are their running number, a sub-folder a class."""
    number = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for _ in range(count):
            Image.fromarray(np.full((*size, 3), number, np.uint8)).save(root / name / f"photo {number:03d} é.png")
            number += 1
    return root


# ---------------------------------------------------------------------------------------------- which files


def test_a_folder_has_a_class_a_sub_folder(tmp_path, capsys):
    folder_of(tmp_path, {"cat": 2, "dog": 3})
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "dog" / "deeper").mkdir()
    (tmp_path / "dog" / "photo 002 é.png").rename(tmp_path / "dog" / "deeper" / "x.PNG")
    listing = list_folder(tmp_path)
    assert listing.labels.tolist() == [0, 0, 1, 1, 1]
    assert listing.attributes["class_names"] == ["cat", "dog"]
    assert sorted(listing.names)[2] == "dog/deeper/x.PNG"
    assert "1 files" in capsys.readouterr().out


def test_a_folder_without_classes_is_refused(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    with pytest.raises(UserError, match="no sub-folders, one for each class; .* in a CSV"):
        list_folder(tmp_path)


def test_a_csv_has_numbers_or_names(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('file,kind\r\na.png,dog\r\n"b, c.png",cat\r\n', encoding="utf-8-sig")
    listing = list_csv(path, ("file", "kind"), None)
    assert (listing.names, listing.labels.tolist(), listing.lines) == (["a.png", "b, c.png"], [1, 0], [2, 3])
    assert listing.attributes["class_names"] == ["cat", "dog"]
    path.write_text("path,label\na.png,3\nb.png,0\n")
    listing = list_csv(path, ("path", "label"), None)
    assert (listing.labels.tolist(), len(listing.attributes["class_names"])) == ([3, 0], 4)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="none.csv does not exist"):
        list_csv(tmp_path / "none.csv", ("path", "label"), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.png,1\nb.png,-1\n", r":3: label -1 is out of range; allowed are 0 to 1"),
        ("path,label\na.png,1\nb.png,7\n", r":3: label 7 is out of range; allowed are 0 to 1"),
        ("path,label\na.png\n", r":2: a path or a label is missing"),
        ("path,label\n,1\n", r":2: a path or a label is missing"),
        ("path,kind\na.png,1\n", r"no column label; it has path, kind; name the two with --columns"),
        ("", r"no column path; it has none"),
    ],
)
def test_a_bad_csv_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        list_csv(tmp_path / "x.csv", ("path", "label"), 2)


def test_a_split_takes_its_share_of_each_class_once(tmp_path):
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    listing = Listing([str(n) for n in range(113)], labels, {}, list(range(113)))
    first, second = split_listing(listing, 0.8, seed=1)
    assert np.bincount(first.labels).tolist() == [80, 8, 2]
    assert sorted(map(int, first.names + second.names)) == list(range(113))
    assert [str(line) for line in first.lines] == first.names
    assert split_listing(listing, 0.8, seed=1)[0].names == first.names != split_listing(listing, 0.8, seed=2)[0].names


# ---------------------------------------------------------------------------------------------- the command


def rows_of(path: Path) -> dict[int, int]:
    """{the number that an image is made of: its label}."""
    with h5py.File(path) as file:
        images = file["images"][:]
        assert (images == images[:, :1, :1, :1]).all()
        return dict(zip(images[:, 0, 0, 0].tolist(), file["labels"][:].tolist(), strict=True))


def test_a_folder_becomes_a_file_for_training_and_one_for_validation(tmp_path, convert):
    folder_of(tmp_path / "my photos", {"cat": 20, "dog": 10, "größe": 10})
    result = convert("images", "my photos", "out.h5", "--split", "0.8")
    assert result.returncode == 0, result.stderr
    train, val = rows_of(tmp_path / "out-train.h5"), rows_of(tmp_path / "out-val.h5")
    assert (len(train), len(val)) == (32, 8)
    assert train | val == {n: 0 if n < 20 else 1 if n < 30 else 2 for n in range(40)}
    with h5py.File(tmp_path / "out-train.h5") as file:
        assert file.attrs["class_names"].tolist() == ["cat", "dog", "größe"]
        assert file["images"].shape == (32, 3, 8, 10)
    assert convert("verify", "out-train.h5", "out-val.h5").returncode == 0


def test_a_csv_names_files_below_a_root(tmp_path, convert):
    folder_of(tmp_path / "photos", {"all": 6})
    lines = [f"all/photo {n:03d} é.png,{n % 3}" for n in range(6)]
    (tmp_path / "x.csv").write_text("\n".join(["path,label", *lines]), encoding="utf-8")
    result = convert("images", "x.csv", "out.h5", "--root", "photos", "--size", "4")
    assert result.returncode == 0, result.stderr
    assert rows_of(tmp_path / "out.h5") == {n: n % 3 for n in range(6)}


def test_a_broken_image_stops_with_its_line_and_leaves_nothing(tmp_path, convert):
    folder_of(tmp_path / "all", {"all": 6})
    path = tmp_path / "all/all/photo 003 é.png"
    path.write_bytes(path.read_bytes()[:-30])  # cut
    lines = [f"all/all/photo {n:03d} é.png,0" for n in range(6)]
    (tmp_path / "x.csv").write_text("\n".join(["path,label", *lines]), encoding="utf-8")
    result = convert("images", "x.csv", "out.h5")
    assert result.returncode == 2
    assert "error: x.csv:5: all/all/photo 003 é.png cannot be decoded" in result.stderr
    assert result.stderr.endswith("; --on-error skip leaves such images out\n")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("*out*"))


def test_skipped_images_are_listed_and_more_than_one_in_a_hundred_fail(tmp_path, convert):
    folder_of(tmp_path / "photos", {"a": 150, "b": 100})
    broken = [tmp_path / "photos/a" / f"photo {n:03d} é.png" for n in (5, 77, 149)]
    broken[0].write_bytes(b"garbage")
    Image.new("RGB", (9, 9)).save(broken[1])  # of another size
    result = convert("images", "photos", "out.h5", "--on-error", "skip")
    assert result.returncode == 0, result.stderr
    assert rows_of(tmp_path / "out.h5") == {n: int(n >= 150) for n in range(250) if n not in (5, 77)}
    report = (tmp_path / "out.h5.skipped.txt").read_text(encoding="utf-8").splitlines()
    assert len(report) == 2
    assert "005 é.png is not an image that Pillow knows" in report[0]
    assert "077 é.png has 9x9 pixels, but the first image has 8x10; give --size" in report[1]
    assert convert("verify", "out.h5").returncode == 0
    broken[2].write_bytes(b"")
    result = convert("images", "photos", "again.h5", "--on-error", "skip")
    assert result.returncode == 2
    assert "3 of 250 images are broken, more than 1 %" in result.stderr
    assert not list(tmp_path.glob("*again*"))
