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


PARTS = "then use data.train=data/{0}-train.h5 data.val=data/{0}-val.h5"
WHOLE = "then use data.train=data/{0}.h5 data.val=10%"


@pytest.mark.parametrize(
    ("file", "text", "path", "message"),
    [
        (
            "photos/cat/1.JPG",
            "",
            "photos/",
            "a folder of images; {} images photos/ data/photos.h5 --split 0.9, " + PARTS,
        ),
        ("photos/1.png", "", "photos", "a folder of images; {} images photos data/photos.h5 --split 0.9, " + PARTS),
        ("photos/cat/1.jpg", "", "photos/*/*.jpg", "a folder of images; {} images photos data/photos.h5 --split"),
        ("photos/list.csv", "path,label\n", "photos/list.csv", "a table; if it lists images and labels, {} images"),
        ("fer.csv", "emotion,pixels,Usage\n", "fer.csv", "a table of pixels; {} pixels fer.csv data/fer.h5, " + WHOLE),
        ("m.csv", ",".join(map(str, range(785))), "m.csv", "a table of pixels; {} pixels m.csv data/m.h5"),
        ("r.csv", "userId,movieId,rating\n", "r.csv", "a table of ratings; {} movielens r.csv data/r.h5, " + PARTS),
        ("x.npy", "", "x.npy", "a NumPy array; {} arrays images=x.npy labels=FILE.npy data/x.h5, " + WHOLE),
        ("x.npz", "", "x.npz", "a file of NumPy arrays; {} arrays x.npz data/x.h5, " + WHOLE),
        ("a b.npz", "", "a b.npz", "{} arrays 'a b.npz' 'data/a b.h5', then use 'data.train=data/a b.h5' data.val=10%"),
        ("x.tar.gz", "", "x.tar.gz", "an archive; unpack it, then convert what is in it: python convert.py --help"),
        ("ml-20m.zip", "", "ml-20m.zip", "MovieLens as published; {} movielens ml-20m.zip data/ml-20m.h5"),
        ("cifar-10-python.tar.gz", "", "cifar-10-python.tar.gz", "CIFAR-10 as published; {} cifar10 cifar-10-python"),
        ("c/img_align_celeba/1.jpg", "", "c", "CelebA as published; {} celeba c data/c.h5, " + PARTS),
    ],
)
def test_the_command_that_converts_is_named(file, text, path, message):
    make(Path(file), text)
    with pytest.raises(UserError) as caught:
        refuse_unconverted("data.train", path, FIELDS)
    stem = Path(path.split("/*")[0]).name.split(".")[0]
    expected = message.replace("{}", "convert it once: python convert.py").format(stem)
    assert str(caught.value).startswith(f"data.train is {path}, ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["x.h5", "shards", "shards/*.h5", "nowhere.csv", "nowhere/*.jpg", "x.h5::/train", "odd"]
)
def test_what_may_be_hdf5_is_left_to_those_who_open_it(path):
    make(Path("x.h5"))
    make(Path("odd"))
    make(Path("shards/x.h5"))
    refuse_unconverted("data.train", [path], FIELDS)
