import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, convert, run_train
from PIL import Image
from test_cifar_celeba import celeba_in, cifar_files, tar_of

from fastgpu.process.config_loader import load_config

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = [
    "data.batch_size=8",
    "train.epochs=1",
    "model.width=4",
    "model.blocks=1",
    "log.every_steps=2",
    "dist.device=cpu",
]


def photos(folder: Path) -> None:
    """A CSV and images of several sizes."""
    rng, lines = np.random.default_rng(0), ["path,label"]
    (folder / "shots").mkdir()
    for number in range(60):
        size = rng.integers(130, 200, 2)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"shots/{number}.jpg")
        lines.append(f"shots/{number}.jpg,{['cat', 'dog'][number % 2]}")
    (folder / "photos.csv").write_text("\n".join(lines))


DATA = {
    "cifar10": lambda folder: tar_of(folder / "cifar-10-python.tar.gz", cifar_files("python")),
    "celeba": lambda folder: celeba_in(folder / "celeba", packed=True, rows=40),
    "csv-images": photos,
    "recsys": lambda folder: None,  # made by its own command
}


def command_in(text: str, program: str) -> list[str]:
    """The arguments of the recipe's own command."""
    found = re.search(rf"^#.*? {program} (.*)$", text, re.MULTILINE)
    assert found, f"no {program} command"
    return shlex.split(found[1])


def test_every_recipe_is_tried():
    assert {path.stem for path in RECIPES} <= set(DATA)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_on_data_in_the_published_format(path, tmp_path):
    text = path.read_text()
    DATA[path.stem](tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    result = convert(*command_in(text, r"python convert\.py"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    result = run_train(*command_in(text, r"train\.py"), *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "epoch 1/1 val/" in result.stdout + result.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_does_its_data_and_its_result(path):
    head = path.read_text().split("workload:")[0]
    assert all(f"# {word}:" in head for word in ("Data", "Train", "Result"))
    load_config(["--config", str(path)])
