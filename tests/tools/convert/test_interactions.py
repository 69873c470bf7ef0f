import numpy as np
import pytest
from harness import arrays_of, read_rows
from scipy import sparse

from fastgpu.convert.recsys.interactions import MIN_ITEMS, PUBLISHED_SEED, draw_hidden, hold_out_users, make_csr
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import open_store

HELD = 15


def events(seed: int = 0, users: int = 80, items: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Users with scattered numbers and 1 to 19 items each, in the order of their numbers, as MovieLens lies."""
    rng = np.random.default_rng(seed)
    found = [(1 + 3 * user, item) for user in range(users) for item in rng.permutation(items)[: rng.integers(1, 20)]]
    return tuple(np.array(column, np.int32) for column in zip(*found, strict=True))


def rows_of(part: ArrayDataset, field: str) -> list[set[int]]:
    found = arrays_of(part)[field]
    return [set(found.values[a:b].tolist()) for a, b in zip(found.offsets, found.offsets[1:], strict=False)]


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
def test_the_split_is_that_of_the_published_protocol(seed):
    users, items = events(seed)
    found, (train, parts, names) = hold_out_users("x", users, items, HELD), as_published(users, items)
    assert arrays_of(found.parts["train"])["user"].tolist() == train
    assert found.parts["train"].attributes["item_ids"].tolist() == names
    assert found.parts["train"].fields["items"].n_items == len(names)
    number = {item: place for place, item in enumerate(names)}
    of_user = [{number[i] for i in items[users == user].tolist()} for user in train]
    assert rows_of(found.parts["train"], "items") == of_user
    for part in ("val", "test"):
        seen, held = (rows_of(found.parts[part], field) for field in ("items", "held_out"))
        for user, *mine in zip(arrays_of(found.parts[part])["user"].tolist(), seen, held, strict=True):
            assert tuple(mine) == parts[part][user]
    counts = np.unique(users, return_counts=True)[1]
    assert (found.n_events, found.n_users) == (counts[counts >= 5].sum(), (counts >= 5).sum())


def test_a_pair_that_comes_again_does_not_count():
    users, items = events()
    twice = hold_out_users("x", np.concatenate([users, users[:300]]), np.concatenate([items, items[:300]]), HELD)
    once = hold_out_users("x", users, items, HELD)
    assert twice.n_events == once.n_events
    for part, reader in once.parts.items():
        for field in [name for name, column in arrays_of(reader).items() if isinstance(column, RaggedArray)]:
            assert rows_of(twice.parts[part], field) == rows_of(once.parts[part], field)


def test_too_few_users_are_one_line():
    users, items = events(users=20)
    with pytest.raises(
        UserError, match="have 5 items or more, and 2 x 15 are to be held out; use a smaller --held-out"
    ):
        hold_out_users("x", users, items, HELD)


def test_a_fifth_of_each_row_is_hidden():
    rows = np.repeat(np.arange(100), np.arange(100) % 23)
    hidden = np.bincount(rows[draw_hidden(rows, 3)], minlength=100)
    counts = np.bincount(rows, minlength=100)
    assert (hidden == np.where(counts >= MIN_ITEMS, (0.2 * counts).astype(int), 0)).all()
    assert not len(draw_hidden(rows[:0], 3))


def test_pairs_become_rows():
    found = make_csr(np.array([2, 0, 2, 0]), np.array([5, 9, 1, 3]), 4)
    assert found.offsets.tolist() == [0, 2, 2, 4, 4]
    assert found.values.tolist() == [3, 9, 1, 5]


# ---------------------------------------------------------------------------------------------- the command


def test_rows_of_a_sparse_matrix_are_held_out(tmp_path, convert):
    dense = (np.random.default_rng(0).random((40, 30)) < 0.4).astype(np.float32)
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(dense))
    sparse.save_npz(tmp_path / "counts.npz", sparse.csr_array(2 * dense))
    result = convert("events x.npz y.h5 --held-out 8")
    assert f"{int(dense.sum())} events of 40 users" in result.stdout
    fields = {"items": "items", "held_out": "held_out", "user": "user"}
    val = open_store("data.val", "y-val.h5", fields)
    rows, numbers = read_rows(val), np.array(val.attributes["item_ids"])
    assert len(val) == 8
    for row, user in enumerate(rows["user"]):
        mine = [numbers[field.values[field.offsets[row] : field.offsets[row + 1]]] for field in list(rows.values())[:2]]
        assert sorted(np.concatenate(mine)) == np.flatnonzero(dense[user]).tolist()
        assert len(mine[1]) == int(0.2 * dense[user].sum())
    result = convert("events counts.npz z.h5 --held-out 8", code=2)
    assert "counts.npz is no sparse matrix of ones" in result.stderr
