"""The examples in docs/examples train in a project that has taken them over, on made-up data."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from contract import check_workload
from harness import kill_tree, run_to_end, run_train, same_weights, train_command, wait_until
from PIL import Image
from template import PROJECT, ROOT
from test_recipes import commands_in, draw

from fastgpu.images.files import IGNORED_CLASS
from fastgpu.rows.rows import Field, Rows

EXAMPLES = ROOT / "docs/examples"
SMALL = ["data.batch_size=8", "train.epochs=1", "log.every_steps=2", "dist.device=cpu", "run.name=a"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project in place, without data."""
    unwanted = shutil.ignore_patterns("__pycache__", ".*", "docs", "data", "runs", "tests")
    copy = shutil.copytree(PROJECT, tmp_path / "project", ignore=unwanted)
    (copy / "data").mkdir()
    return copy


def run(project: Path, *words: str) -> str:
    """Run a script of the project. Returns what it printed."""
    done = run_to_end([sys.executable, *words], project)
    assert done.returncode == 0, done.stderr
    return done.stdout


def take(project: Path, name: str) -> None:
    """Copy a workload and its config into a project."""
    shutil.copyfile(EXAMPLES / f"{name}.py", project / f"workloads/{name}.py")
    shutil.copyfile(EXAMPLES / f"{name}.yaml", project / f"configs/{name}.yaml")


# ---------------------------------------------------------------------------------------------- commands of a config


def draw_photos(folder: Path) -> None:
    """Photographs of one disk each, and masks of its pixels."""
    y, x = np.mgrid[:150, :140]
    for name in ("photos/a", "masks/a"):
        (folder / name).mkdir(parents=True)
    for number in range(40):
        is_inside = (y - 40 - number) ** 2 + (x - 70) ** 2 < 900
        pixels = np.where(is_inside[..., None], [200, 100, 50], [20, 40, 60]).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/a/{number}.jpg")
        Image.fromarray(is_inside.astype(np.uint8)).save(folder / f"masks/a/{number}.png")


def write_book(folder: Path) -> None:
    (folder / "book.txt").write_text("a rose is a rose is a rose. " * 300)


def draw_faces(folder: Path) -> None:
    """Images of one color, and a number for each."""
    for number in range(40):
        draw(folder / f"{number}.png", (80, 70), 6 * number)
    lines = [f"{number}.png,{number / 40 + 0.001}" for number in range(40)]
    (folder / "faces.csv").write_text("\n".join(["path,age", *lines]))


DISKS = "images: uint8 (N, 3, 128, 128), masks: uint8 (N, 128, 128)"
TRAINED = {
    "segmentation": (draw_photos, "model.width=4", DISKS, "--evaluate data/segmentation-val.h5", "miou_pct "),
    "letters": (write_book, "model.dim=8", "train/loss ", "data/text.h5", "row,next\n"),
    "image_numbers": (draw_faces, "model.width=4", "train/loss ", "0.png", "file,prediction\n"),
}
"""{example: what makes its data, a setting, what training shows, arguments of predict.py, what it prints}"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_an_example_trains_by_the_commands_that_its_config_names(project, name):
    make, setting, shown, arguments, printed = TRAINED[name]
    take(project, name)
    make(project)
    text = (project / f"configs/{name}.yaml").read_text()
    for program in re.findall(r'python -c "(.*)"\n', text):
        run(project, "-c", program)
    for command in commands_in(text, r"python convert\.py"):
        run(project, "convert.py", *command)
    (command,) = commands_in(text, r"python train\.py")
    output = run(project, "train.py", *command, *SMALL, setting)
    assert shown in output
    assert "epoch 1/1 train/loss " in output
    assert run(project, "predict.py", "runs/a", *arguments.split()).startswith(printed)


# ---------------------------------------------------------------------------------------------- one batch

GENERATOR = torch.Generator()


def masked(n_rows: int) -> Rows:
    """Images that are their own masks, of three classes; the first line of pixels is ignored."""
    masks = torch.randint(0, 3, (n_rows, 16, 16), dtype=torch.uint8, generator=GENERATOR.manual_seed(0))
    masks[:, 0] = IGNORED_CLASS
    return Rows({"images": masks, "masks": masks})


def texts() -> Rows:
    return Rows({"text": torch.randint(0, 256, (12, 9), dtype=torch.uint8, generator=GENERATOR.manual_seed(0))})


def numbered(*shape: int) -> Rows:
    """Images whose brightness is their label."""
    brightness = torch.arange(40, dtype=torch.uint8)
    labels = brightness.float().view(-1, *[1] * len(shape)).expand(40, *shape).contiguous()
    return Rows({"images": brightness.view(-1, 1, 1, 1).expand(40, 3, 8, 8).contiguous(), "labels": labels})


def open_workload(name: str, batch: Rows, other: Rows | None = None, /, n_classes: int = 3, **options: object):
    """The workload of an example. other: validation rows, if they are of another kind."""
    attributes = {"n_classes": n_classes, "target_names": ["height", "age"]}
    sources = []
    for rows in (batch, other or batch):
        fields = {field: Field(rows[field].numpy().dtype, tuple(rows[field].shape[1:])) for field in rows.columns}
        source = SimpleNamespace(name="rows.h5", fields=fields, attributes=attributes, column=lambda name: None)
        sources.append(source)
    kind = runpy.run_path(str(EXAMPLES / f"{name}.py"))["Workload"]
    return kind(kind.Options(**options), *sources)


@pytest.mark.parametrize(
    ("name", "batch", "options"),
    [
        ("segmentation", masked(12), {"width": 4, "crop_padding": 5}),
        ("letters", texts(), {"dim": 4}),
        ("image_numbers", numbered(), {"width": 4}),
        ("image_numbers", numbered(3), {"width": 4}),
    ],
)
def test_an_example_fits_the_protocol(name, batch, options):
    check_workload(open_workload(name, batch, **options), batch, batch)


def test_messages(compare_messages):
    images = masked(4)["images"]
    wide = Rows({"images": images, "masks": images.int()})
    mistakes = {
        "masks of int32": lambda: open_workload("segmentation", masked(4), wide),
        "masks without a number of classes": lambda: open_workload("segmentation", masked(4), n_classes=0),
        "text of int32": lambda: open_workload("letters", texts(), Rows({"text": texts()["text"].int()})),
        "numbers that are smoothed": lambda: open_workload("image_numbers", numbered(), label_smoothing=0.1),
    }
    compare_messages(mistakes)


def test_segmentation_moves_an_image_and_its_mask_alike():
    batch = masked(32)
    workload = open_workload("segmentation", batch, crop_padding=5)
    moved = workload.transform(batch, GENERATOR.manual_seed(0))
    counts = moved["masks"] != IGNORED_CLASS
    assert torch.equal(moved["images"][:, 0][counts], moved["masks"][counts])
    assert not torch.equal(moved["masks"], batch["masks"])
    assert (~counts).sum() > (batch["masks"] == IGNORED_CLASS).sum()  # what was padded is ignored, too


def test_segmentation_does_not_count_ignored_pixels():
    batch = masked(6)
    workload, masks = open_workload("segmentation", batch), batch["masks"]
    valid = masks != IGNORED_CLASS
    logits = torch.randn(6, 3, 16, 16, generator=GENERATOR.manual_seed(0))
    likelihood = logits.log_softmax(1).gather(1, masks.long().clamp(max=2)[:, None])[:, 0]
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), -likelihood[valid].mean())
    ours, truth = logits.argmax(1)[valid], masks[valid]
    pairs = [((ours == k) & (truth == k), (ours == k) | (truth == k)) for k in range(3)]
    miou = np.mean([float(both.sum() / either.sum()) for both, either in pairs])
    metrics = workload.metrics(workload.score(lambda _: logits, batch))
    assert metrics["miou_pct"] == pytest.approx(100 * miou)
    assert metrics["pixel_accuracy_pct"] == pytest.approx(100 * float((ours == truth).float().mean()))
    assert metrics["loss"] == pytest.approx(float(-likelihood[valid].mean()))
    ignored = Rows({"images": masks, "masks": torch.full_like(masks, IGNORED_CLASS)})
    assert workload.loss(lambda _: logits, ignored) == 0
    assert all(float(value.sum()) == 0 for value in workload.score(lambda _: logits, ignored).values())


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_loss_and_scores_of_numbers_against_the_formula(shape):
    batch = numbered(*shape)
    workload = open_workload("image_numbers", batch)
    outputs_BK = torch.randn(40, *shape, generator=GENERATOR.manual_seed(0)).view(40, -1)
    error_BK = outputs_BK - batch["labels"].view(40, -1)
    torch.testing.assert_close(workload.loss(lambda _: outputs_BK, batch), error_BK.square().mean())
    scores = workload.score(lambda _: outputs_BK, batch)
    torch.testing.assert_close(scores["mse"] / len(error_BK), error_BK.square().mean())
    torch.testing.assert_close(scores["mae"] / len(error_BK), error_BK.abs().mean())


def test_numbers_are_mixed_like_their_images_and_predicted_by_their_names():
    batch = numbered(2)
    workload = open_workload("image_numbers", batch, width=4, mixup_alpha=0.4, crop_padding=0)
    mixed = workload.transform(batch, GENERATOR.manual_seed(0))
    torch.testing.assert_close(mixed["labels"][:, 0], mixed["images"][:, 0, 0, 0].float(), atol=0.51, rtol=0)
    assert not torch.equal(mixed["labels"], batch["labels"])
    assert list(workload.predict(workload.model().eval(), batch)) == ["height", "age"]


# ---------------------------------------------------------------------------------------------- killed and resumed


def write_images(project: Path) -> None:
    """Rows for every example."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (240, 3, 16, 16), dtype=np.uint8),
        "masks": rng.integers(0, 3, (240, 16, 16), dtype=np.uint8),
        "labels": rng.random((240, 2), np.float32),
        "text": rng.integers(97, 102, (240, 33), dtype=np.uint8),
    }
    with h5py.File(project / "data/images.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=(8, *array.shape[1:]))
        file.attrs["n_classes"] = 3


OWN = {
    "gan": ["model.width=4"],
    "contrastive": ["model.width=4", "model.queue=96"],
    "segmentation": ["model.width=4"],
    "letters": [],
    "image_numbers": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in TRAINED)) for name in OWN])
def test_an_example_is_killed_on_two_ranks_and_resumed_to_the_same_weights(project, name):
    take(project, name)
    write_images(project)
    if (EXAMPLES / f"{name}.diff").exists():
        subprocess.run(["git", "apply", EXAMPLES / f"{name}.diff"], cwd=project, check=True)
    words = [
        *("--config", f"configs/{name}.yaml", "data.train=data/images.h5", "data.val=20%", "data.batch_size=16"),
        *("train.epochs=4", "run.checkpoint_every_steps=3", "data.pool_batches=2", "data.tier=disk", "dist.device=cpu"),
        *OWN[name],
    ]
    whole = run_train(*words, "run.name=whole", ranks=2, cwd=project, root=project)
    assert whole.returncode == 0, whole.stderr
    command = train_command(*words, "run.name=killed", ranks=2, root=project)
    with subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: any((project / "runs/killed").glob("checkpoints/last-00000[5-9]")), process)
        kill_tree(process)
    resumed = run_train("run.resume=runs/killed", ranks=2, cwd=project, root=project)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(project / "runs/whole", project / "runs/killed")
