import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.recsys import movielens
from fastgpu.convert.recsys.movielens import read_ratings
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
@pytest.mark.parametrize("parsed", [700, 3000, 1_000_000])
def test_ratings_above_the_threshold_in_the_files_order(tmp_path, monkeypatch, end, packed, parsed):
    monkeypatch.setattr(movielens, "PARSED_ROWS", parsed)
    path, seen = write(tmp_path / "ratings Ω.csv", end), []
    if packed:
        with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-20m/README.txt", "none")
            archive.write(path, "ml-20m/ratings.csv")
        path = tmp_path / "ml.zip"
    found = read_ratings(path, on_progress=lambda rows, done: seen.append((rows, done)))
    users, items, given = ratings()
    np.testing.assert_array_equal(found.users, users[given > 3.5])
    np.testing.assert_array_equal(found.items, items[given > 3.5])
    assert found.skipped == []
    assert sum(rows for rows, _ in seen) == 3000
    assert seen[-1][1] == 1


def test_columns_may_have_other_names_and_places(tmp_path):
    (tmp_path / "x.csv").write_text("when,stars , who, what\n1,5,7,70\n2,1,8,80\n3,4,9,90\n")
    found = read_ratings(tmp_path / "x.csv", 3, columns=["who", "what", "stars"])
    assert (found.users.tolist(), found.items.tolist()) == ([7, 9], [70, 90])


@pytest.mark.parametrize("delimiter", ["::", "\t"])
@pytest.mark.parametrize("parsed", [1, 700, 1_000_000])
def test_the_older_formats_have_no_header(tmp_path, monkeypatch, capsys, delimiter, parsed):
    monkeypatch.setattr(movielens, "PARSED_ROWS", parsed)
    users, items, given = (column[:1000] for column in ratings())
    given = np.ceil(given).astype(int)
    name = "ratings.dat" if delimiter == "::" else "u.data"
    lines = [delimiter.join(map(str, (*line, 978300760))) for line in zip(users, items, given, strict=True)]
    (tmp_path / name).write_text("\n".join([*lines, ""]))
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.write(tmp_path / name, f"ml/{name}")
    for source in (tmp_path / name, tmp_path / "ml.zip"):
        found = read_ratings(source)
        np.testing.assert_array_equal(found.users, users[given > 3.5])
        np.testing.assert_array_equal(found.items, items[given > 3.5])
        assert "has no header; its columns are taken for user, item and rating\n" in capsys.readouterr().out
    lines[6] = delimiter.join(("7", "x", "5"))
    (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"{name}:7: '7.*x.*5' is not"):
        read_ratings(tmp_path / name)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_may_be_separated_by_other_characters(tmp_path, separator):
    text = "who,what,stars\n7,70,5\n8,80,1\n".replace(",", separator)
    (tmp_path / "x.csv").write_text(text)
    found = read_ratings(tmp_path / "x.csv", columns=["who", "what", "stars"])
    assert (found.users.tolist(), found.items.tolist()) == ([7], [70])


def test_ids_of_text_are_refused_with_the_cure(tmp_path):
    (tmp_path / "x.csv").write_text("who,what,stars\nann,a7,5\n")
    for on_error in ("stop", "skip"):
        with pytest.raises(
            UserError, match=r"x.csv:2: 'ann,a7,5' .*whole numbers .*from 0 below 2\^31: pandas.factorize makes"
        ):
            read_ratings(tmp_path / "x.csv", columns=["who", "what", "stars"], on_error=on_error)


BROKEN = ["a,2,3.0,4", "1,2", "1,2,nan,4", "-1,2,3.0,4", "1,2,,4", "1;2;3", "9999999999,2,3.0,4", "1,2,inf,4", "\x00"]
BROKEN += ["1,2,3,75,4", "1,2,3.5,4,", '1,2,"3,75",4', "1,2,4"]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_or_skipped(tmp_path, line):
    path = write(tmp_path / "ratings.csv", extra={42: line, 1001: ""})
    with pytest.raises(
        UserError,
        match=r"ratings.csv:42: .* is not userId,movieId,rating(: . columns, not 4 .*)?; --on-error skip",
    ):
        read_ratings(path)
    found = read_ratings(path, on_error="skip")
    users, _, given = (np.delete(column, [40, 999]) for column in ratings())
    assert found.users.tolist() == users[given > 3.5].tolist()
    assert [each.split(": ")[0] for each in found.skipped] == [f"{path}:42"]


@pytest.mark.parametrize("delimiter", ["::", "\t"])
@pytest.mark.parametrize("columns", [3, 5])
def test_lines_without_header_have_as_many_columns_as_the_first(tmp_path, delimiter, columns):
    lines = [delimiter.join("12545"[:width]) for width in (4, 4, columns, 4)]
    (tmp_path / "u.data").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"u.data:3: .* [359] columns, not [47] .a decimal comma"):
        read_ratings(tmp_path / "u.data")


def test_a_decimal_comma_is_no_column(tmp_path):
    lines = ["1,2,3,75" if row % 2 else "1,2,4" for row in range(400)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating", *lines]))
    with pytest.raises(UserError, match="x.csv:3: '1,2,3,75' is not .*: 4 columns, not 3 .a decimal comma"):
        read_ratings(tmp_path / "x.csv", 2)
    with pytest.raises(UserError, match="200 of 400 lines are not ratings"):
        read_ratings(tmp_path / "x.csv", 2, on_error="skip")


def test_titles_in_quotes_may_hold_the_delimiter(tmp_path):
    titles = ["Casino", '"American President, The (1995)"', '"""Great"", a, b"', '24" disc', '""', ""]
    lines = [f"{user},7,5,{title},x" for user, title in enumerate(titles)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating,title,genre", *lines]))
    assert read_ratings(tmp_path / "x.csv").users.tolist() == list(range(6))


def test_more_than_one_in_a_hundred_broken_lines_fail(tmp_path):
    path = write(tmp_path / "ratings.csv", extra=dict.fromkeys(range(2, 40), "x"))
    with pytest.raises(UserError, match="38 of 3,000 lines are not ratings, more than 1 %; the first: .*ratings.csv:2"):
        read_ratings(path, on_error="skip")


def _bomb(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ratings.csv", HEADER + "\n" * 10_000_000)
    return folder / "bomb.zip"


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
        (_bomb, "this is not MovieLens"),
        (_cut, "cut.zip is not .* a whole zip archive"),
        (_empty_zip, "has 0 files ratings.csv"),
        (_text(""), "has the columns none, and not one userId; --columns names those of user, item and rating, or of"),
        (_text("user,item,rating\n1,2,5\n"), "has the columns user, item, rating, and not one userId"),
        (_text("1,2,5\n3,4,5\n"), "x.csv has no header, but begins with 1,2,5; write one, such as user,item,rating"),
        (_text("userId,movieId,rating,userId\n"), "has the columns .*, and not one userId"),
        (_text(HEADER + "\n"), "has no rating above 3.5"),
        (_text(HEADER + "\n1,2,3.0,4\n"), "has no rating above 3.5"),
        (_text(b"\xff\xfe\x00userId"), "is not ratings.csv, .*codec can't decode"),
    ],
)
def test_what_is_no_file_of_ratings_is_one_line(tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        read_ratings(make(tmp_path))


def test_the_command_prints_the_counts_and_writes_three_files(tmp_path, convert):
    source, target = write(tmp_path / "ratings.csv", extra={42: "x"}), tmp_path / "ml.h5"
    result = convert("movielens", source, target, "--held-out", "10")
    assert result.returncode == 2
    assert f"{source}:42" in result.stderr
    assert not list(tmp_path.glob("*.h5"))
    result = convert("movielens", source, target, "--held-out", "10", "--on-error", "skip")
    assert result.returncode == 0, result.stderr
    users, items, given = (np.delete(column, 40) for column in ratings())
    pairs = np.unique(np.stack([users, items])[:, given > 3.5], axis=1)
    counts = np.unique(pairs[0], return_counts=True)[1]
    assert f"{counts[counts >= 5].sum():,} events of {(counts >= 5).sum():,} users with 5 or more" in result.stdout
    assert "of 10 users have none" in result.stdout
    n_repeated = (given > 3.5).sum() - pairs.shape[1]
    assert f"same user and item, and do not count: {n_repeated:,}\n" in result.stdout
    assert (tmp_path / "ml.h5.skipped.txt").read_text().startswith(f"{source}:42: 'x' is not")
    train = open_store("data.train", str(tmp_path / "ml-train.h5"), {"items": "items", "user": "user"}, verify=True)
    assert len(train) == (counts >= 5).sum() - 20
    assert len(train.attributes["item_ids"]) == train.fields["items"].n_items
    for part in ("val", "test"):
        store = open_store("data.val", str(tmp_path / f"ml-{part}.h5"), {"items": "items", "held_out": "held_out"})
        assert len(store) == 10
        assert {field.n_items for field in store.fields.values()} == {train.fields["items"].n_items}


@pytest.mark.parametrize("line", ["1,2,4e0,4", "1,2,-1,4", "1,2,+.5,4", " 1 , 2 ,5.,4", "1500000000,2,5,4", "01,2,5,4"])
def test_a_line_counts_whatever_the_others_are(tmp_path, line):
    """Beside a broken line, lines are judged one by one."""
    path = write(tmp_path / "ratings.csv", extra={42: line})
    alone = read_ratings(path, above=-2)
    write(path, extra={42: line, 50: "x"})
    found = read_ratings(path, above=-2, on_error="skip")
    assert [each.split(": ")[0] for each in found.skipped] == [f"{path}:50"]
    assert found.users.tolist() == np.delete(alone.users, 48).tolist()
    assert found.items.tolist() == np.delete(alone.items, 48).tolist()


@pytest.mark.parametrize("line", ["4e0,2,5,4", "4.0,2,5,4", "1,2,1e60,4", "-1,2,5,4", "1,2,0x4,4", '1,2,"4e0,5",4'])
def test_a_line_is_broken_whatever_the_others_are(tmp_path, line):
    path = write(tmp_path / "ratings.csv", extra={42: line})
    with pytest.raises(UserError, match="ratings.csv:42: "):
        read_ratings(path)


def test_events_without_ratings_all_count(tmp_path, convert):
    lines = [f"{user},{item}" for user in range(30) for item in range(user % 3, 12)]
    (tmp_path / "x.csv").write_text("\n".join(["who,what", *lines]))
    found = read_ratings(tmp_path / "x.csv", columns=["who", "what"])
    assert [f"{user},{item}" for user, item in zip(found.users, found.items, strict=True)] == lines
    (tmp_path / "u.data").write_text("1\t2\t1\t881250949\n1\t3\t5\t881250949\n")
    assert read_ratings(tmp_path / "u.data", columns=["who", "what"]).items.tolist() == [2, 3]
    done = convert("movielens", "x.csv", "x.h5", "--columns", "who,what", "--held-out", "5")
    assert done.returncode == 0, done.stderr
    assert f"{len(lines)} events, which all count" in done.stdout
    done = convert("movielens", "x.csv", "y.h5", "--columns", "who,what", "--above", "3")
    assert "--above is 3, but --columns, who,what, names no ratings; drop it" in done.stderr
    (tmp_path / "x.csv").write_text("who,what\n1,2\n1,a\n")
    with pytest.raises(UserError, match="x.csv:3: '1,a' is not who,what; --on-error skip"):
        read_ratings(tmp_path / "x.csv", columns=["who", "what"])
    (tmp_path / "x.csv").write_text("who,what\n")
    with pytest.raises(UserError, match="x.csv has no events"):
        read_ratings(tmp_path / "x.csv", columns=["who", "what"])


def test_columns_that_are_not_two_or_three_are_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("user,item\n1,2\n")
    with pytest.raises(UserError, match="--columns is user; it should be USER,ITEM,RATING or USER,ITEM"):
        read_ratings(tmp_path / "x.csv", columns=["user"])
