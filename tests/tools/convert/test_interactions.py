import numpy as np
import pytest
from harness import arrays_of, read_rows
from scipy import sparse

from fastgpu.convert.recsys.interactions import PUBLISHED_SEED, hold_out_users
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.store import open_store

HELD = 15


def events(seed: int = 0, users: int = 80, items: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Users with scattered numbers and 1 to 19 items each, in the order of their numbers, as MovieLens lies."""
    rng = np.random.default_rng(seed)
    found = [(1 + 3 * user, item) for user in range(users) for item in rng.permutation(items)[: rng.integers(1, 20)]]
    return tuple(np.array(column, np.int32) for column in zip(*found, strict=True))


def sets_of(rows: RaggedArray) -> list[set[int]]:
    return [set(rows.values[a:b].tolist()) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


def as_published(
    users: np.ndarray, items: np.ndarray
) -> tuple[list[int], dict[str, dict[int, tuple[set, set]]], list[int]]:
    """The protocol with loops, dictionaries and the global generator: (training users, {part: {user: (fold-in,
    held out)}}, items in their new order)."""
    of_user: dict[int, list[int]] = {}
    for user, item in zip(users.tolist(), items.tolist(), strict=True):
        of_user.setdefault(user, []).append(item)
    of_user = {user: of_user[user] for user in sorted(of_user) if len(of_user[user]) >= 5}
    np.random.seed(PUBLISHED_SEED)
    names = np.array(list(of_user))[np.random.permutation(len(of_user))].tolist()
    train, parts = names[: -2 * HELD], {"val": names[-2 * HELD : -HELD], "test": names[-HELD:]}
    known: dict[int, int] = {}
    chosen = set(train)
    for user, item in zip(users.tolist(), items.tolist(), strict=True):
        if user in chosen:
            known.setdefault(item, len(known))
    found: dict[str, dict[int, tuple[set, set]]] = {}
    for part, some in parts.items():
        np.random.seed(PUBLISHED_SEED)
        found[part] = {}
        for user in sorted(some):
            mine = [known[item] for item in of_user[user] if item in known]
            held: set[int] = set()
            if len(mine) >= 5:
                held = {mine[i] for i in np.random.choice(len(mine), size=int(0.2 * len(mine)), replace=False)}
            found[part][user] = (set(mine) - held, held)
    return train, found, list(known)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_repeated", [0, 300])
def test_the_split_is_that_of_the_published_protocol(seed, n_repeated):
    """A pair that comes again does not count."""
    users, items = events(seed)
    given = [np.concatenate([column, column[:n_repeated]]) for column in (users, items)]
    found, (train, parts, names) = hold_out_users("x", *given, HELD), as_published(users, items)
    columns = {part: arrays_of(rows) for part, rows in found.parts.items()}
    assert columns["train"]["user"].tolist() == train
    assert found.parts["train"].attributes["item_ids"].tolist() == names
    assert found.parts["train"].fields["items"].n_items == len(names)
    number = {item: place for place, item in enumerate(names)}
    of_user = [{number[i] for i in items[users == user].tolist()} for user in train]
    assert sets_of(columns["train"]["items"]) == of_user
    for part in ("val", "test"):
        seen, held = (sets_of(columns[part][field]) for field in ("items", "held_out"))
        for user, *mine in zip(columns[part]["user"].tolist(), seen, held, strict=True):
            assert tuple(mine) == parts[part][user]
    counts = np.unique(users, return_counts=True)[1]
    assert (found.n_events, found.n_users) == (counts[counts >= 5].sum(), (counts >= 5).sum())
    assert found.n_repeated == n_repeated


def test_rows_of_a_sparse_matrix_are_held_out(tmp_path, convert):
    dense = (np.random.default_rng(0).random((40, 30)) < 0.4).astype(np.float32)
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(dense))
    result = convert("events x.npz y.h5 --held-out 8")
    assert f"{int(dense.sum())} events of 40 users" in result.stdout
    val = open_store("data.val", "y-val.h5", {"items": "items", "held_out": "held_out", "user": "user"})
    rows, numbers = read_rows(val), np.array(val.attributes["item_ids"])
    assert len(val) == 8
    for row, user in enumerate(rows["user"]):
        mine = [numbers[field.values[field.offsets[row] : field.offsets[row + 1]]] for field in list(rows.values())[:2]]
        assert sorted(np.concatenate(mine)) == np.flatnonzero(dense[user]).tolist()
        assert len(mine[1]) == int(0.2 * dense[user].sum())
