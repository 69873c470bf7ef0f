"""What a person can mend is one line. The lines are in messages.yaml."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import convert
import h5py
import numpy as np
import pytest
from harness import numbered
from PIL import Image
from scipy import sparse
from test_events import write_ratings
from test_tables import csv_of, names_of
from test_writing import Numbers

from fastgpu.convert import commands
from fastgpu.convert.arrays import open_arrays
from fastgpu.convert.images import commands as image_commands
from fastgpu.convert.images.readers import ImageFolder, ImageTable, Masks, PixelTable
from fastgpu.convert.reader import read_splits, split_rows
from fastgpu.convert.recsys import commands as events_commands
from fastgpu.convert.recsys.events import read_events
from fastgpu.convert.recsys.interactions import hold_out_users
from fastgpu.convert.tables import Table, parse_labels
from fastgpu.convert.writing import write_files
from fastgpu.storage.arrays import ArrayDataset

Mistakes = dict[str, Callable[[], object]]


HEADER = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117) + "\n"
LARGE_NPY = b"\x93NUMPY\x01\x00" + len(HEADER).to_bytes(2, "little") + HEADER.encode() + bytes(8)
"""A file .npy whose header claims eight petabytes."""


def of_arrays() -> Mistakes:
    for name, array in {"x": np.zeros((4, 2)), "short": np.zeros(3), "empty": np.zeros((0, 2))}.items():
        np.save(f"{name}.npy", array)
    np.save("words.npy", np.array(["a"]))
    np.save("objects.npy", np.array([{}]))
    np.savez("y.npz", labels=np.zeros(4))
    Path("text.npy").write_text("text")
    Path("large.npy").write_bytes(LARGE_NPY)
    for name, content in {"large": LARGE_NPY, "bytes": b"no array"}.items():
        with zipfile.ZipFile(f"{name}.npz", "w") as archive:
            archive.writestr("a.npy", content)
    with h5py.File("x.h5", "w") as file:
        file["a/b"] = np.arange(3)
    sparse.save_npz("matrix.npz", sparse.eye_array(3, format="csr"))
    sparse.save_npz("zeros.npz", sparse.csr_array((3, 3)))
    np.savez("far.npz", format=np.array(b"csr"), data=np.ones(2), indices=[0, 5], indptr=[0, 1, 2], shape=(2, 5))
    np.savez("wide.npz", format=np.array(b"coo"), row=[0], col=[3], data=[1.0], shape=(2, 10**12))
    sources = ["x.npy", "a=y.npz", "matrix.npz", "a=none.npy", "a=none.h5::a", "a=x.h5::none", "a=text.npy"]
    sources += ["a=objects.npy", "a=words.npy", "a=x.npy b=short.npy", "a=empty.npy", "bytes.npz", "a=far.npz"]
    sources += ["a=wide.npz", "a=zeros.npz", "a=large.npy", "large.npz"]
    made: Mistakes = {f"arrays {source}": partial(open_arrays, source.split()) for source in sources}
    return made | {"arrays --layout nhwc": partial(open_arrays, ["a=x.npy"], channels_last=True)}


def table(text: str | bytes) -> Table:
    Path("x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Table(Path("x.csv"))


def of_tables() -> Mistakes:
    texts: dict[str, str | bytes] = {
        "one column too many": "path,label\na,1\nb,Quercus, robur\n",
        "one column too few": "path,label,note\na,1,x\n\nb,2\n",
        "a quote that is not closed": 'path,label,note\na,1,x\nb,2,"24 inch\nc,3,y\n',
        "a label over two lines": 'path,label\na,1\nb,"2\nc,3\nd,4"\ne,5\n',
        "no label": "path,label\na,1\n\nb, \n",
        "no rows": "path,label\n",
        "empty": "",
        "another column": "path,kind\na,1\n",
        "a column twice": "path,label,label\na,1,2\n",
        "not UTF-8": "path,label\n사진.png,고양이\n".encode("cp949"),
    }
    made: Mistakes = {
        f"table, {name}": lambda text=text: [table(text).texts(each) for each in ("path", "label")]
        for name, text in texts.items()
    }
    for value in ("12.0", "256", "-1", "", "cat"):
        text = f"n,note\n7,a\n{value},b\n"
        made[f"whole numbers, {value!r}"] = lambda text=text: table(text).whole_numbers("n", 255)
    columns = "0 1|1 2; 0 1|0 -1; 0 1|yes no; 0.5 n/a 0.25; cat 3; 1.5 1e300; nan 0.5; 1 20260101; 1 -2; 1 01"
    for case in columns.split("; "):
        made[f"labels {case}"] = lambda case=case: parse_labels(table(csv_of(case)), names_of(case))
    made["labels with a comma"] = lambda: parse_labels(table("a;b\n0,5;x\n"), ["a"])
    made["splits"] = partial(read_splits, "x.csv", ["train", "../x", "fold-3"])
    return made


def of_pixels() -> Mistakes:
    def read(text: str, **options: str) -> None:
        Path("x.csv").write_text(text)
        PixelTable("x.csv", **options)

    rows = ["1 2 3 256", "1 2 3 -1", "1 2 3 x", "1 2 3 1.5", "1 2 3"]
    made: Mistakes = {f"pixels {row}": partial(read, f"label,pixels\n1,1 2 3 4\n1,{row}\n") for row in rows}
    texts = {
        "half a pixel": "label,p0,p1,p2,p3\n1,0.5,0,0,1\n",
        "columns out of order": "label,p0,p10,p11,p2\n1,1,2,3,4\n",
        "no column called label": "emotion,pixels,Usage\n1,1 2 3 4,x\n",
        "no label": "pixels\n1 2 3 4\n",
        "no square": "label,pixels\n1,1 2 3\n",
        "a label is missing": "label,pixels\n1,1 2 3 4\n,1 2 3 4\n",
    }
    made |= {f"pixels, {name}": partial(read, text) for name, text in texts.items()}
    return made | {"pixels --split-by": partial(read, "label,pixels\n1,1 2 3 4\n", split_by="Usage")}


def of_events() -> Mistakes:
    write_ratings(Path("r.csv"))
    Path("low.csv").write_text("userId,movieId,rating\n1,2,3.0\n")
    Path("u.data").write_text("1\t2\t5\t1\n7\tx\t5\t1\n")
    with zipfile.ZipFile("cut.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write("r.csv", "ml/ratings.csv")
    data = bytearray(Path("cut.zip").read_bytes())
    data[2000:2100] = bytes(100)
    Path("cut.zip").write_bytes(data)
    with zipfile.ZipFile("other.zip", "w") as archive:
        archive.writestr("movies.csv", "x")
    sources = ["none.csv", ".", "cut.zip", "other.zip", "low.csv", "u.data"]
    made: Mistakes = {f"events {source}": partial(read_events, source) for source in sources}
    made["events, other columns"] = partial(read_events, "r.csv", ["user", "item", "rating"])
    made["events, one column"] = partial(read_events, "r.csv", ["userId"])
    lines = 'a,2,3.0,4 1,2 1,2,nan,4 -1,2,3.0,4 1,2,,4 1;2;3 \x00 1,2,3,75,4 1,2,"3,75",4 4.0,2,5,4 3000000000,2,5,4'
    for line in lines.split():  # the line is 42 in all of them
        made[f"events line {line!r}"] = lambda line=line: read_events(write_ratings(Path("x.csv"), {42: line, 99: ""}))
    few = np.repeat(np.arange(20), 6), np.tile(np.arange(6), 20)
    made["events, few users"] = partial(hold_out_users, "x", *few, 15)
    return made


def of_images() -> Mistakes:
    Path("photos").mkdir()
    Image.new("RGB", (4, 4)).save("photos/x.png")
    for folder in ("images", "masks", "others", "turned", "deep", "lossy"):
        Path(folder).mkdir()
        turned = folder == "turned"
        Image.new("L" if turned else "RGB", (30, 40) if turned else (40, 30)).save(f"{folder}/x.png")
    Image.fromarray(np.full((30, 40), 256, np.uint16)).save("deep/x.png")
    Image.new("L", (40, 30)).save("others/y.png")
    Path("others/x.png").unlink()
    Image.open("lossy/x.png").save("lossy/x.jpg")
    Path("lossy/x.png").unlink()
    made: Mistakes = {
        f"masks, {each}": partial(Masks, "images", each) for each in ("masks", "others", "turned", "deep", "lossy")
    }
    made["a folder without classes"] = partial(ImageFolder, "photos")
    made["a table that is not there"] = partial(ImageTable, "none.csv")
    made["a table of one column"] = partial(ImageTable, "none.csv", columns=("file",))
    return made


def of_commands() -> Mistakes:
    with h5py.File("rows.h5", "w") as file:
        for group in ("train", "val"):
            file[f"{group}/images"], file[f"{group}/labels"] = numbered(10), np.arange(10)
    Path("text.h5").write_text("text")
    Path("photos.zip").touch()
    sparse.save_npz("counts.npz", sparse.csr_array(2 * np.eye(9)))
    lines = """
        repack rows.h5 x.h5; repack rows.h5::/test x.h5; repack absent.h5 x.h5; repack none-*.h5 new.h5; info text.h5;
        check absent.h5; images photos.zip x.h5; images photos x.h5 --keep-encoded --masks m;
        images photos x.h5 --keep-encoded --resize exact; images photos x.h5 --keep-encoded --size 8x9;
        images photos x.h5 --binary-masks; images photos x.h5 --split-by Usage; images x.csv x.h5 --masks m;
        events x.csv x.h5 --columns who,what --above 3; events x.npz x.h5 --above 3; events counts.npz x.h5"""

    def run(line: str) -> None:
        args = convert.parse(line.split())
        module = {"images": image_commands, "events": events_commands}.get(line.split()[0], commands)
        getattr(module, args.run.rpartition(".")[2])(args)

    source = ArrayDataset("x", {"labels": np.arange(5)})
    made: Mistakes = {line.strip(): partial(run, line) for line in lines.split(";")}
    made["--split of few rows"] = partial(split_rows, source, (0.9, 0.1), 0)
    target = Path("rows.h5").absolute()
    made["a target that exists"] = partial(write_files, {"": source}, target)
    made["a folder that nobody may write to"] = partial(write_files, {"": source}, Path("/sys/x.h5"))
    rows = {"many broken rows": Numbers(30, range(3, 28)), "broken rows alone": Numbers(3, range(3))}
    rows["rows of two types"] = Numbers(4)
    rows["rows of two types"].values[2] = 0.5
    new = target.with_name("new.h5")
    return made | {name: partial(write_files, {"": reader}, new) for name, reader in rows.items()}


def test_messages(tmp_path, monkeypatch, compare_messages):
    monkeypatch.chdir(tmp_path)
    mistakes = of_arrays() | of_tables() | of_pixels() | of_events() | of_images() | of_commands()
    before = {*tmp_path.iterdir()}
    compare_messages(mistakes)
    assert {path.name for path in {*tmp_path.iterdir()} - before} <= {"x.csv"}  # a mistake writes nothing


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("arrays x=x.npy y=y.npy --split 0.9 out.h5", "unrecognized arguments: out.h5"),
        ("images photos x.h5 --size 0", "0 should be HxW, such as 218x178, or one number for both"),
        ("images photos x.h5 --split 1.2", "1.2 should be a share, such as 0.9"),
        ("repack absent.h5 x.h5", "error: absent.h5 does not exist"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(convert, command, message):
    result = convert(command, code=2)
    assert message in result.stderr
