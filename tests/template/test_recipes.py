"""Every recipe in configs/ trains on data in the published format, by the two commands that its head names."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from harness import convert, run_train
from PIL import Image
from template import PROJECT

RECIPES = sorted((PROJECT / "configs").glob("*.yaml"))
SMALL = ["data.batch_size=8", "train.epochs=1", "log.every_steps=2", "dist.device=cpu"]
SMALL_MODEL = {
    "images": ["model.width=4", "model.blocks=1"],
    "segmentation": ["model.width=4"],
    "recsys": ["model.hidden_dim=4", "model.latent_dim=4"],
}


def cifar10(folder: Path) -> None:
    """The archive of CIFAR-10, with few rows."""
    from test_cifar_celeba import cifar_files, tar_of

    tar_of(folder / "cifar-10-python.tar.gz", cifar_files("python"))


def celeba(folder: Path) -> None:
    """The files of CelebA, with few rows."""
    from test_cifar_celeba import celeba_in

    celeba_in(folder / "celeba", packed=True, rows=40)


def imagenet(folder: Path) -> None:
    """The tar files of ImageNet, with few rows."""
    from test_imagenet import imagenet_in

    imagenet_in(folder / "imagenet")


def photos(folder: Path) -> None:
    """A CSV and images of several sizes."""
    rng = np.random.default_rng(0)
    lines = ["path,label"]
    (folder / "shots").mkdir()
    for number in range(60):
        height, width = rng.integers(130, 200, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"shots/{number}.jpg")
        lines.append(f"shots/{number}.jpg,{['cat', 'dog'][number % 2]}")
    (folder / "photos.csv").write_text("\n".join(lines))


def nothing(folder: Path) -> None:
    """The recipe makes its data by its own command."""


def photos_with_masks(folder: Path) -> None:
    """Photographs of one disk each, and masks of its pixels."""
    y, x = np.mgrid[:150, :140]
    for name in ("photos/a", "masks/a"):
        (folder / name).mkdir(parents=True)
    for number in range(40):
        is_inside = (y - 40 - number) ** 2 + (x - 70) ** 2 < 900
        pixels = np.where(is_inside[..., None], [200, 100, 50], [20, 40, 60]).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/a/{number}.jpg")
        Image.fromarray(is_inside.astype(np.uint8)).save(folder / f"masks/a/{number}.png")


MAKE_DATA = {
    "cifar10": cifar10,
    "celeba": celeba,
    "csv-images": photos,
    "imagenet": imagenet,
    "recsys": nothing,
    "segmentation": photos_with_masks,
}


def command_in(text: str, program: str) -> list[str]:
    """The arguments with which the head of a recipe calls a program first."""
    command = re.search(rf"^#.*? {program} (.*)$", text, re.MULTILINE)
    assert command, f"no {program} command"
    return shlex.split(command[1])


def test_every_recipe_is_tried():
    assert {path.stem for path in RECIPES} == set(MAKE_DATA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_data_its_command_and_its_result(path):
    head = path.read_text().split("workload:")[0]
    assert all(f"# {word}: " in head for word in ("Data", "Train", "Result"))
    arguments = command_in(head, r"train\.py")
    assert arguments[arguments.index("--config") + 1] == f"configs/{path.name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_on_data_in_the_published_format(path, tmp_path):
    text = path.read_text()
    MAKE_DATA[path.stem](tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    done = convert(*command_in(text, r"python convert\.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    workload = re.search(r"(?m)^workload: (\w+)$", text)[1]
    done = run_train(*command_in(text, r"train\.py"), *SMALL, *SMALL_MODEL[workload], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 1/1 train/loss \S+, val/\w+ \d", done.stdout + done.stderr)
