import numpy as np
from harness import read_rows

from fastgpu.convert.synthetic_interactions import make_interactions


def test_interactions_are_of_the_seed_and_of_the_sizes_asked_for():
    parts = make_interactions(600, 200, 20, train_share=0.8, seed=3)
    again, other = (
        make_interactions(600, 200, 20, train_share=0.8, seed=3),
        make_interactions(600, 200, 20, train_share=0.8, seed=4),
    )
    assert [len(part) for part in parts.values()] == [480, 120]
    rows = {name: read_rows(part) for name, part in parts.items()}
    for name, part in rows.items():
        for field, found in part.items():
            assert np.array_equal(found.values, read_rows(again[name])[field].values)
            assert not np.array_equal(found.values, read_rows(other[name])[field].values)
            assert parts[name].fields[field].n_items == 200
            each = [found.values[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)]
            assert all(len(set(row)) == len(row) and set(row) <= set(range(200)) for row in each)
    lengths = np.concatenate([parts["train"].lengths["items"], sum(parts["val"].lengths.values())])
    assert 18 < lengths.mean() < 22
    assert (lengths.min(), lengths.max()) == (5, 50)
    seen, held = rows["val"]["items"], rows["val"]["held_out"]
    for row in range(120):
        mine = [set(each.values[each.offsets[row] : each.offsets[row + 1]].tolist()) for each in (seen, held)]
        assert not mine[0] & mine[1]


def test_the_law_is_known_and_better_than_popularity():
    known = make_interactions(3000, 500, 25, train_share=0.8, seed=0)["val"].attributes
    assert known["oracle_ndcg_at_100"] > 1.5 * known["popularity_ndcg_at_100"] > 0.1


def test_the_command(convert):
    result = convert(
        "synthetic", "x.h5", "--kind", "interactions", "--rows", "100", "--items", "80", "--mean-items", "9"
    )
    assert result.returncode == 0, result.stderr
    assert "val: popularity_ndcg_at_100 0." in result.stdout
    assert "90 rows, order random, seed 0, in x-train.h5" in result.stdout
    assert "10 rows, order random, seed 0, in x-val.h5" in result.stdout


def test_too_few_items_are_one_line(convert):
    result = convert("synthetic", "x.h5", "--kind", "interactions", "--items", "40")
    assert result.returncode == 2
    assert "a mean of at most a quarter of the items" in result.stderr
    assert len(result.stderr.splitlines()) == 1
