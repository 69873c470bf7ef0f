import h5py
import numpy as np

from fastgpu.convert.synthetic_images import BLOCK_ROWS, make_images
from fastgpu.rows.contract import BlockRead
from fastgpu.storage.arrays import Arrays


def all_rows(source: Arrays) -> tuple[np.ndarray, np.ndarray]:
    out = {name: np.zeros((len(source), *field.shape), field.dtype) for name, field in source.fields.items()}
    source.read([BlockRead(b, 0, np.arange(n) + b * BLOCK_ROWS) for b, n in enumerate(source.block_rows)], out)
    return out["images"], out["labels"]


def test_rows_are_a_function_of_seed_and_row():
    source = make_images(200, (3, 9, 7), 5, seed=1)
    images, labels = all_rows(source)
    assert labels.tolist() == source.column("labels").tolist() == [n % 5 for n in range(200)]
    out = {"images": np.zeros((10, 3, 9, 7), np.uint8), "labels": np.zeros(10, int)}
    source.read([BlockRead(1, 20, np.arange(10))], out)  # a part of a block
    np.testing.assert_array_equal(out["images"], images[84:94])
    assert not np.array_equal(images, all_rows(make_images(200, (3, 9, 7), 5, seed=2))[0])
    assert not np.array_equal(images, all_rows(make_images(200, (3, 9, 7), 5, seed=1, part=1))[0])


def test_the_nearest_picture_tells_the_class():
    images, labels = all_rows(make_images(1000, (3, 16, 16), 10, seed=0))
    other, truth = all_rows(make_images(300, (3, 16, 16), 10, seed=0, part=1))
    means = np.stack([images[labels == label].mean(0) for label in range(10)])
    distance = ((other[:, None].astype(float) - means) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == truth).mean() > 0.98


def test_the_command(tmp_path, convert):
    result = convert("synthetic", "x.h5", "--rows", "100", "--shape", "1x6x5", "--split", "0.8")
    assert result.returncode == 0, result.stderr
    for name, rows in (("x-train.h5", 80), ("x-val.h5", 20)):
        with h5py.File(tmp_path / name) as file:
            assert file["images"].shape == (rows, 1, 6, 5)
            assert np.bincount(file["labels"][:]).tolist() == [rows // 10] * 10
