"""Every recipe in configs/ trains on data in the published format, by the two commands that its head names; that with a
network of timm says how to get it."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from harness import convert, run_train
from PIL import Image
from template import PROJECT, ROOT

RECIPES = sorted((PROJECT / "configs").glob("*.yaml"))
SMALL = ["data.batch_size=8", "train.epochs=1", "log.every_steps=2", "dist.device=cpu"]
SMALL_MODEL = {
    "images": ["model.width=4", "model.blocks=1"],
    "recsys": ["model.hidden_dim=4", "model.latent_dim=4"],
}


TORCHVISION = """
import numpy as np
import torch
from PIL import Image


class CIFAR10:
    classes = [f"class {number}" for number in range(10)]
    attr_names = [*(f"attribute {number}" for number in range(40)), ""]

    def __init__(self, root, **options):
        pass

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return Image.fromarray(np.full((32, 32, 3), row, np.uint8)), row % 10


class CelebA(CIFAR10):
    def __init__(self, root, split, target_type):
        assert split in ("train", "valid", "test") and target_type == "attr"

    def __getitem__(self, row):
        return Image.fromarray(np.full((218, 178, 3), row, np.uint8)), torch.arange(40) // (row + 1) % 2
"""
"""A stand-in with few rows."""


def published(folder: Path) -> None:
    """The Datasets over torchvision's, and a stand-in for it."""
    shutil.copyfile(ROOT / "docs/examples/published.py", folder / "published.py")
    (folder / "torchvision").mkdir()
    (folder / "torchvision/__init__.py").touch()
    (folder / "torchvision/datasets.py").write_text(TORCHVISION)


def imagenet(folder: Path) -> None:
    """Folders of ImageNet, with few rows."""
    for split, n_rows in (("train", 40), ("val", 9)):
        for number in range(n_rows):
            path = folder / f"imagenet/{split}/n0{number % 3}/{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 20, 3), number, np.uint8)).save(path)


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


def included(folder: Path) -> None:
    """The data of the project itself."""
    (folder / "data").symlink_to(PROJECT / "data")


MAKE_DATA = {
    "cifar10": published,
    "celeba": published,
    "csv-images": photos,
    "imagenet": imagenet,
    "recsys": included,
}


def commands_in(text: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in the head of a recipe."""
    commands = re.findall(rf"^#.*? {program} (.*?)\s*\\?$", text, re.MULTILINE)
    assert commands, f"no {program} command"
    return [shlex.split(command) for command in commands if not command.endswith("...")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_data_its_command_and_its_result(path):
    head = path.read_text().split("workload:")[0]
    assert all(f"# {word}: " in head for word in ("Data", "Train", "Result"))
    arguments = commands_in(head, r"train\.py")[0]
    assert arguments[arguments.index("--config") + 1] == f"configs/{path.name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_on_data_in_the_published_format(path, tmp_path):
    text = path.read_text()
    MAKE_DATA[path.stem](tmp_path)
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    if not (tmp_path / "data").exists():
        (tmp_path / "data").mkdir()
        for command in commands_in(text, r"python convert\.py"):
            done = convert(*command, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    workload = re.search(r"(?m)^workload: (\w+)$", text)[1]
    (tmp_path / "timm.py").write_text('raise ImportError("No module named timm")')  # it may be installed here
    arguments = commands_in(text, r"train\.py")[0]
    done = run_train(*arguments, *SMALL, *SMALL_MODEL[workload], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    if path.stem == "imagenet":
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "error: model.timm is resnet50: No module named timm; pip install timm; see timm.list_models()"
        ]
        return
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 1/1 train/loss \S+, val/\w+ \d", done.stdout + done.stderr)
