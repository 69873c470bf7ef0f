"""Every recipe in configs/ trains on data in the published format, by the two commands that its head names; that with a
network of timm says how to get it.

timm needs torchvision, which does not import beside the CPU build of torch that is pinned here, so a test installs
them, gigabytes, in an environment of their own.
"""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from harness import printed_by, run_train
from PIL import Image
from template import PROJECT, ROOT

RECIPES = sorted((PROJECT / "configs").glob("*.yaml"))
SMALL = ["data.batch_size=8", "train.epochs=1", "log.every_steps=2", "dist.device=cpu"]
SMALL_MODEL = {"images": "model.width=4 model.blocks=1", "recsys": "model.hidden_dim=4 model.latent_dim=4"}

TORCHVISION = """
import torch
from PIL import Image


class CIFAR10(list):
    classes = [f"class {number}" for number in range(10)]

    def __init__(self, root, **options):
        self.extend((Image.new("RGB", (32, 32), (row, 0, 0)), row % 10) for row in range(40))


class CelebA(list):
    attr_names = [*(f"attribute {number}" for number in range(40)), ""]

    def __init__(self, root, split, target_type):
        assert split in ("train", "valid", "test") and target_type == "attr"
        attributes = torch.arange(40)
        self.extend((Image.new("RGB", (178, 218), (row, 0, 0)), attributes // (row + 1) % 2) for row in range(40))
"""
"""A stand-in with few rows."""


def draw(path: Path, size: tuple[int, int], red: int) -> None:
    """An image of one color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 100, 50)).save(path)


def write_published(folder: Path) -> None:
    """The Datasets over torchvision's, and a stand-in for it."""
    shutil.copyfile(ROOT / "docs/examples/published.py", folder / "published.py")
    (folder / "torchvision").mkdir()
    (folder / "torchvision/__init__.py").touch()
    (folder / "torchvision/datasets.py").write_text(TORCHVISION)


def draw_imagenet(folder: Path) -> None:
    """Folders of ImageNet, with few rows."""
    for number in range(49):
        draw(folder / f"imagenet/{'train' if number < 40 else 'val'}/n0{number % 3}/{number}.JPEG", (20, 16), number)


def draw_photos(folder: Path) -> None:
    """A CSV and images of several sizes."""
    for number in range(60):
        draw(folder / f"shots/{number}.jpg", (130 + number, 190 - number), 4 * number)
    lines = [f"shots/{number}.jpg,{['cat', 'dog'][number % 2]}" for number in range(60)]
    (folder / "photos.csv").write_text("\n".join(["path,label", *lines]))


MAKE_DATA = {
    "cifar10": write_published,
    "celeba": write_published,
    "csv-images": draw_photos,
    "imagenet": draw_imagenet,
    "recsys": lambda folder: (folder / "data").symlink_to(PROJECT / "data"),
}


def commands_in(text: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in the head of a recipe."""
    commands = re.findall(rf"^#.*? {program} (.*?)\s*\\?$", text, re.MULTILINE)
    assert commands, f"no {program} command"
    return [shlex.split(command) for command in commands if not command.endswith("...")]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_on_data_in_the_published_format(path, tmp_path):
    text = path.read_text()
    MAKE_DATA[path.stem](tmp_path)
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    if not (tmp_path / "data").exists():
        (tmp_path / "data").mkdir()
        for command in commands_in(text, r"python convert\.py"):
            printed_by([sys.executable, PROJECT / "convert.py", *command], tmp_path)
    workload = re.search(r"(?m)^workload: (\w+)$", text)[1]
    (tmp_path / "timm.py").write_text('raise ImportError("No module named timm")')  # it may be installed here
    arguments = commands_in(text, r"train\.py")[0]
    assert arguments[arguments.index("--config") + 1] == f"configs/{path.name}"
    done = run_train(*arguments, *SMALL, *SMALL_MODEL[workload].split(), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    if path.stem == "imagenet":
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "error: model.timm is resnet50: No module named timm; pip install timm; see timm.list_models()"
        ]
        return
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 1/1 train/loss \S+, val/\w+ \d", done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the packages are those of Linux")
def test_a_network_of_timm_trains_is_resumed_and_predicted_from(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    packages = ["torch==2.14.1", "torchvision==0.29.1", "timm"]
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", *packages], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # behind its own

    def run(script: str, *words: str) -> str:
        return printed_by([tmp_path / "venv/bin/python", PROJECT / script, *words], tmp_path)

    for name in ("data", "config.yaml"):
        (tmp_path / name).symlink_to(PROJECT / name)
    words = ("run.name=a", "model.timm=resnet18", "dist.device=cpu", "data.batch_size=256")
    assert "epoch 1/1" in run("train.py", *words, "train.epochs=1")
    assert "epoch 2/2" in run("train.py", "run.resume=runs/a", "train.epochs=2")
    shown = run("predict.py", "runs/a", "--evaluate", "data/digits.h5::/val", "--device", "cpu")
    assert shown.startswith("top1_pct ")
