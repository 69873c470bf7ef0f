from pathlib import Path

import pytest

from fastgpu.process.launch import UserError
from fastgpu.storage.unconverted import refuse_unconverted

FIELDS = ["images", "labels"]


def make(path: Path, text: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "path", "what", "command"),
    [
        ("photos/cat/1.JPG", "", "photos/", "a folder of images", "images photos/ data/photos.h5 --split 0.9"),
        ("photos/1.png", "", "photos", "a folder of images", "images photos data/photos.h5 --split 0.9"),
        ("photos/a/1.jpg", "", "photos/*/*.jpg", "a folder of images", "images photos data/photos.h5 --split 0.9"),
        ("photos/list.csv", "path,label\n", "photos/list.csv", "a table", "images photos/list.csv data/list.h5"),
        ("fer.csv", "emotion,pixels,Usage\n", "fer.csv", "a table", "pixels fer.csv data/fer.h5"),
        ("m.csv", ",".join(map(str, range(785))), "m.csv", "a table", "pixels m.csv data/m.h5"),
        ("r.csv", "userId,movieId,rating\n", "r.csv", "a table", "movielens r.csv data/r.h5"),
        ("x.npy", "", "x.npy", "a NumPy array", "arrays images=x.npy labels=FILE.npy data/x.h5"),
        ("x.npz", "", "x.npz", "a file of NumPy arrays", "arrays x.npz data/x.h5"),
        ("a b.npz", "", "a b.npz", "a file of NumPy arrays", "arrays 'a b.npz' 'data/a b.h5'"),
        ("x.tar.gz", "", "x.tar.gz", "an archive (unpack it, unless --help lists it)", "--help"),
    ],
)
def test_the_command_that_converts_is_named(file, text, path, what, command):
    make(Path(file), text)
    with pytest.raises(UserError) as caught:
        refuse_unconverted("data.train", path, FIELDS)
    assert str(caught.value) == f"data.train is {path}, {what}; convert it once: python convert.py {command}"


@pytest.mark.parametrize(
    "path", ["x.h5", "shards", "shards/*.h5", "nowhere.csv", "nowhere/*.jpg", "x.h5::/train", "odd"]
)
def test_what_may_be_hdf5_is_left_to_those_who_open_it(path):
    make(Path("x.h5"))
    make(Path("odd"))
    make(Path("shards/x.h5"))
    refuse_unconverted("data.train", [path], FIELDS)


def test_the_command_fits_the_key_and_the_fields(tmp_path):
    make(Path("photos/cat/1.jpg"))
    make(Path("r.csv"), "user,item,stars\n1,2,3\n")
    with pytest.raises(UserError, match="images photos data/photos.h5$"):
        refuse_unconverted("INPUT", "photos", FIELDS)
    with pytest.raises(UserError, match="movielens r.csv data/r.h5$"):
        refuse_unconverted("INPUT", "r.csv", ["items"])
    make(Path("films.csv"), "userId,movieId\n1,2\n")
    with pytest.raises(UserError, match="movielens films.csv data/films.h5$"):
        refuse_unconverted("INPUT", "films.csv", ["seen"])
    make(Path("new.csv"), "a,b\n0.5,-1e3\n")
    with pytest.raises(UserError, match=r"a table \(.* numpy.save\); .* arrays x=FILE.npy y=FILE.npy data/new.h5$"):
        refuse_unconverted("INPUT", "new.csv", ["x", "y"])
    make(Path("list.csv"), "path,label\n1.png,3\n")
    with pytest.raises(UserError, match="images list.csv data/list.h5$"):
        refuse_unconverted("INPUT", "list.csv", ["x"])
    make(Path("m.npz"))
    with pytest.raises(UserError, match="arrays items=m.npz data/m.h5$"):
        refuse_unconverted("INPUT", "m.npz", ["items"])
