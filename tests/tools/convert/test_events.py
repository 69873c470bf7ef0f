import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.recsys.events import read_events
from fastgpu.process.launch import UserError
from fastgpu.storage.store import open_store

HEADER = "userId,movieId,rating,timestamp"


def ratings(rows: int = 3000, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    users = np.sort(rng.integers(1, 90, rows))
    return users, rng.integers(1, 200, rows), rng.integers(1, 11, rows) / 2


def write(path: Path, end: str = "\n", columns: str = HEADER, extra: dict[int, str] | None = None) -> Path:
    """ratings.csv; extra: {line: what stands there instead}."""
    lines = [columns] + [f"{u},{m},{r:.1f},{1112486027 + u}" for u, m, r in zip(*ratings(), strict=True)]
    for number, line in (extra or {}).items():
        lines[number - 1] = line
    path.write_text(end.join([*lines, ""]), newline="")
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True], ids=["csv", "zip"])
def test_ratings_above_the_threshold_in_the_files_order(tmp_path, end, packed):
    path = write(tmp_path / "ratings Ω.csv", end)
    if packed:
        with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-20m/README.txt", "none")
            archive.write(path, "ml-20m/ratings.csv")
        path = tmp_path / "ml.zip"
    found_users, found_items = read_events(path)
    users, items, given = ratings()
    np.testing.assert_array_equal(found_users, users[given > 3.5])
    np.testing.assert_array_equal(found_items, items[given > 3.5])
    assert found_users.dtype == found_items.dtype == np.int32


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_columns_may_have_other_names_places_and_separators(tmp_path, separator):
    text = "when,stars , who, what\n1,5,7,70\n2,1,8,80\n\n3,4, 9 ,90\n"
    (tmp_path / "x.csv").write_text(text.replace(",", separator))
    users, items = read_events(tmp_path / "x.csv", ["who", "what", "stars"], 3)
    assert (users.tolist(), items.tolist()) == ([7, 9], [70, 90])


@pytest.mark.parametrize("separator", ["::", "\t"])
def test_the_older_formats_have_no_header(tmp_path, capsys, separator):
    users, items, given = (column[:1000] for column in ratings())
    given = np.ceil(given).astype(int)
    name = "ratings.dat" if separator == "::" else "u.data"
    lines = [separator.join(map(str, (*line, 978300760))) for line in zip(users, items, given, strict=True)]
    (tmp_path / name).write_text("\n".join([*lines, ""]))
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.write(tmp_path / name, f"ml/{name}")
    for source in (tmp_path / name, tmp_path / "ml.zip"):
        found_users, found_items = read_events(source)
        np.testing.assert_array_equal(found_users, users[given > 3.5])
        np.testing.assert_array_equal(found_items, items[given > 3.5])
        shown = capsys.readouterr().out
        assert "has no header; its columns are taken for userId, movieId, rating\n" in shown
    lines[6] = separator.join(("7", "x", "5", "1"))
    (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"{name}:7: movieId is 'x'; it should be a whole number"):
        read_events(tmp_path / name)
    assert read_events(tmp_path / "ml.zip", ["userId", "movieId"])[0].tolist() == users.tolist()


BROKEN = ["a,2,3.0,4", "1,2", "1,2,nan,4", "-1,2,3.0,4", "1,2,,4", "1;2;3", "9999999999,2,3.0,4", "1,2,inf,4", "\x00"]
BROKEN += ["1,2,3,75,4", "1,2,3.5,4,", '1,2,"3,75",4', "1,2,4", "4e0,2,5,4", "4.0,2,5,4", "1,2,0x4,4", '1,2,"4e0,5",4']
BROKEN += ["3000000000,2,5,4", "1,3000000000,5,4"]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named(tmp_path, line):
    path = write(tmp_path / "ratings.csv", extra={42: line, 1001: ""})
    with pytest.raises(UserError, match=r"ratings.csv:42: "):
        read_events(path)


def test_a_last_line_that_was_cut_is_named(tmp_path):
    path = write(tmp_path / "ratings.csv")
    path.write_text(path.read_text() + "5,6,5")
    with pytest.raises(UserError, match=r"ratings.csv:3002: 3 columns; its header has 4"):
        read_events(path)


@pytest.mark.parametrize("line", ["1,2,4e0,4", "1,2,+.5,4", " 1 , 2 ,5.,4", "1500000000,2,5,4", "01,2,5,4"])
def test_numbers_may_be_written_in_many_ways(tmp_path, line):
    users, items = read_events(write(tmp_path / "ratings.csv", extra={42: line}), above=-2)
    assert (users[40], items[40]) == (int(line.split(",")[0]), 2)


def test_a_decimal_comma_is_no_column(tmp_path):
    lines = ["1,2,3,75" if row % 2 else "1,2,4" for row in range(400)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating", *lines]))
    with pytest.raises(UserError, match=r"x.csv:3: 4 columns; its header has 3; .* a decimal comma"):
        read_events(tmp_path / "x.csv", above=2)


def test_titles_in_quotes_may_hold_the_separator(tmp_path):
    titles = ["Casino", '"American President, The (1995)"', '"""Great"", a, b"', '""', ""]
    lines = [f"{user},7,5,{title},x" for user, title in enumerate(titles)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating,title,genre", *lines]))
    assert read_events(tmp_path / "x.csv")[0].tolist() == list(range(5))


def _cut(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "cut.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(write(folder / "x.csv"), "ml/ratings.csv")
    data = bytearray((folder / "cut.zip").read_bytes())
    data[2000:2100] = bytes(100)
    (folder / "cut.zip").write_bytes(data)
    return folder / "cut.zip"


def _empty_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "none.zip", "w") as archive:
        archive.writestr("movies.csv", "x")
    return folder / "none.zip"


def _text(text: str | bytes):
    def make(folder: Path) -> Path:
        (folder / "x.csv").write_bytes(text.encode() if isinstance(text, str) else text)
        return folder / "x.csv"

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.csv", "none.csv does not exist"),
        (lambda folder: folder, "cannot be read: Is a directory"),
        (_cut, "cut.zip is not .* a whole zip archive"),
        (_empty_zip, "has 0 files ratings.csv"),
        (_text(""), "has the columns none, and not one userId"),
        (_text("user,item,rating\n1,2,5\n"), "has the columns user, item, rating, and not one userId"),
        (_text("1,2,5\n3,4,5\n"), "x.csv has no header, but begins with 1,2,5; write one, such as userId,movieId,"),
        (_text("userId,movieId,rating,userId\n"), "has the columns .*, and not one userId"),
        (_text(HEADER + "\n"), "has no rows below its header"),
        (_text(HEADER + "\n1,2,3.0,4\n"), "has no rating above 3.5"),
        (_text(b"\xff\xfe\x00userId"), "is not a CSV file of UTF-8 text: .*codec can't decode"),
    ],
)
def test_what_is_no_file_of_ratings_is_one_line(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        read_events(make(tmp_path))


def test_an_archive_that_memory_cannot_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ratings.csv", HEADER + "\n" * 10_000_000)
    monkeypatch.setattr("fastgpu.convert.recsys.events.free_host_bytes", lambda: 8 << 20)
    with pytest.raises(UserError, match="its ratings.csv has 9.5 MiB, 8.0 MiB of memory are free"):
        read_events(tmp_path / "ml.zip")


def test_the_command_prints_the_counts_and_writes_three_files(tmp_path, convert):
    source, target = write(tmp_path / "ratings.csv"), tmp_path / "ml.h5"
    result = convert("events", source, target, "--held-out", "10")
    assert result.returncode == 0, result.stderr
    users, items, given = ratings()
    pairs = np.unique(np.stack([users, items])[:, given > 3.5], axis=1)
    counts = np.unique(pairs[0], return_counts=True)[1]
    assert f"{counts[counts >= 5].sum():,} events of {(counts >= 5).sum():,} users with 5 or more" in result.stdout
    assert "of 10 users have none" in result.stdout
    n_repeated = (given > 3.5).sum() - pairs.shape[1]
    assert f"same user and item, and do not count: {n_repeated:,}\n" in result.stdout
    train = open_store("data.train", str(tmp_path / "ml-train.h5"), {"items": "items", "user": "user"}, verify=True)
    assert len(train) == (counts >= 5).sum() - 20
    assert len(train.attributes["item_ids"]) == train.fields["items"].n_items
    for part in ("val", "test"):
        store = open_store("data.val", str(tmp_path / f"ml-{part}.h5"), {"items": "items", "held_out": "held_out"})
        assert len(store) == 10
        assert {field.n_items for field in store.fields.values()} == {train.fields["items"].n_items}


def test_events_without_ratings_all_count(tmp_path, convert):
    lines = [f"{user},{item}" for user in range(30) for item in range(user % 3, 12)]
    (tmp_path / "x.csv").write_text("\n".join(["who,what", *lines]))
    users, items = read_events(tmp_path / "x.csv", ["who", "what"])
    assert [f"{user},{item}" for user, item in zip(users, items, strict=True)] == lines
    done = convert("events", "x.csv", "x.h5", "--columns", "who,what", "--held-out", "5")
    assert done.returncode == 0, done.stderr
    assert f"{len(lines)} events, which all count" in done.stdout
    done = convert("events", "x.csv", "y.h5", "--columns", "who,what", "--above", "3")
    assert "--above is 3, but --columns, who,what, names no ratings; drop it" in done.stderr


def test_columns_that_are_not_two_or_three_are_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("user,item\n1,2\n")
    with pytest.raises(UserError, match="--columns is user; it should be USER,ITEM,RATING or USER,ITEM"):
        read_events(tmp_path / "x.csv", ["user"])
