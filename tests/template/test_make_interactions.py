import h5py
import make_interactions
import numpy as np
from harness import arrays_of
from make_interactions import make_interactions as make
from template import PROJECT

from fastgpu.rows.rows import RaggedArray


def test_interactions_are_of_the_seed_and_of_the_sizes_asked_for():
    parts, again, other = (make(600, 200, 20, train_share=0.8, seed=seed) for seed in (3, 3, 4))
    assert [len(part) for part in parts.values()] == [480, 120]
    rows = {name: arrays_of(part) for name, part in parts.items()}
    for name, part in rows.items():
        for field, found in part.items():
            assert np.array_equal(found.values, arrays_of(again[name])[field].values)
            assert not np.array_equal(found.values, arrays_of(other[name])[field].values)
            assert parts[name].fields[field].n_items == 200
            each = [found.values[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)]
            assert all(len(set(row)) == len(row) and set(row) <= set(range(200)) for row in each)
    train, *val = (np.diff(column.offsets) for part in rows.values() for column in part.values())
    lengths = np.concatenate([train, sum(val)])
    assert 18 < lengths.mean() < 22
    assert (lengths.min(), lengths.max()) == (5, 50)
    for seen, held_out in zip(items_of(rows["val"]["items"]), items_of(rows["val"]["held_out"]), strict=True):
        assert not set(seen) & set(held_out)


def items_of(column: RaggedArray) -> list[list[int]]:
    return [part.tolist() for part in np.split(column.values, column.offsets[1:-1])]


def test_the_law_is_known_and_better_than_popularity():
    known = make(3000, 500, 25, train_share=0.8, seed=0)["val"].attributes
    assert known["oracle_ndcg_at_100"] > 1.5 * known["popularity_ndcg_at_100"] > 0.1


def test_the_included_data_are_made_by_the_tool(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["make_interactions.py", str(tmp_path / "interactions.h5"), "--compression", "gzip"]
    )
    make_interactions.main()
    output = capsys.readouterr().out
    assert "val: popularity_ndcg_at_100 0.194, oracle_ndcg_at_100 0.399" in output
    for name, fields in (("train", ["items"]), ("val", ["items", "held_out"])):
        with (
            h5py.File(tmp_path / f"interactions-{name}.h5") as made,
            h5py.File(PROJECT / f"data/interactions-{name}.h5") as included,
        ):
            for field in fields:
                for member in included[field]:
                    np.testing.assert_array_equal(made[field][member], included[field][member])
