import zipfile

import h5py
import numpy as np
import pytest
from scipy import sparse

from fastgpu.convert.recsys.events import read_events
from fastgpu.convert.recsys.interactions import PUBLISHED_SEED, hold_out_users
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import open_store
from support import PROJECT
from support.rows import read_rows
from workloads.recsys import Workload


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
    found_users, found_items = read_events(path)
    np.testing.assert_array_equal(found_users, users[ratings > 3.5])
    np.testing.assert_array_equal(found_items, items[ratings > 3.5])
    assert found_users.dtype == found_items.dtype == np.int32
    told = "has no header; its columns are taken for userId, movieId, rating\n" in capsys.readouterr().out
    assert told == (separator != ",")


def test_events_columns_of_other_names(tmp_path):
    (tmp_path / "x.csv").write_text("when;stars ; who; what\n1;5.;07;70\n2;+1;8;80\n\n3;4e0; 1500000000 ;90\n")
    users, items = read_events(tmp_path / "x.csv", ["who", "what", "stars"], 3)
    assert (users.tolist(), items.tolist()) == ([7, 1_500_000_000], [70, 90])
    assert read_events(tmp_path / "x.csv", ["who", " what"])[0].tolist() == [7, 8, 1_500_000_000]


def test_events_zip_larger_than_memory(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "ml.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ratings.csv", b"0" * 1_000_000)
    monkeypatch.setattr("fastgpu.convert.recsys.events.free_host_bytes", lambda: 3_999_999)
    with pytest.raises(UserError, match="ml.zip holds 0.0 GB of text, and 0.0 GB of memory are free"):
        read_events(tmp_path / "ml.zip")


def test_events_without_a_header(tmp_path):
    (tmp_path / "x.csv").write_text("70,7,5\n80,8,1\n")
    users, items = read_events(tmp_path / "x.csv", ["2", "1", "3"], has_header=False)
    assert (users.tolist(), items.tolist()) == ([7], [70])


@pytest.mark.parametrize("time", ["timestamp", "when", ""])
@pytest.mark.parametrize("is_date", [False, True])
def test_events_last_rating_counts(tmp_path, capsys, time, is_date):
    """By its time, and if there is none, or of equal ones, by its place in the file."""
    rng = np.random.default_rng(0)
    users, items, ratings, times = (rng.integers(0, n, 400) for n in (9, 9, 6, 50))
    shown = [f"2026-01-{1 + each // 2:02d}T{12 * (each % 2):02d}:00" if is_date else str(each) for each in times]
    lines = [",".join(map(str, line)) for line in zip(users, items, ratings, shown, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join([f"userId,movieId,rating,{time or 'x'}", *lines]))
    columns = ["userId", "movieId", "rating", *(["when"] if time == "when" else [])]
    found = zip(*map(np.ndarray.tolist, read_events(tmp_path / "x.csv", columns)), strict=True)
    order = np.argsort(times, kind="stable") if time else range(400)
    last = {(users[line], items[line]): line for line in order}
    assert list(found) == [(users[line], items[line]) for line in sorted(last.values()) if ratings[line] > 3.5]
    printed = capsys.readouterr().out
    pairs = {pair: {ratings[n] > 3.5 for n in range(400) if (users[n], items[n]) == pair} for pair in last}
    n_changed = sum(len(each) == 2 for each in pairs.values())
    assert (
        f"of the same user and item replaces: {400 - len(last)}, {f'by {time}' if time else 'in the file'}" in printed
    )
    assert f"warning: {n_changed} pairs of a user and an item have ratings above the limit and not" in printed


def test_events_of_movielens_without_a_header_have_times(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t5\t9\n1\t2\t1\t7\n1\t3\t5\t1\n1\t3\t1\t2\n")
    assert [each.tolist() for each in read_events(tmp_path / "u.data")] == [[1], [2]]


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
@pytest.mark.parametrize("n_repeated", [0, 300])
def test_events_split_is_the_published_one(seed, n_repeated):
    """A pair that comes again does not count."""
    users, items = events(seed)
    given = [np.concatenate([column, column[:n_repeated]]) for column in (users, items)]
    found, (train, parts, names) = hold_out_users("x", *given, HELD), as_published(users, items)
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
    assert (found.n_events, found.n_users) == (counts[counts >= 5].sum(), (counts >= 5).sum())
    assert found.n_repeated == n_repeated


@pytest.mark.parametrize("is_matrix", [True, False])
def test_events_command_writes_three_files(tmp_path, convert, is_matrix):
    dense = np.random.default_rng(0).random((40, 30)) < 0.4
    users, items = np.nonzero(dense)
    lines = [f"{user},{item},4" for user, item in zip(users, items, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(["userId,movieId,rating", *lines, lines[0]]))
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(dense.astype(np.float32)))
    shown = convert(f"events x.{'npz' if is_matrix else 'csv'} y.h5 --held-out 8").out
    assert f"{dense.sum()} events of 40 users with 5 or more; training users have 30 items" in shown
    assert ("a later one of the same user and item replaces: 1, in the file" in shown) != is_matrix
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


def test_events_page_splits_by_time(tmp_path, monkeypatch):
    """The code of docs/data.md gives files that the workload takes, each event in the right one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    users, items = np.divmod(rng.permutation(30 * 40)[:800], 40)
    ratings = rng.integers(1, 6, 800)
    drawn = zip(users, items, ratings, strict=True)
    lines = [f"{3 * user},{7 * item},{stars},{n}" for n, (user, item, stars) in enumerate(drawn)]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
    page = (PROJECT / "docs/data.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    fields = {"items": "items", "held_out": "held_out"}
    train = open_store("x", "data/time-train.h5", {"items": "items"})
    val = open_store("x", "data/time-val.h5", fields)
    Workload(Workload.Options(), train, val)
    item_ids = np.array(val.attributes["item_ids"])
    assert train.attributes["item_ids"] == item_ids.tolist() == sorted(item_ids)
    rows = {name: sets_of(column) for name, column in read_rows(val).items()}
    assert rows["items"] == sets_of(read_rows(train)["items"])
    cut = np.quantile(np.flatnonzero(ratings > 3.5), 0.9, method="nearest")
    liked = {"items": (ratings > 3.5) & (np.arange(800) <= cut), "held_out": (ratings > 3.5) & (np.arange(800) > cut)}
    user_ids = np.unique(users[liked["items"]])
    for name, is_here in liked.items():
        for row, user in enumerate(user_ids):
            expected = {7 * item for item in items[is_here & (users == user)]} & {*item_ids.tolist()}
            assert {*item_ids[[*rows[name][row]]].tolist()} == expected
    assert any(rows["held_out"])


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
