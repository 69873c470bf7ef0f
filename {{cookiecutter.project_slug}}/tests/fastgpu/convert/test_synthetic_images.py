import h5py
import numpy as np
from harness import convert, read_rows

from fastgpu.convert.synthetic_images import BLOCK_ROWS, SyntheticImages
from fastgpu.convert.synthetic_interactions import interactions
from fastgpu.rows.contract import BlockRead


def all_rows(source: SyntheticImages) -> tuple[np.ndarray, np.ndarray]:
    out = {name: np.zeros((len(source), *field.shape), field.dtype) for name, field in source.fields.items()}
    source.read([BlockRead(b, 0, np.arange(n) + b * BLOCK_ROWS) for b, n in enumerate(source.block_rows)], out)
    return out["images"], out["labels"]


def test_rows_are_a_function_of_seed_and_row():
    source = SyntheticImages(200, (3, 9, 7), 5, seed=1)
    images, labels = all_rows(source)
    assert labels.tolist() == source.column("labels").tolist() == [n % 5 for n in range(200)]
    out = {"images": np.zeros((10, 3, 9, 7), np.uint8), "labels": np.zeros(10, int)}
    source.read([BlockRead(1, 20, np.arange(10))], out)  # a part of a block
    np.testing.assert_array_equal(out["images"], images[84:94])
    assert not np.array_equal(images, all_rows(SyntheticImages(200, (3, 9, 7), 5, seed=2))[0])
    assert not np.array_equal(images, all_rows(SyntheticImages(200, (3, 9, 7), 5, seed=1, part=1))[0])


def test_the_nearest_picture_tells_the_class():
    images, labels = all_rows(SyntheticImages(1000, (3, 16, 16), 10, seed=0))
    other, truth = all_rows(SyntheticImages(300, (3, 16, 16), 10, seed=0, part=1))
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    distance = ((other[:, None].astype(float) - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == truth).mean() > 0.98


def test_the_command(tmp_path):
    result = convert("synthetic", "x.h5", "--rows", "100", "--shape", "1x6x5", "--split", "0.8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name, rows in (("x-train.h5", 80), ("x-val.h5", 20)):
        with h5py.File(tmp_path / name) as file:
            assert file["images"].shape == (rows, 1, 6, 5)
            assert np.bincount(file["labels"][:]).tolist() == [rows // 10] * 10


# ---------------------------------------------------------------------------------------------- interactions


def test_interactions_are_of_the_seed_and_of_the_sizes_asked_for():
    parts = interactions(600, 200, 20, 0.8, seed=3)
    again, other = interactions(600, 200, 20, 0.8, seed=3), interactions(600, 200, 20, 0.8, seed=4)
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
    known = interactions(3000, 500, 25, 0.8, seed=0)["val"].attributes
    assert known["oracle_ndcg_at_100"] > 1.5 * known["popularity_ndcg_at_100"] > 0.1
