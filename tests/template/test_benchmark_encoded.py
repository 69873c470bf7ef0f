"""The benchmark of encoded images: contenders deliver whole batches, and a page compares what was measured."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import encoded
import jpegs
from peers import Task

N_IMAGES = 50
ROUND = {encoded.RATE: 100.0, encoded.COST: 2.0, encoded.FEED_RATIO: 0.5}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A folder of JPEG files, and a file with the same bytes."""
    folder = tmp_path / "jpegs"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(N_IMAGES):
        picture = rng.integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(picture).save(folder / f"{number:02d}.jpg")
    files = [path.read_bytes() for path in sorted(folder.iterdir())]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "jpeg"
        group["indptr"] = np.cumsum([0, *map(len, files)])
        group["values"] = np.frombuffer(b"".join(files), np.uint8)
        file["labels"] = np.arange(N_IMAGES)
    return Task(tmp_path / "rows.h5", tmp_path, batch_size=8, n_workers=1, seed=0)


@pytest.mark.parametrize("name", jpegs.CONTENDERS)
def test_a_contender_delivers_whole_batches_of_random_parts(name: str, task: Task) -> None:
    batches = [images for images, _ in jpegs.Contender(name, task).epoch(0)]
    assert [len(images) for images in batches] == [8] * (N_IMAGES // 8)
    if "bare" not in name:
        assert {(tuple(images.shape[1:]), str(images.dtype)) for images in batches} == {((3, 224, 224), "torch.uint8")}


def test_the_targets_compare_with_the_fastest_library_that_was_measured() -> None:
    results: encoded.Results = {name: [ROUND] for name in (*jpegs.CONTENDERS, *jpegs.PEERS)}
    results["DALI"] = [{encoded.RATE: 125.0, encoded.COST: 1.0}]
    results["FFCV"] = "not installable"
    measured = [row[1] for row in encoded.targets(results).rows]
    assert measured[0] == "1.00 [1.00-1.00]"
    assert measured[1] == "0.80 [0.80-0.80] (DALI)"
    assert measured[3] == "not measured"
    assert measured[5] == "0.500 [0.500-0.500]"
