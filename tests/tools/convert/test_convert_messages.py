"""The command line. What a person can mend is one line; the lines are in messages.yaml."""

import gzip
import os
import subprocess
import sys
import zipfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import get_args

import h5py
import numpy as np
import polars as pl
import pytest
from PIL import Image
from scipy import sparse

from fastgpu.convert.arrays import SplitArrays, open_arrays
from fastgpu.convert.broken import in_order
from fastgpu.convert.command import SUFFIXES, announce, commands, max_broken, parse, run, shares
from fastgpu.convert.images.command import size
from fastgpu.convert.images.readers import ImageFolder, ImageTable, Masks, PixelTable
from fastgpu.convert.recsys.events import read_events
from fastgpu.convert.recsys.interactions import hold_out_users
from fastgpu.convert.recsys.log import number
from fastgpu.convert.splits import Split, limit_parts, read_splits, split_rows
from fastgpu.convert.tables import Table, parse_labels
from fastgpu.convert.writer import Compression
from fastgpu.convert.writing import write_files
from fastgpu.images.crops import Resize
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import ArrayDataset
from support import PROJECT
from support.images import photo
from support.readers import Numbers, csv_of, names_of
from support.rows import numbered
from support.sources import write_parquet, write_tar, write_zip

Mistakes = dict[str, Callable[[], object]]


def of_arrays() -> Mistakes:
    for name, array in {"x": np.zeros((4, 2)), "short": np.zeros(3), "empty": np.zeros((0, 2))}.items():
        np.save(f"{name}.npy", array)
    np.save("words.npy", np.array(["a"]))
    np.savez("y.npz", labels=np.zeros(4))
    Path("text.npy").write_text("text")
    with zipfile.ZipFile("bytes.npz", "w") as archive:
        archive.writestr("a.npy", b"no array")
    with h5py.File("x.h5", "w") as file:
        file["a/b"] = np.arange(3)
    Path("x.csv").write_text("a,b\n1,2\n")
    np.savez("parts.npz", data=np.ones(2), indices=[0, 2], indptr=[0, 1, 2], shape=(2, 3))
    with h5py.File("parts.h5", "w") as file:
        file["m/indices"], file["m/indptr"], file["m/data"] = [0, 2], [0, 1, 2], [1, 1]
    kinds = {
        "long": "longdouble",
        "complex": "c16",
        "days": "M8[D]",
        "waits": "m8[s]",
        "pairs": "u1,f4",
        "objects": "O",
    }
    for name, kind in kinds.items():
        np.save(f"{name}.npy", np.zeros(4, kind))
    os.mkfifo("pipe.npy")
    sparse.save_npz("zeros.npz", sparse.csr_array((3, 3)))
    np.savez("far.npz", format=np.array(b"csr"), data=np.ones(2), indices=[0, 5], indptr=[0, 1, 2], shape=(2, 5))
    np.savez("wide.npz", format=np.array(b"coo"), row=[0], col=[3], data=[1.0], shape=(2, 10**12))
    sources = ["x.npy", "a=y.npz", "a=none.npy", "a=x.h5::none", "a=text.npy", "a=words.npy", "a=x.npy b=short.npy"]
    sources += ["a=y.npz::none", "a=x.npy::x", "a=empty.npy", "bytes.npz", "a=far.npz", "a=wide.npz", "a=zeros.npz"]
    sources += ["a=x.csv", "parts.npz", "parts.h5::/m", "a=pipe.npy", *(f"a={name}.npy" for name in kinds)]
    made: Mistakes = {f"arrays {source}": partial(open_arrays, source.split()) for source in sources}
    Path("odd.bin").write_bytes(b"\x01\x02\x03")
    Path("even.bin").write_bytes(b"\x01\x02")
    Path("empty.bin").touch()
    sources = ["a=x.npy", "a=x.h5", "a=y.npz::labels", "even.bin", "a=pipe.npy"]
    sources += [f"a={name}" for name in ("odd.bin", "empty.bin", "even.bin::x")]
    made |= {f"arrays {each} --dtype": partial(open_arrays, [each], dtype="uint16") for each in sources}
    made["arrays a=odd.bin"] = partial(open_arrays, ["a=odd.bin"])
    return made | {"arrays --layout nhwc": partial(open_arrays, ["a=x.npy"], channels_last=True)}


def table(text: str | bytes, broken: dict[int, str] | None = None) -> Table:
    Path("x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Table(Path("x.csv"), broken=broken)


def labels_of(text: str, names: Sequence[str]) -> None:
    """Raises UserError with the reasons of all broken rows, too."""
    broken: dict[int, str] = {}
    parse_labels(table(text, broken), names)
    raise UserError("\n".join(in_order(broken)))


def of_tables() -> Mistakes:
    texts: dict[str, str | bytes] = {
        "one column too many": "path,label\na,1\nb,Quercus, robur\n",
        "one column too few": "path,label,note\na,1,x\n\nb,2\n",
        "a quote that is not closed": 'path,label,note\na,1,x\nb,2,"24 inch\nc,3,y\n',
        "a label over two lines": 'path,label\na,1\nb,"2\nc,3\nd,4"\ne,5\n',
        "no label": "path,label\na,1\n\nb, \n",
        "empty": "",
        "no rows": "path,label\n",
        "another column": "path,kind\na,1\n",
        "a column twice": "path,label,label\na,1,2\n",
        "no header": "a/1.png,cat\na/2.png,dog\n",
        "lines of JSON": '{"path": "a.png", "label": "cat"}\n{"path": "b.png", "label": "dog"}\n',
        "XML": "<rows><row path='a.png'/></rows>",
        "packed": gzip.compress(b"path,label\na,1\n"),
        "not UTF-8": "path,label\n사진.png,고양이\n".encode("cp949"),
    }
    made: Mistakes = {
        f"table, {name}": lambda text=text: [table(text).texts(each) for each in ("path", "label")]
        for name, text in texts.items()
    }
    for value in ("12.0", "256"):
        made[f"whole numbers, {value!r}"] = lambda value=value: table(f"n\n7\n{value}\n").whole_numbers("n", 255)
    cases = [
        "0 1|1 2",
        "0 1|0 -1",
        "0 1|yes no",
        "cat 3",
        "1.5 1e300",
        "1 20260101",
        "1 -2",
        "1 01",
        "1 nan",
        "1.5 inf",
    ]
    for case in [*cases, "12% 3%", "3.5kg 4kg", "$5 $6.5"]:
        made[f"labels {case}"] = partial(labels_of, csv_of(case), names_of(case))
    made["labels with a comma"] = partial(labels_of, "a;b\n0,5;x\n", ["a"])
    made["labels with a separator of thousands"] = partial(labels_of, "a;b\n1,234,567;x\n", ["a"])
    for cell in ("cat, dog", "cat|dog", "bat|dog;x\nbat|owl"):
        made[f"several labels, {cell}"] = partial(labels_of, f"a;b\ncat;x\n{cell};x\n", ["a"])
    made["a table that is a pipe"] = lambda: Table(Path("pipe.npy"))
    made["splits"] = partial(read_splits, "x.csv", ["train", "../x", "fold-3"])
    return made


def of_pixels() -> Mistakes:
    def read(text: str, **options: str) -> None:
        Path("x.csv").write_text(text)
        raise UserError("\n".join(in_order(PixelTable("x.csv", **options).broken)))

    texts = {
        "too few": "label,pixels\n1,1 2 3 4\n1,1 2 3\n",
        "too large": "label,pixels\n1,1 2 3 4\n1,1 2 3 256\n",
        "half a pixel": "label,p0,p1,p2,p3\n1,0.5,0,0,1\n",
        "columns out of order": "label,p0,p10,p11,p2\n1,1,2,3,4\n",
        "no column called label": "emotion,pixels,Usage\n1,1 2 3 4,x\n",
        "no square": "label,pixels\n1,1 2 3\n",
        "no pixels": "label\n1\n",
        "no header": "1,0,0,0,0\n",
    }
    made: Mistakes = {f"pixels, {name}": partial(read, text) for name, text in texts.items()}
    return made | {"pixels --split-by": partial(read, "label,pixels\n1,1 2 3 4\n", split_by="Usage")}


def of_events() -> Mistakes:
    for name, text in {
        "low.csv": "userId,movieId,rating\n1,2,3.0\n",
        "nan.csv": "userId,movieId,rating\n\n1,2,nan\n",
        "when.csv": "userId,movieId,rating,timestamp\n1,2,4,7\n1,2,3,soon\n",
        "when2.csv": "userId,movieId,rating,n\n1,2,4,7\n",
        "odd.csv": 'a,a2,b,c,minus\n1,1,2,x,5\n1,2, ,"y\nz",-1\n',
        "u.data": "1\t2\t5\t1\n7\tx\tmany\t1\n",
    }.items():
        Path(name).write_text(text)
    for name, member in {"damaged.zip": "ml/ratings.csv", "other.zip": "movies.csv"}.items():
        with zipfile.ZipFile(name, "w") as archive:
            archive.write("low.csv", member)
    damaged = Path("damaged.zip").read_bytes().replace(b"3.0", b"5.0")
    Path("damaged.zip").write_bytes(damaged)
    sources = ["damaged.zip", "other.zip", "low.csv", "nan.csv", "u.data", "when.csv", "pipe.npy"]
    made: Mistakes = {f"events {source}": partial(read_events, source) for source in sources}
    made["events, other columns"] = partial(read_events, "low.csv", ["user", "item", "rating"])
    made["events, one column"] = partial(read_events, "low.csv", ["userId"])
    made["events, a column twice"] = partial(read_events, "low.csv", ["userId", "movieId", "userId"])
    made["events, no item"] = partial(read_events, "odd.csv", ["a", "b", ""])
    made["events, a line break in an id"] = partial(read_events, "odd.csv", ["c", "a"])
    made["events, a negative rating"] = partial(read_events, "odd.csv", ["a", "a2", "minus"])
    few = np.repeat(np.arange(20), 6), np.tile(np.arange(6), 20)
    made["events, few users"] = partial(hold_out_users, number("x", *few), 15)
    lines = ["userId,movieId,rating,timestamp"]
    lines += [f"{user},{item},5,{10**9 + 100 * item}" for user, item in zip(*few, strict=True)]
    Path("times.csv").write_text("\n".join(lines))
    for flags in (
        "--split-by-time 0.1",
        "--split-by-time 2001-09-09",
        "--split-by-time 2030-01-01",
        "--split-by-time 2001-09-10,2001-09-09",
        "--split-by-time 1000000250",
        "--split-by-time 0.9 --min-items 6",
        "--leave-last-out --min-items 7",
        "--leave-last-out --held-out 3",
        "--columns userId,movieId,rating, --leave-last-out",
        "--columns userId,movieId,,movieId",
        "--columns userId,movieId --unrated keep",
    ):
        made[f"events {flags}"] = lambda flags=flags: run(parse(["events", "times.csv", "x.h5", *flags.split()]))
    columns = {"f": [1.0, 2.0], "who": ["a", None], "what": [1, 2], "list": [[1], [2]], "stars": [4, None]}
    pl.DataFrame(columns).write_parquet("e.parquet")
    for names in ("f,what", "who,what", "what,list", "what,f,list", "what,f,,list", "what,none", "what,what", "list,f"):
        made[f"events of Parquet, {names}"] = partial(read_events, "e.parquet", names.split(","))
    made["events of Parquet, no rating"] = partial(read_events, "e.parquet", ["what", "who", "stars"])
    made["events of Parquet, no file"] = partial(read_events, "none-*.parquet")
    made["events of Parquet, damaged"] = partial(read_events, "damaged.parquet")
    Path("damaged.parquet").write_bytes(Path("e.parquet").read_bytes()[:-9] + b"x" * 9)
    made["events e.parquet --no-header"] = lambda: parse(["events", "e.parquet", "x.h5", "--no-header"])
    made["events, times that are no dates"] = lambda: run(
        parse(["events", "when2.csv", "x.h5", "--split-by-time", "2030-01-01", "--columns", "userId,movieId,rating,n"])
    )
    return made


def of_images() -> Mistakes:
    for folder in ("photos", "coloured", "others", "turned", "lossy"):
        Path(folder).mkdir()
    for mode, shape, path in (
        ("RGB", (40, 30), "photos/x.png"),
        ("RGB", (40, 30), "coloured/x.png"),
        ("L", (40, 30), "others/y.png"),
        ("L", (30, 40), "turned/x.png"),
        ("L", (40, 30), "lossy/x.jpg"),
    ):
        Image.new(mode, shape).save(path)
    masks = ("coloured", "others", "turned", "lossy")
    made: Mistakes = {f"masks, {each}": partial(Masks, "photos", each) for each in masks}
    made["a folder without classes"] = partial(ImageFolder, "photos")
    Path("headless.csv").write_text("a/1.png,cat\n")
    made["a table whose first row is taken for names"] = partial(ImageTable, "headless.csv", columns=("a/1.png", "cat"))
    made["a table of one column"] = partial(ImageTable, "none.csv", columns=("file",))
    return made


def of_groups() -> Iterator[tuple[str, SplitArrays]]:
    for name, values in {
        "--split-by few values": np.arange(10) % 2,
        "--split-by one value": np.maximum(np.arange(100) - 95, 0),
        "--split-by a column of splits": np.array(["train", "val"] * 5),
        "--split-by no value": np.full(10, ""),
    }.items():
        arrays = {"labels": np.arange(len(values))}
        yield name, SplitArrays("x", arrays, {}, by="who", values=values)


def of_parquet() -> Mistakes:
    photos = [photo(number) for number in range(3)]
    days = pl.Series([date(2026, 1, 1)] * 3)
    kinds = {"day": days, "struct": [{"a": 1}] * 3, "list": [["a"]] * 3, "decimal": [Decimal("1.5")] * 3}
    kinds |= {"text": ["a"] * 3, "nested": [[[1], [2]]] * 3, "empty": pl.Series([None] * 3, dtype=pl.Array(pl.Int8, 0))}
    for name, column in kinds.items():
        pl.DataFrame({name: column}).write_parquet(f"{name}.parquet")
    write_parquet(Path("part-0.parquet"), photos, label=[0, 1, 2])
    write_parquet(Path("part-1.parquet"), photos, label=["a", "b", "c"])
    write_parquet(Path("two.parquet"), photos, pl.Binary, thumb=photos, label=[0, 1, 2])
    write_parquet(Path("fields.parquet"), photos, age=[1, 2, 3], sex=[0, 1, 0])
    write_parquet(Path("days.parquet"), photos, label=days)
    pl.DataFrame({"x": []}, schema={"x": pl.Int8}).write_parquet("no-rows.parquet")
    content = Path("part-0.parquet").read_bytes()
    Path("cut.parquet").write_bytes(content[:-30])
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    Path("footer.parquet").write_bytes(content[: footer + 1] + b"\xff" * 40 + content[footer + 41 :])
    Path("words.parquet").write_text("no Parquet")
    names = ["cut", "footer", "words", "no-rows", "two", "fields", "days", "part-*"]
    lines = [f"images {name}.parquet x.h5" for name in names]
    lines += ["images part-0.parquet x.h5 --columns image,age", "images part-0.parquet x.h5 --columns label,label"]
    lines += ["images part-0.parquet x.h5 --columns image", "images part-0.parquet x.h5 --masks photos"]
    lines += [
        "images part-0.parquet x.h5 --no-header",
        "images s3://bucket/x.parquet x.h5",
        "images none-*.parquet x.h5",
    ]
    lines += [f"arrays {name}.parquet x.h5" for name in kinds]
    lines += ["arrays fields.parquet::age x=part-0.parquet::label x.h5", "arrays x=fields.parquet x.h5"]
    lines += ["arrays fields.parquet::age x.npy x.h5", "arrays fields.parquet::age x.h5 --layout nhwc"]
    return {line: lambda line=line: run(parse(line.split())) for line in lines}


def of_archives() -> Mistakes:
    sample = {"1.jpg": photo(1), "1.json": b'{"age": 3, "sex": "m"}', "1.cls": b"0"}
    without = {name: sample[name] for name in ("1.jpg", "1.json")}
    archives = {
        "two": sample | {"1.mask.png": photo(0)},
        "suffix": sample | {"1.JPG": photo(1)},
        "fields": without,
        "list": without | {"1.json": b'{"label": [1, 2]}'},
        "json": without | {"1.json": b"{"},
        "number": without | {"1.json": b"3"},
        "loose": {"1.jpg": photo(1)},
        "texts": {"a/readme.txt": b"x"},
    }
    for name, files in archives.items():
        write_tar(Path(f"{name}.tar"), files)
    Path("packed.tar").write_bytes(gzip.compress(Path("two.tar").read_bytes()))
    Path("packed.tar.gz").write_bytes(b"")
    write_zip(Path("bzip2.zip"), {"cat/1.jpg": photo(1)}, zipfile.ZIP_BZIP2)
    lines = [f"images {name}.tar x.h5" for name in (*archives, "packed")]
    lines += ["images packed.tar.gz x.h5", "images bzip2.zip x.h5", "images two.tar x.h5 --columns png,cls"]
    lines += ["images fields.tar x.h5 --columns jpg,who", "images two.tar x.h5 --masks photos"]
    return {line: lambda line=line: run(parse(line.split())) for line in lines}


def of_commands() -> Mistakes:
    with h5py.File("rows.h5", "w") as file:
        for group in ("train", "val"):
            file[f"{group}/images"], file[f"{group}/labels"] = numbered(10), np.arange(10)
    Path("text.h5").write_text("text")
    Path("cats/cat").mkdir(parents=True)
    Image.new("L", (4, 4)).save("cats/cat/1.png")
    Path("photos.zip").touch()
    sparse.save_npz("counts.npz", sparse.csr_array(2 * np.eye(9)))
    lines = """
        repack rows.h5 x.h5; info text.h5; check absent.h5; images photos.zip x.h5;
        images photos x.h5 --keep-encoded --masks m; images photos x.h5 --keep-encoded --size 8x9;
        arrays a=rows.h5 x.h5 --dtype uint17; arrays a=rows.h5 x.h5 --dtype uint8 --split 0.9;
        arrays a=rows.h5 x.h5 --dtype uint8 --split-by who; dataset mine:Photos photos x.h5 --threads 2;
        images photos x.h5 --binary-masks; images photos x.h5 --split-by Usage;
        images cats x.h5 --split 0.9 --split-by (x; images x.csv x.h5 --masks m;
        events x.csv x.h5 --columns who,what --above 3; events x.npz x.h5 --above 3; events counts.npz x.h5"""

    source = ArrayDataset("x", {"labels": np.arange(5)})
    made: Mistakes = {line.strip(): lambda line=line: run(parse(line.split())) for line in lines.split(";")}
    made["--split of few rows"] = partial(split_rows, source, Split((0.9, 0.1)))
    made |= {name: partial(split_rows, source, Split((0.8, 0.1, 0.1), by="who")) for name, source in of_groups()}
    made["--split-by without an array"] = partial(open_arrays, ["rows.h5::/train"], split_by="who")
    made["--split-by an array of images"] = partial(open_arrays, ["rows.h5::/train"], split_by="images")
    made["--limit of one row"] = partial(split_rows, ArrayDataset("x", {"y": np.arange(5)}), Split((0.8, 0.2), limit=1))
    made["--limit of few rows"] = partial(limit_parts, {"train": source, "val": source}, Split(limit=1))
    target = Path("rows.h5").absolute()
    made["a target that exists"] = partial(write_files, {"": source}, target)
    made["a folder that nobody may write to"] = partial(write_files, {"": source}, Path("/sys/x.h5"))
    rows = {"many broken rows": Numbers(30, range(3, 28)), "broken rows alone": Numbers(3, range(3))}
    rows["rows of two types"] = Numbers(4)
    rows["rows of two types"].values[2] = 0.5
    new = target.with_name("new.h5")
    return made | {name: partial(write_files, {"": reader}, new) for name, reader in rows.items()}


def test_messages_of_convert(tmp_path, monkeypatch, compare_messages):
    monkeypatch.chdir(tmp_path)
    mistakes = of_arrays() | of_tables() | of_pixels() | of_events() | of_images() | of_commands()
    mistakes |= of_parquet() | of_archives()
    before = {*tmp_path.iterdir()}
    compare_messages(mistakes)
    assert {path.name for path in {*tmp_path.iterdir()} - before} <= {
        "x.csv",
        "new.h5.broken.txt",
    }  # a mistake writes no rows


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("arrays x=x.npy y=y.npy --split 0.9 out.h5", "error: x.npy does not exist"),
        ("images photos x.h5 --size 0", "error: --size: 0 should be HxW, such as 218x178, or one number for both"),
        ("images photos x.h5 --seed -1", "error: --seed: -1 should be a whole number of at least 0"),
        ("images . data/photos", "error: TARGET is data/photos; it should end in .h5 or .hdf5"),
        ("images . x.h5 --no-header", "error: --no-header has no meaning for ."),
        ("repack absent.h5 x.h5", "error: absent.h5 does not exist"),
    ],
)
def test_convert_mistakes_have_exit_code_2(convert, command, message):
    shown = convert(command, code=2).err
    assert shown.startswith(message)
    assert shown.count("\n") == 1


def test_convert_targets_are_ignored_by_git():
    ignored = (PROJECT / ".gitignore").read_text().splitlines()
    assert {f"*{suffix}" for suffix in (*SUFFIXES, ".broken.txt", ".skipped.txt")} <= {*ignored}


def test_convert_commands_have_help(convert):
    for name in commands():
        shown = convert(name, "--help").out
        assert "--compression" not in shown or f"--compression {{{','.join(get_args(Compression))}}}" in shown
        assert "--resize" not in shown or f"--resize {{{','.join(get_args(Resize))}}}" in shown


@pytest.mark.parametrize("line", ["info nowhere.h5", "images nowhere x.h5", "events --help"])
def test_convert_help_and_mistakes_need_no_torch(line):
    code = f"""
import sys
from fastgpu.convert.command import main
try:
    main({line.split()})
finally:
    assert not {{"torch", "h5py", "numpy"}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == ((0, 0) if "--help" in line else (2, 1)), done.stderr


def test_convert_says_on_a_terminal_what_it_reads(monkeypatch, capsys):
    announce(parse(["arrays", "a=README.md", "README.md", "x.h5"]))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for line in ("arrays a=README.md README.md x.h5", "dataset a:B README.md x.h5"):
        announce(parse(line.split()))
    assert capsys.readouterr().err == "reading a=README.md, README.md\nreading a:B\n"


def test_convert_shares_and_sizes():
    assert [shares(text) for text in ("0.75", "0.8,0.1,0.1")] == [(0.75, 0.25), (0.8, 0.1, 0.1)]
    assert [size(text) for text in ("64", "218x178")] == [(64, 64), (218, 178)]
    found = [max_broken(text) for text in ("stop", "skip", "skip=10%", "skip=0.5%", "skip=100%")]
    assert found == [0, 0.01, 0.1, 0.005, 1]
    wrong = [(shares, each) for each in ("", "1", "-0.5", "half", "0.5,0.6", "0.4,0.2,0.2,0.2", "nan")]
    wrong += [(max_broken, each) for each in ("", "10%", "skip=10", "stop=1%", "skip=0%", "skip=101%", "skip=x%")]
    wrong += [(size, each) for each in ("", "-1", "1.5", "32,32", "3x32x32", "99999")]
    for parse_word, text in wrong:
        with pytest.raises(ArgumentTypeError, match=f"^{text} should be "):
            parse_word(text)
