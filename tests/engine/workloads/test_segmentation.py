"""The workload `segmentation`: a class for each pixel."""

from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import train as script
import yaml
from harness import ALONE, check_workload, metrics_of

from fastgpu.images.files import IGNORED_CLASS
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import Store, open_store
from workloads.segmentation import UNet, Workload

FIELDS = {"images": "images", "masks": "masks"}
N_CLASSES = 3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_shapes(n_rows: int, side: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Grey images (N, H, W) of a disk (class 1) or a square (class 2) on noise, and their masks (N, H, W)."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side]
    images = random.integers(0, 80, (n_rows, side, side)).astype(np.uint8)
    masks = np.zeros((n_rows, side, side), np.uint8)
    for number in range(n_rows):
        cy, cx = random.integers(5, side - 5, 2)
        if number % 2:
            inside = (y - cy) ** 2 + (x - cx) ** 2 <= 16
        else:
            inside = np.maximum(abs(y - cy), abs(x - cx)) <= 3
        masks[number][inside] = 1 if number % 2 else 2
        images[number][inside] = random.integers(120, 160) if number % 2 else random.integers(200, 240)
    masks[:, 0] = IGNORED_CLASS
    return images, masks


def write_rows(path: Any, images: np.ndarray, masks: np.ndarray, n_classes: int | None = N_CLASSES) -> str:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(5, *images.shape[1:]))
        file["masks"] = masks
        if n_classes:
            file.attrs["n_classes"] = n_classes
    return str(path)


@pytest.fixture
def shapes(tmp_path) -> Store:
    return open_store("data.train", write_rows(tmp_path / "rows.h5", *draw_shapes(40)), FIELDS)


def make_workload(train: Source, val: Source | None = None, **options: Any) -> Workload:
    return Workload(Workload.Options(**({"width": 4} | options)), train, val or train)


def batch_of(n_rows: int) -> Rows:
    images, masks = draw_shapes(n_rows)
    return Rows({"images": torch.from_numpy(images), "masks": torch.from_numpy(masks)})


@pytest.mark.parametrize("options", [{}, {"flip": False, "crop_padding": 0}], ids=["augmented", "plain"])
def test_the_workload_fits_the_protocol(shapes, options):
    workload = make_workload(shapes, **options)
    assert workload.summary == "images: 1 x 16 x 16 (channels x height x width), uint8; masks: 3 classes"
    check_workload(workload, batch_of(12), batch_of(12))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 33, 47), (3, 64, 20), (4, 1, 1)])
def test_any_image_gives_logits_of_its_size_and_every_weight_a_gradient(shape):
    model = UNet(shape, 5, 4)
    logits = model(torch.randn(2, *shape, generator=rng()))
    assert logits.shape == (2, 5, *shape[1:])
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_an_image_and_its_mask_are_moved_alike(shapes):
    """The images hold their own mask, so they must stay equal wherever the mask counts."""
    workload = make_workload(shapes, crop_padding=5)
    masks = batch_of(32)["masks"]
    moved = workload.transform(Rows({"images": masks, "masks": masks}), rng())
    counts = moved["masks"] != IGNORED_CLASS
    assert torch.equal(moved["images"][:, 0][counts], moved["masks"][counts])
    assert not torch.equal(moved["masks"], masks)
    assert (~counts).sum() > (masks == IGNORED_CLASS).sum()  # what was padded is ignored, too


def test_ignored_pixels_count_neither_in_the_loss_nor_in_the_scores(shapes):
    workload = make_workload(shapes)
    batch = batch_of(6)
    logits = torch.randn(6, N_CLASSES, 16, 16, generator=rng())
    masks = batch["masks"]
    valid = masks != IGNORED_CLASS
    likelihood = logits.log_softmax(1).gather(1, masks.long().clamp(max=2)[:, None])[:, 0]
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), -likelihood[valid].mean())

    scores = workload.score(lambda _: logits, batch)
    predicted = logits.argmax(1)
    torch.testing.assert_close(scores["loss"].total / scores["loss"].n, -likelihood[valid].mean())
    accuracy = scores["pixel_accuracy_pct"]
    assert accuracy.total / accuracy.n == 100 * (predicted == masks)[valid].float().mean()
    means = []
    for image in range(6):
        ours, truth = predicted[image][valid[image]], masks[image][valid[image]]
        pairs = [((ours == k) & (truth == k), (ours == k) | (truth == k)) for k in range(N_CLASSES)]
        means.append(np.mean([float(both.sum() / either.sum()) for both, either in pairs if either.any()]))
    torch.testing.assert_close(scores["image_miou_pct"].total / 6, torch.tensor(100 * np.mean(means)).float())
    assert scores["image_miou_pct"].n == 6


def test_a_batch_of_ignored_pixels_has_no_loss_and_no_scores(shapes):
    workload = make_workload(shapes)
    batch = Rows({"images": batch_of(2)["images"], "masks": torch.full((2, 16, 16), IGNORED_CLASS, dtype=torch.uint8)})
    model = workload.model()
    assert workload.loss(model, batch) == 0
    assert [int(score.n) for score in workload.score(model, batch).values()] == [0, 0, 0]


def test_predictions_are_classes_of_pixels(shapes):
    workload = make_workload(shapes)
    model = workload.model().eval()
    batch = batch_of(5)
    mask = workload.predict(model, batch)["mask"]
    assert mask.dtype == torch.uint8
    assert torch.equal(mask.long(), model(batch["images"]).argmax(1))


def test_fields_attributes_and_the_card_are_enough_to_build_the_model_again(tmp_path):
    store = open_store("data.train", write_rows(tmp_path / "x.h5", *draw_shapes(10), n_classes=None), FIELDS)
    workload = make_workload(store)  # masks that are in memory tell the number of classes
    assert workload.n_classes == N_CLASSES
    described = SimpleNamespace(name="x", fields=store.fields, attributes=workload.card(), in_memory=lambda name: None)
    make_workload(described).model().load_state_dict(workload.model().state_dict())
    described.attributes = {}
    with pytest.raises(UserError, match="the number of classes is unknown; give the file the attribute n_classes"):
        make_workload(described)


@pytest.mark.parametrize(
    ("images", "masks", "message"),
    [
        ((5, 8, 8, 3), (5, 8, 8), r"\(N, 8, 8, 3\), which looks like \(N, H, W, C\)"),
        ((5, 3, 8, 8), (5, 8, 4), r"masks are uint8 \(N, 8, 4\), images uint8 \(N, 3, 8, 8\); allowed are masks of"),
        ((5, 3, 8, 8), (5, 1, 8, 8), r"masks are uint8 \(N, 1, 8, 8\)"),
    ],
)
def test_rows_that_are_no_images_with_masks(tmp_path, images, masks, message):
    path = write_rows(tmp_path / "x.h5", np.zeros(images, np.uint8), np.zeros(masks, np.uint8))
    with pytest.raises(UserError, match=message):
        make_workload(open_store("data.train", path, FIELDS))


def test_masks_must_be_bytes_of_known_classes(tmp_path):
    images, masks = draw_shapes(10)
    path = write_rows(tmp_path / "wide.h5", images, masks.astype("i4"))
    with pytest.raises(UserError, match=r"masks are int32 \(N, 16, 16\)"):
        make_workload(open_store("data.train", path, FIELDS))
    path = write_rows(tmp_path / "few.h5", images, masks, n_classes=2)
    with pytest.raises(UserError, match="masks are \\[2\\] in 1?[0-9] of 10 rows; allowed are 0 to 1"):
        make_workload(open_store("data.train", path, FIELDS))


def test_masks_of_0_and_255_are_not_taken_for_one_class(tmp_path):
    images, masks = draw_shapes(10)
    path = write_rows(tmp_path / "binary.h5", images, np.where(masks > 0, 255, 0).astype("u1"), n_classes=None)
    with pytest.raises(UserError, match="masks have one class, because 255 is ignored; write foreground as 1"):
        make_workload(open_store("data.train", path, FIELDS))


def test_shapes_are_learned(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.h5", *draw_shapes(200))
    config = {
        "workload": "segmentation",
        "run": {"name": "a"},
        "data": {"train": "rows.h5", "val": "rows.h5", "fields": FIELDS, "batch_size": 20},
        "model": {"width": 8, "crop_padding": 2},
        "optim": {"lr": 0.01},
        "train": {"epochs": 4},
        "dist": {"device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    script.train(load_config([]), ALONE)
    points = [point for point in metrics_of(tmp_path / "runs/a") if "val/loss" in point]
    assert points[-1]["val/loss"] < 0.5 * points[0]["val/loss"]
    assert points[-1]["val/image_miou_pct"] > max(80, points[0]["val/image_miou_pct"])
