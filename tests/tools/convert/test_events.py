import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars as pl
import pytest
from scipy import sparse

from fastgpu.convert.recsys.columns import read_ids, read_times
from fastgpu.convert.recsys.events import read_events
from fastgpu.convert.recsys.interactions import PUBLISHED_SEED, hold_out_users
from fastgpu.convert.recsys.log import Log, number, settle
from fastgpu.convert.tables import Table
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import open_store
from support.rows import read_rows
from workloads.recsys import Workload


def names_of(log: Log) -> list[tuple[Any, Any]]:
    """The ids of the user and the item of each event."""
    return list(zip(log.user_ids[log.users].tolist(), log.item_ids[log.items].tolist(), strict=True))


def liked(path: Path, *columns: Any, **how: Any) -> list[tuple[Any, Any]]:
    """The ids of the events of a table that count."""
    return names_of(settle(read_events(path, *columns, **how).log, "last").log)


@pytest.mark.parametrize(("end", "separator"), [("\r\n", ","), ("\n", "::"), ("\n", "\t")])
@pytest.mark.parametrize("packed", [False, True], ids=["csv", "zip"])
def test_events_above_the_threshold(tmp_path, capsys, end, separator, packed):
    rng = np.random.default_rng(0)
    users, items = np.divmod(rng.permutation(18_000)[:3000], 200)
    ratings = rng.integers(1, 11, 3000) / 2
    lines = ["userId,movieId,rating,timestamp"][: separator == ","]
    lines += [separator.join(map(str, (*line, 1112486027))) for line in zip(users, items, ratings, strict=True)]
    path = tmp_path / "ratings Ω.csv"
    path.write_text(end.join([*lines, ""]), newline="")
    if packed:
        with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ml-20m/README.txt", "none")
            archive.write(path, "ml-20m/ratings.csv")
        path = tmp_path / "ml.zip"
    found = [*zip(users[ratings > 3.5].tolist(), items[ratings > 3.5].tolist(), strict=True)]
    assert liked(path) == found
    told = "has no header; its columns are taken for userId, movieId, rating, timestamp\n" in capsys.readouterr().out
    assert told == (separator != ",")


def test_events_columns_of_other_names(tmp_path):
    (tmp_path / "x.csv").write_text("when;stars ; who; what\n1;5.;07;70\n2;+1;8;80\n\n3;4e0; 1500000000 ;90\n")
    assert liked(tmp_path / "x.csv", ["who", "what", "stars"], 3) == [("07", 70), ("1500000000", 90)]
    assert [user for user, _ in liked(tmp_path / "x.csv", ["who", " what"])] == ["07", "8", "1500000000"]
    log = read_events(tmp_path / "x.csv", ["who", "what", "", "when"]).log
    assert log.is_liked.all()
    assert log.times.tolist() == [1, 2, 3]


def test_events_zip_larger_than_memory(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ratings.csv", b"0" * 1_000_000)
    monkeypatch.setattr("fastgpu.convert.recsys.events.free_host_bytes", lambda: 3_999_999)
    with pytest.raises(UserError, match="ml.zip holds 0.0 GB of text, and 0.0 GB of memory are free"):
        read_events(tmp_path / "ml.zip")


def test_events_without_a_header(tmp_path):
    (tmp_path / "x.csv").write_text("70,7,5\n80,8,1\n")
    assert liked(tmp_path / "x.csv", ["2", "1", "3"], has_header=False) == [(7, 70)]


@pytest.mark.parametrize("time", ["timestamp", "when", ""])
@pytest.mark.parametrize("is_date", [False, True])
@pytest.mark.parametrize("repeats", ["last", "first", "all"])
def test_events_one_rating_counts(tmp_path, convert, time, is_date, repeats):
    """By its time, and if there is none, or of equal ones, by its place in the file."""
    rng = np.random.default_rng(0)
    users, items, ratings, times = (rng.integers(0, n, 400) for n in (9, 9, 6, 50))
    shown = [f"2026-01-{1 + each // 2:02d}T{12 * (each % 2):02d}:00" if is_date else str(each) for each in times]
    lines = [",".join(map(str, line)) for line in zip(users, items, ratings, shown, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join([f"userId,movieId,rating,{time or 'x'}", *lines]))
    columns = ["userId", "movieId", "rating", *(["when"] if time == "when" else [])]
    settled = settle(read_events(tmp_path / "x.csv", columns).log, repeats)
    order = np.argsort(times, kind="stable").tolist() if time else list(range(400))
    if repeats == "all":
        chosen = range(400)
    else:
        pairs = {(users[line], items[line]): line for line in (order if repeats == "last" else order[::-1])}
        chosen = sorted(pairs.values())
    assert names_of(settled.log) == [(users[line], items[line]) for line in chosen if ratings[line] > 3.5]
    printed = convert(f"events x.csv y.h5 --held-out 1 --min-items 1 --repeats {repeats} --columns", ",".join(columns))
    if repeats != "all":
        rule = f"by {time}" if time else "in the order of the source"
        assert f"as the {repeats} one of a user and an item does: {400 - len(pairs)}, {rule}" in printed.out
        kinds = {pair: {ratings[n] > 3.5 for n in range(400) if (users[n], items[n]) == pair} for pair in pairs}
        n_changed = sum(len(each) == 2 for each in kinds.values())
        assert f"warning: {n_changed} pairs of a user and an item have ratings above the limit and not" in printed.out


def test_events_of_movielens_without_a_header_have_times(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t5\t9\n1\t2\t1\t7\n1\t3\t5\t1\n1\t3\t1\t2\n")
    assert liked(tmp_path / "u.data") == [(1, 2)]
    assert read_events(tmp_path / "u.data", ["u", "i", "", "t"]).log.times.tolist() == [9, 7, 1, 2]


IDS = {
    "12 3 -4 9000000000 3": (np.array([-4, 3, 12, 9_000_000_000]), "whole numbers"),
    "12 007 7 12 tt1": (np.array(["007", "12", "7", "tt1"]), "text, such as '007'"),
    "9223372036854775808 1 +1 -0 1": (np.array(["+1", "-0", "1", "9223372036854775808"]), "text"),
    "Ω b a Ω b": (np.array(["a", "b", "Ω"]), "text, such as 'Ω'"),
}


@pytest.mark.parametrize("texts", IDS)
def test_events_ids_are_kept(tmp_path, texts):
    (tmp_path / "x.csv").write_text("\n".join(["a,b", *(f" {text} ,x" for text in texts.split())]))
    table = Table(tmp_path / "x.csv")
    found = read_ids(table, "a").number(table.is_whole)
    expected, kind = IDS[texts]
    assert found.ids.tolist() == expected.tolist()
    assert [str(found.ids[n]) for n in found.numbers] == texts.split()
    assert found.kind.startswith(kind)


TIMES: dict[str, tuple[str, list[float]]] = {
    "7 -3 12": ("numbers, -3 to 12", [7, -3, 12]),
    "1.5 0 2": ("numbers, 0 to 2", [1.5, 0, 2]),
    "1112486027 1427784002": (
        "seconds since 1970, 2005-04-02 23:53:47 to 2015-03-31 06:40:02",
        [1112486027, 1427784002],
    ),
    "1112486027123 1": ("milliseconds since 1970, 1970-01-01 00:00:00 to 2005-04-02 23:53:47", [1112486027123, 1]),
    "1112486027123456": ("microseconds since 1970, 2005-04-02 23:53:47", [1112486027123456]),
    "1112486027123456789": ("nanoseconds since 1970, 2005-04-02 23:53:47", [1112486027123456789]),
    "2026-01-31 2025-12-01": ("dates, 2025-12-01 00:00:00 to 2026-01-31 00:00:00", []),
    "2026-01-31T10:00 2025-12-01T09:30": ("dates, 2025-12-01 09:30:00 to 2026-01-31 10:00:00", []),
    "2026-01-31T10:00:00.25 2026-01-31T10:00:00": ("dates, 2026-01-31 10:00:00 to", []),
    "2026-01-31T10:00:00Z 2026-01-31T10:00:00+02:00": ("dates, 2026-01-31 08:00:00 to 2026-01-31 10:00:00", []),
}


@pytest.mark.parametrize("texts", TIMES)
@pytest.mark.parametrize("separator", ["T", " "])
def test_events_times_are_told(tmp_path, texts, separator):
    shown = [text.replace("T", separator) for text in texts.split()]
    (tmp_path / "x.csv").write_text("\n".join(["a,b", *(f"{text},x" for text in shown)]))
    times, clock = read_times(Table(tmp_path / "x.csv"), "a")
    described, expected = TIMES[texts]
    assert clock.describe(times).startswith(described)
    dates = [datetime.fromisoformat(text) for text in texts.split()] if not expected else []
    dates = [date if date.tzinfo else date.replace(tzinfo=UTC) for date in dates]
    assert times.tolist() == (expected or [date.timestamp() * 1e6 for date in dates])
    for text, time in zip(texts.split(), times.tolist(), strict=True):
        assert clock.parse(text) == float(time)


TYPES = {
    "numbers": {"user": [7, -1, 7], "item": ["a", "b", "c"], "stars": [4, 5, 1], "when": [3.5, 2, 1]},
    "dates": {"user": ["7", "-1", "7"], "item": ["a", "b", "c"], "stars": ["4", "5", "1"], "when": None},
    "categories": {"user": [7, -1, 7], "item": pl.Series(["a", "b", "c"], dtype=pl.Categorical), "stars": [True] * 3},
}


@pytest.mark.parametrize("types", TYPES)
def test_events_of_parquet_have_any_type(tmp_path, types):
    columns = dict(TYPES[types])
    if types == "dates":
        columns["when"] = pl.Series([datetime(2026, 1, n, 12, tzinfo=UTC) for n in (3, 2, 1)])
    pl.DataFrame(columns).write_parquet(tmp_path / "x.parquet")
    log, clock, _, _ = read_events(tmp_path / "x.parquet", [*columns], 0.5)
    assert names_of(log) == [(7, "a"), (-1, "b"), (7, "c")]
    assert log.is_liked.all()
    if clock:
        assert log.ranks.tolist() == [2, 1, 0]
        assert clock.unit == ("dates" if types == "dates" else "numbers")
        assert clock.show(log.times[1]) == ("2026-01-02 12:00:00" if types == "dates" else "2")


@pytest.mark.parametrize(("unrated", "expected"), [("drop", "bd"), ("keep", "abcde")])
def test_events_without_a_rating(tmp_path, convert, unrated, expected):
    lines = ["u,a,", "u,b,4", "u,c,-1", "u,d,5", "u,e, NA ", "u,f,2", "u,b, "]
    (tmp_path / "x.csv").write_text("\n".join(["user,item,stars", *lines]))
    columns = ["user", "item", "stars"]
    found = read_events(tmp_path / "x.csv", columns, unrated=unrated)
    assert "".join(sorted(item for _, item in names_of(settle(found.log, "last").log))) == expected
    verb = "are left out" if unrated == "drop" else "count as liked"
    assert f"4 events have no rating or one below 0, and {verb}" in found.found
    assert "2 ratings are above 3.5" in found.found
    below = read_events(tmp_path / "x.csv", columns, -2, unrated=unrated)
    assert f"3 events have no rating, and {verb}" in below.found  # ratings below 0 are ratings
    refused = convert("events x.csv y.h5 --columns user,item,stars", code=2).err
    assert "x.csv:2: stars is '' (wrong lines: 2, 4, 6, 8); it is no rating: --unrated drop leaves such" in refused


HELD = 15


def events(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """80 users with scattered numbers and 1 to 19 items each, in any order. Training users lack many of the items."""
    rng = np.random.default_rng(seed)
    found = [(1 + 3 * user, item) for user in range(80) for item in rng.permutation(400)[: rng.integers(1, 20)]]
    users, items = rng.permutation(np.array(found, np.int32)).T
    return users, items


def sets_of(rows: RaggedArray) -> list[set[int]]:
    return [set(rows.values[a:b].tolist()) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


def as_published(
    users: np.ndarray, items: np.ndarray
) -> tuple[list[int], dict[str, dict[int, tuple[set, set]]], list[int]]:
    """The protocol with loops, dictionaries and the global generator: (training users, {part: {user: (fold-in,
    held out)}}, items in their new order)."""
    of_user = {user: items[users == user].tolist() for user in np.unique(users).tolist()}
    of_user = {user: mine for user, mine in of_user.items() if len(mine) >= 5}
    np.random.seed(PUBLISHED_SEED)
    names = np.array(list(of_user))[np.random.permutation(len(of_user))].tolist()
    train, parts = names[: -2 * HELD], {"val": names[-2 * HELD : -HELD], "test": names[-HELD:]}
    known = list(dict.fromkeys(items[np.isin(users, train)].tolist()))
    found: dict[str, dict[int, tuple[set, set]]] = {}
    for part, some in parts.items():
        np.random.seed(PUBLISHED_SEED)
        found[part] = {}
        for user in sorted(some):
            mine = [known.index(item) for item in of_user[user] if item in known]
            held: set[int] = set()
            if len(mine) >= 5:
                held = {mine[i] for i in np.random.choice(len(mine), size=int(0.2 * len(mine)), replace=False)}
            found[part][user] = (set(mine) - held, held)
    return train, found, known


@pytest.mark.parametrize("seed", range(4))
def test_events_split_is_the_published_one(seed):
    users, items = events(seed)
    found, (train, parts, names) = hold_out_users(number("x", users, items), HELD), as_published(users, items)
    columns = {part: read_rows(rows) for part, rows in found.parts.items()}
    assert columns["train"]["user"].tolist() == train
    assert found.parts["train"].attributes["item_ids"].tolist() == names
    of_user = [{names.index(item) for item in items[users == user]} for user in train]
    assert sets_of(columns["train"]["items"]) == of_user
    for part in ("val", "test"):
        seen, held = (sets_of(columns[part][field]) for field in ("items", "held_out"))
        for user, *mine in zip(columns[part]["user"].tolist(), seen, held, strict=True):
            assert tuple(mine) == parts[part][user]
    counts = np.unique(users, return_counts=True)[1]
    assert found.found[0].startswith(f"{counts[counts >= 5].sum():,} events of {(counts >= 5).sum()} users with 5")


@pytest.mark.parametrize("is_matrix", [True, False])
def test_events_command_writes_three_files(tmp_path, convert, is_matrix):
    dense = np.random.default_rng(0).random((40, 30)) < 0.4
    users, items = np.nonzero(dense)
    lines = [f"{user},{item},4" for user, item in zip(users, items, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating", *lines, lines[0]]))
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(dense.astype(np.float32)))
    shown = convert(f"events x.{'npz' if is_matrix else 'csv'} y.h5 --held-out 8").out
    assert f"{dense.sum()} events of 40 users with 5 or more; training users have 30 items" in shown
    assert ("as the last one of a user and an item does: 1, in the order of the source" in shown) != is_matrix
    n_users = 0
    for part in ("train", "val", "test"):
        fields = ["items", "held_out"] if part != "train" else ["items"]
        store = open_store(f"data.{part}", f"y-{part}.h5", {name: name for name in [*fields, "user"]})
        rows, numbers = read_rows(store), np.array(store.attributes["item_ids"])
        for row, user in enumerate(rows["user"]):
            mine = [rows[name].values[slice(*rows[name].offsets[row : row + 2])] for name in fields]
            assert sorted(numbers[np.concatenate(mine)]) == np.flatnonzero(dense[user]).tolist()
            assert part == "train" or len(mine[1]) == int(0.2 * dense[user].sum())
        assert {store.fields[name].n_items for name in fields} == {30}
        n_users += len(store)
    assert n_users == 40


Row = tuple[str, str, float, int]


def draw_events(n_events: int, *, text_ids: bool = True) -> list[Row]:
    """(user, item, rating, time), in any order. Users have an item again, and equal times occur."""
    rng = np.random.default_rng(n_events)
    n_users = max(1, n_events // 25)
    users, items = rng.integers(0, n_users, n_events), rng.zipf(1.4, n_events) % 60
    ratings, times = rng.integers(1, 11, n_events) / 2, rng.integers(10**9, 10**9 + n_events * 2, n_events)
    form = ("user {}", "tt{:04d}") if text_ids else ("{}", "{}")
    names = [(form[0].format(7 * user), form[1].format(3 * item)) for user, item in zip(users, items, strict=True)]
    return [(*pair, *each) for pair, *each in zip(names, ratings.tolist(), times.tolist(), strict=True)]


def write_events(rows: list[Row], path: Path) -> None:
    table = pl.DataFrame(rows, ["user", "item", "stars", "when"], orient="row")
    table.write_parquet(path) if path.suffix == ".parquet" else table.write_csv(path)


def last_likes(rows: list[Row]) -> dict[str, list[str]]:
    """{user: liked items in the order of time}, of which a user has each once: its last rating counts."""
    last: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row[3]):  # stable
        last.pop(row[:2], None)
        last[row[:2]] = row
    found: dict[str, list[str]] = {}
    for user, item, rating, _ in last.values():
        if rating > 3.5:
            found.setdefault(user, []).append(item)
    return found


def read_users(path: str) -> dict[str, tuple[list[str], ...]]:
    """{user: items, held-out items} of a file that convert.py wrote."""
    with h5py.File(path) as file:
        fields = [name for name in ("items", "held_out") if name in file]
    store = open_store("x", path, {name: name for name in [*fields, "user"]})
    rows, names = read_rows(store), [*map(str, store.attributes["item_ids"])]
    found = {}
    for row, user in enumerate(store.origins()):
        parts = (rows[name].values[slice(*rows[name].offsets[row : row + 2])] for name in fields)
        found[user] = tuple([names[number] for number in part] for part in parts)
    return found


SIZES = [600, pytest.param(100_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("n_events", [1, 3, *SIZES])
@pytest.mark.parametrize("text_ids", [True, False])
@pytest.mark.parametrize("source", ["x.csv", "x.parquet", "part-*.parquet"])
def test_events_are_read_as_by_plain_python(tmp_path, n_events, text_ids, source):
    rows = draw_events(n_events, text_ids=text_ids)
    rows[0] = (*rows[0][:2], 5.0, rows[0][3])
    write_events(rows, tmp_path / source.replace("*", "0"))
    if "*" in source:
        write_events(rows[: n_events // 2 + 1], tmp_path / "part-1.parquet")
        rows = rows + rows[: n_events // 2 + 1]
    log = read_events(tmp_path / source, ["user", "item", "stars", "when"]).log
    ids = [(str(user), str(item)) for user, item in names_of(log)]
    assert [(*pair, *each) for pair, *each in zip(ids, log.is_liked.tolist(), log.times.tolist(), strict=True)] == [
        (user, item, rating > 3.5, time) for user, item, rating, time in rows
    ]
    assert (log.user_ids.dtype.kind == "i") != text_ids


@pytest.mark.parametrize("n_events", SIZES)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("by", ["share", "date"])
def test_events_split_by_time_has_no_future(tmp_path, convert, n_events, parts, by):
    """Rows are what plain Python makes of the events before a moment, without looking at those after it."""
    rows = draw_events(n_events)
    write_events(rows, tmp_path / "x.csv")
    times = np.sort([row[3] for row in rows if row[2] > 3.5])
    cuts = [int(times[int(np.ceil(share * len(times)))]) for share in (0.7, 0.85)[: parts - 1]]
    words = "0.7" if parts == 2 else "0.7,0.15,0.15"
    if by == "date":
        words = ",".join(datetime.fromtimestamp(cut, UTC).isoformat() for cut in cuts)
    shown = convert(f"events x.csv y.h5 --columns user,item,stars,when --split-by-time {words} --min-items 4").out
    early = last_likes([row for row in rows if row[3] < cuts[0]])
    early = {user: items for user, items in early.items() if len(items) >= 4}
    assert {user: each[0] for user, each in read_users("y-train.h5").items()} == early
    known = {item for items in early.values() for item in items}
    for part, start, stop in zip(("val", "test"), cuts, [*cuts[1:], np.inf], strict=False):
        before = last_likes([row for row in rows if row[3] < start])
        history = {user: [item for item in items if item in known] for user, items in before.items()}
        later = last_likes([row for row in rows if start <= row[3] < stop])
        expected = {}
        for user, items in later.items():
            wanted = [item for item in items if item in known and item not in history.get(user, [])]
            if wanted and len(history.get(user, [])) >= 4:
                expected[user] = history[user], wanted
        assert read_users(f"y-{part}.h5") == expected
        n_wanted = sum(len(wanted) for _, wanted in expected.values())
        assert f"{part}: {n_wanted:,} items of {len(expected):,} users to be found" in shown
    assert Path("y-test.h5").exists() == (parts == 3)


def test_events_broken_rows_are_left_out(tmp_path, convert):
    """All are listed; the others give the same files as if these rows were not there."""
    rows = draw_events(600, text_ids=False)
    write_events(rows, tmp_path / "whole.csv")
    header, *lines = (tmp_path / "whole.csv").read_text().splitlines()
    wrong = [",3,5,1000000000", "x,3,many,1000000000", "y,3,5,soon", "1,2,3,4,5", "z, ,4,1000000000"]
    (tmp_path / "x.csv").write_text("\n".join([header, *lines[:100], *wrong, *lines[100:]]))
    flags = "--columns user,item,stars,when --split-by-time 0.8 --keep-order"
    told = convert(f"events x.csv y.h5 {flags}", code=2).err
    assert "5 of 605 rows are broken, which y.h5.broken.txt lists" in told
    assert Path("y.h5.broken.txt").read_text().splitlines() == [
        "x.csv:102: user is ''; it is missing",
        "x.csv:103: stars is 'many'; it should be a number",
        "x.csv:104: when is 'soon'; it should be a number, or a date such as 2026-01-31 or 2026-01-31T12:00:00",
        "x.csv:105: 5 columns; its header has 4; complete the row, or put quotes around a field that holds the "
        "separator (a decimal comma)",
        "x.csv:106: item is ' '; it is missing",
    ]
    told = convert(f"events x.csv y.h5 {flags} --on-error skip=10%").out
    assert "broken rows that were skipped: 5, listed in y.h5.skipped.txt" in told
    assert "24 users (user: whole numbers)" in told
    convert(f"events whole.csv whole.h5 {flags}")
    for part in ("train", "val"):
        assert read_users(f"y-{part}.h5") == read_users(f"whole-{part}.h5")


def test_events_first_look(tmp_path, convert):
    write_events(draw_events(600), tmp_path / "x.csv")
    convert("events x.csv y.h5 --columns user,item,stars,when --split-by-time 0.8")
    convert("events x.csv z.h5 --columns user,item,stars,when --split-by-time 0.8 --limit 4")
    found = {part: read_users(f"z-{part}.h5") for part in ("train", "val")}
    assert sum(map(len, found.values())) == 4
    for part, users in found.items():
        assert users.items() <= read_users(f"y-{part}.h5").items()


@pytest.mark.parametrize("n_events", SIZES)
def test_events_leave_last_out(tmp_path, convert, n_events):
    rows = draw_events(n_events)
    write_events(rows, tmp_path / "x.csv")
    convert("events x.csv y.h5 --columns user,item,stars,when --leave-last-out --keep-order")
    users = {user: items for user, items in last_likes(rows).items() if len(items) >= 5}
    known = {item for items in users.values() for item in items[:-2]}

    def of_known(items: list[str]) -> list[str]:
        return [item for item in items if item in known]

    assert read_users("y-train.h5") == {user: (items[:-2],) for user, items in users.items()}
    for part, place in (("val", -2), ("test", -1)):
        expected = {user: (of_known(items[:place]), of_known([items[place]])) for user, items in users.items()}
        assert read_users(f"y-{part}.h5") == {user: row for user, row in expected.items() if row[1]}
    train, val = (open_store("x", f"y-{part}.h5", {"items": "items", "user": "user"}) for part in ("train", "val"))
    number_of = dict(zip(train.origins(), train.column("user").tolist(), strict=True))
    assert number_of.items() >= dict(zip(val.origins(), val.column("user").tolist(), strict=True)).items()
    Workload(Workload.Options(), train, open_store("x", "y-val.h5", {"items": "items", "held_out": "held_out"}))


def test_events_ids_may_be_many_texts(tmp_path):
    """As docs/data.md says: more than an attribute of h5py's default format takes."""
    ids = [f"item {number}" for number in range(5000)]
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file["items/indptr"], file["items/indices"] = [0, 2], [1, 4999]
        file["items"].attrs["shape"] = 1, 5000
        file.attrs["item_ids"] = ids
    assert open_store("x", str(tmp_path / "x.h5"), {"items": "items"}).attributes["item_ids"] == ids
    with h5py.File(tmp_path / "y.h5", "w") as file, pytest.raises(OSError, match="object header message is too large"):
        file.attrs["item_ids"] = ids
