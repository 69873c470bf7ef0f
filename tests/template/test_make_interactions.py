import h5py
import make_interactions
import numpy as np
from harness import arrays_of
from template import PROJECT


def test_interactions_are_of_the_sizes_asked_for():
    parts = make_interactions.make_interactions(600, 200, 20, train_share=0.8, seed=3)
    assert [len(part) for part in parts.values()] == [480, 120]
    columns = [column for part in parts.values() for column in arrays_of(part).values()]
    train, seen, held_out = ([set(row) for row in np.split(each.values, each.offsets[1:-1])] for each in columns)
    assert [sum(map(len, rows)) for rows in (train, seen, held_out)] == [len(each.values) for each in columns]
    assert not any(a & b for a, b in zip(seen, held_out, strict=True))
    users = [*train, *(a | b for a, b in zip(seen, held_out, strict=True))]
    assert set.union(*users) <= set(range(200))
    lengths = [*map(len, users)]
    assert (min(lengths), max(lengths)) == (5, 50)
    assert 18 < np.mean(lengths) < 22


def test_the_included_data_are_made_by_the_tool_and_their_law_beats_popularity(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "interactions.h5"), "--compression", "gzip"])
    make_interactions.main()
    assert "val: popularity_ndcg_at_100 0.194, oracle_ndcg_at_100 0.399" in capsys.readouterr().out
    for name, fields in {"interactions-train.h5": ["items"], "interactions-val.h5": ["items", "held_out"]}.items():
        with h5py.File(tmp_path / name) as made, h5py.File(PROJECT / "data" / name) as included:
            for field in fields:
                for member in included[field]:
                    np.testing.assert_array_equal(made[field][member], included[field][member])
