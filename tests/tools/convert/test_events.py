import zipfile
from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.recsys.events import read_events
from fastgpu.convert.summary import damaged
from fastgpu.storage.store import open_store


def ratings(rows: int = 3000) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    users = np.sort(rng.integers(1, 90, rows))
    return users, rng.integers(1, 200, rows), rng.integers(1, 11, rows) / 2


def write_ratings(path: Path, extra: dict[int, str] | None = None, end: str = "\n", separator: str = ",") -> Path:
    """ratings.csv, or the older formats without a header. extra: {line: what stands there instead}."""
    lines = ["userId,movieId,rating,timestamp"][: separator == ","]
    lines += [separator.join(map(str, (*line, 1112486027))) for line in zip(*ratings(), strict=True)]
    for number, line in (extra or {}).items():
        lines[number - 1] = line
    path.write_text(end.join([*lines, ""]), newline="")
    return path


@pytest.mark.parametrize(("end", "separator"), [("\n", ","), ("\r\n", ","), ("\n", "::"), ("\n", "\t")])
@pytest.mark.parametrize("packed", [False, True], ids=["csv", "zip"])
def test_ratings_above_the_threshold_in_the_files_order(tmp_path, capsys, end, separator, packed):
    path = write_ratings(tmp_path / "ratings Ω.csv", end=end, separator=separator)
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
    told = "has no header; its columns are taken for userId, movieId, rating\n" in capsys.readouterr().out
    assert told == (separator != ",")


def test_columns_may_have_other_names_places_and_separators(tmp_path):
    (tmp_path / "x.csv").write_text("when;stars ; who; what\n1;5;7;70\n2;1;8;80\n\n3;4; 9 ;90\n")
    users, items = read_events(tmp_path / "x.csv", ["who", "what", "stars"], 3)
    assert (users.tolist(), items.tolist()) == ([7, 9], [70, 90])
    assert read_events(tmp_path / "x.csv", ["who", " what"])[0].tolist() == [7, 8, 9]


def test_numbers_may_be_written_in_many_ways(tmp_path):
    lines = ["1,2,4e0,4", "1,2,+.5,4", " 1 , 2 ,5.,4", "1500000000,2,5,4", "01,2,5,4"]
    users, items = read_events(write_ratings(tmp_path / "ratings.csv", dict(enumerate(lines, 42))), above=-2)
    assert users[40:45].tolist() == [1, 1, 1, 1_500_000_000, 1]
    assert items[40:45].tolist() == [2] * 5


def test_the_command_prints_the_counts_and_writes_three_files(tmp_path, convert):
    result = convert("events", write_ratings(tmp_path / "ratings.csv"), tmp_path / "ml.h5", "--held-out", "10")
    users, items, given = ratings()
    pairs = np.unique(np.stack([users, items])[:, given > 3.5], axis=1)
    counts = np.unique(pairs[0], return_counts=True)[1]
    assert f"{counts[counts >= 5].sum():,} events of {(counts >= 5).sum():,} users with 5 or more" in result.stdout
    assert "of 10 users have none" in result.stdout
    n_repeated = (given > 3.5).sum() - pairs.shape[1]
    assert f"same user and item, and do not count: {n_repeated:,}\n" in result.stdout
    assert not damaged(str(tmp_path / "ml-train.h5"))
    train = open_store("data.train", str(tmp_path / "ml-train.h5"), {"items": "items", "user": "user"})
    assert len(train) == (counts >= 5).sum() - 20
    assert len(train.attributes["item_ids"]) == train.fields["items"].n_items
    for part in ("val", "test"):
        store = open_store("data.val", str(tmp_path / f"ml-{part}.h5"), {"items": "items", "held_out": "held_out"})
        assert len(store) == 10
        assert {field.n_items for field in store.fields.values()} == {train.fields["items"].n_items}
