"""Every recipe in configs/ and example in docs/examples trains on data in the published format, by the commands that
its head names.

timm needs torchvision, which does not import beside the CPU build of torch that is pinned here, so a test installs
them, gigabytes, in an environment of their own.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

from support import PROJECT
from support.projects import EXAMPLES, draw_series, run_in, take_example
from support.ranks import printed_by
from support.rows import write_rows

SMALL = ["data.batch_size=8", "train.epochs=1", "log.every_steps=2", "dist.device=cpu", "run.name=a"]

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


def draw_image(path: Path, size: tuple[int, int], red: int) -> None:
    """An image of one color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 100, 50)).save(path)


def write_published(folder: Path) -> None:
    """The Datasets over torchvision's, and a stand-in for it."""
    shutil.copyfile(EXAMPLES / "published.py", folder / "published.py")
    (folder / "torchvision").mkdir()
    (folder / "torchvision/__init__.py").touch()
    (folder / "torchvision/datasets.py").write_text(TORCHVISION)


def draw_imagenet(folder: Path) -> None:
    """Folders of ImageNet, with few rows."""
    for number in range(49):
        draw_image(
            folder / f"imagenet/{'train' if number < 40 else 'val'}/n0{number % 3}/{number}.JPEG", (20, 16), number
        )


def draw_shots(folder: Path) -> None:
    """Images of several sizes, and a CSV with the label of each, and one with a number."""
    for number in range(60):
        draw_image(folder / f"{number}.jpg", (130 + number, 190 - number), 4 * number)
    for name, label in (("photos.csv", ["cat", "dog"] * 30), ("faces.csv", np.linspace(0.1, 2.1, 60))):
        lines = [f"{number}.jpg,{label[number]}" for number in range(60)]
        (folder / name).write_text("\n".join([f"path,{'label' if name == 'photos.csv' else 'age'}", *lines]))


def draw_masks(folder: Path) -> None:
    """Photographs, and masks of their bright pixels."""
    for name in ("photos/a", "masks/a"):
        (folder / name).mkdir(parents=True)
    for number in range(40):
        pixels = np.indices((150, 140)).sum(0) * (number + 1) % 256
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(folder / f"photos/a/{number}.jpg")
        Image.fromarray((pixels > 128).astype(np.uint8)).save(folder / f"masks/a/{number}.png")


def write_images(folder: Path) -> None:
    """Images without labels; the GAN changes train.py."""
    write_rows(folder / "data/images.h5", 240, (3, 16, 16))
    if (folder / "gan.diff").exists():
        subprocess.run(["git", "apply", "gan.diff"], cwd=folder, check=True)


def draw_events(folder: Path) -> None:
    run_in(folder, str(EXAMPLES / "made_up_events.py"))


class Recipe(NamedTuple):
    """What makes its data, settings of a small model, and words for predict.py and what it prints."""

    make: Callable[[Path], None]
    settings: str
    predict: str = ""
    printed: str = ""
    workload: str = "images"
    """Of the smallest project that the recipe fits."""


NETWORK = "model.width=4 model.blocks=1"
RECIPES = {
    "cifar10": Recipe(write_published, NETWORK),
    "celeba": Recipe(write_published, NETWORK),
    "photos": Recipe(draw_shots, NETWORK),
    "imagenet": Recipe(draw_imagenet, f"model.timm= {NETWORK}"),
    "recsys": Recipe(lambda folder: None, "model.hidden_dim=4 model.latent_dim=4", workload="recsys"),
    "segmentation": Recipe(draw_masks, "model.width=4"),
    "gpt": Recipe(
        lambda folder: None,
        "model.dim=8 data.window=513 data.stride=512",
        predict="data/text.h5",
        printed="first_step,nats_per_token\n",
        workload="own",
    ),
    "forecast": Recipe(
        draw_series,
        "model.hidden_dim=4",
        predict="data/series.h5",
        printed="first_step,forecast_0_0,forecast_0_1,",
        workload="own",
    ),
    "sasrec": Recipe(
        draw_events,
        "model.dim=4 data.batch_size=500",
        predict="data/last-test.h5 --top 1",
        printed="row,source,items,item_ids,scores\n",
        workload="recsys",
    ),
    "two_towers": Recipe(
        draw_events,
        "model.dim=4 data.batch_size=500",
        predict="data/time-test.h5 --top 1",
        printed="row,source,items,item_ids,scores\n",
        workload="recsys",
    ),
    "image_numbers": Recipe(draw_shots, "model.width=4", predict="0.jpg", printed="file,prediction\n"),
    "contrastive": Recipe(write_images, "model.width=4 model.queue=16"),
    "gan": Recipe(write_images, "model.width=4"),
}
WITHOUT_COMMANDS = ("recsys", "contrastive", "gan", "forecast")
"""Recipes whose data are included, or those of the user."""
DAILY = ("cifar10",)
"""Recipes that are not only tried at night. The examples have other tests, too."""


def commands_in(text: str, program: str) -> list[list[str]]:
    """The arguments of each call of a program in the head of a recipe."""
    commands = re.findall(rf"^#.*? {program} (.*?)\s*\\?$", text, re.MULTILINE)
    assert commands, f"no {program} command"
    return [shlex.split(command) for command in commands if not command.endswith("...")]


def test_recipes_are_all_known():
    assert {path.stem for path in (PROJECT / "configs").glob("*.yaml")} <= RECIPES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in RECIPES]
)
def test_recipe_works_with_every_command(name, own_copy):
    recipe = RECIPES[name]
    project = own_copy(recipe.workload)
    (project / "configs").mkdir(exist_ok=True)
    take_example(project, name)
    recipe.make(project)

    def run(*words: str) -> str:
        return printed_by([sys.executable, *words], project)

    text = (project / f"configs/{name}.yaml").read_text()
    for program in re.findall(r'python -c "(.*)"\n', text):
        run("-c", program)
    for command in commands_in(text, r"python convert\.py") if name not in WITHOUT_COMMANDS else []:
        run("convert.py", *command)
    data = yaml.safe_load(text)["data"]
    val = data["train"] if str(data["val"]).endswith("%") else data["val"]
    command = commands_in(text, r"train\.py")[0]
    assert command[command.index("--config") + 1] == f"configs/{name}.yaml"
    # A later word of a key takes the place of an earlier one, which train.py would refuse.
    given = [*command, *SMALL, *recipe.settings.split()]
    last = {word.partition("=")[0]: word for word in given}
    words = list(last.values())
    assert re.search(r"epoch 1/1 train/loss \S+, val/\w+ \d", run("train.py", *words))
    assert "epoch 2/2" in run("train.py", "run.resume=runs/a", "train.epochs=2")
    best = json.loads((project / "runs/a/run.json").read_text())["best"][0]
    assert best in run("predict.py", "runs/a", "--evaluate", val)
    if recipe.predict:
        assert run("predict.py", "runs/a", *recipe.predict.split()).startswith(recipe.printed)
    assert "see also" in run("diagnose.py", *words, "--seconds", "0.02")
    assert f"  best {best} " in run("report.py", "runs/a")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the packages are those of Linux")
def test_recipe_with_a_network_of_timm(tmp_path):
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
