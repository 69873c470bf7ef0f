"""The workload `images`: one class of many, or any number of attributes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from contract import check_workload
from harness import copy_project, metrics_of, needs_gpu, numbered, run_train, same_weights, train, weights_of

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.parallel import freeze
from workloads.images import Normalize, Workload, resnet

SMALL = {"width": 4, "blocks": 1}
OFF = {"flip": False, "crop_padding": 0, "min_crop_scale": 1, "cutout_size": 0, "mixup_alpha": 0, "label_smoothing": 0}
UINT8 = np.dtype("uint8")
FIELDS = {"images": "images", "labels": "labels"}


def make_workload(source: ArrayDataset, **options: Any) -> Workload:
    """A small network without augmentation, unless the options say otherwise."""
    return Workload(Workload.Options(**(SMALL | OFF | options)), source, source)


def rows_of(pixels: np.ndarray, labels: np.ndarray, **attributes: Any) -> ArrayDataset:
    return ArrayDataset("made up", {"images": pixels, "labels": labels}, attributes)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng())


def labelled(n_rows: int = 8) -> Rows:
    return Rows({"images": images((n_rows, 3, 8, 8)), "labels": torch.arange(n_rows) % 4})


@pytest.fixture
def store() -> ArrayDataset:
    return rows_of(numbered(40, (3, 8, 8)), np.arange(40) % 4)


# ---------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("shape", "side"), [((1, 8, 8), 8), ((3, 64, 64), 64), ((3, 218, 178), 45), ((1, 5, 90), 90), ((4, 1, 1), 1)]
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_any_image_gives_logits_and_every_weight_a_gradient(shape, side, blocks):
    """Small images keep their resolution in the first stage."""
    model = resnet(shape, 7, 4, blocks)
    widths: list[int] = []
    first = next(layer for layer in model if type(layer).__name__ == "Block")
    first.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    logits = model(images((2, *shape)).float())
    assert logits.shape == (2, 7)
    assert widths == [side]
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_published_network_has_its_number_of_parameters():
    """He et al., arXiv:1512.03385, as torchvision builds it."""
    with torch.device("meta"):
        resnet18 = resnet((3, 224, 224), 1000, 64, 2)
    assert sum(p.numel() for p in resnet18.parameters()) == 11_689_512


def test_layers_can_be_sliced_and_weights_keep_the_names_that_checkpoints_have():
    network = resnet((3, 32, 32), 7, 4, 1)
    assert network[:-1](images((2, 3, 32, 32)).float()).shape == (2, 32)
    freeze(network[:3])
    assert [p.requires_grad for p in network.parameters()][:4] == [False, False, False, True]
    names = [name for name, _ in resnet((1, 8, 8), 7, 4, 1).named_parameters()]
    layers = ["body.0", "body.1", "body.1", "body.3", "body.4", "body.4"]
    inner = [f"3.{layer}" for layer in layers]
    outer = [f"4.{layer}" for layer in (*layers, "shortcut.1", "shortcut.2", "shortcut.2")]
    assert [name.rpartition(".")[0] for name in names] == ["0", "1", "1", *inner, *outer, "7", "7"]


def test_a_network_of_timm_takes_the_place_of_the_one_here(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"^model\.timm is resnet50: .*timm.*; pip install timm; "):
        make_workload(store, timm="resnet50").model()
    made = {}

    def create_model(name: str, **options: int) -> torch.nn.Module:
        if name != "resnet50":
            raise RuntimeError(f"Unknown model ({name})")
        made.update(options)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(options["num_classes"]))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    assert make_workload(store, timm="resnet50").model()(images((2, 3, 8, 8))).shape == (2, 4)
    assert made == {"in_chans": 3, "num_classes": 4, "pretrained": False}
    make_workload(store, timm="resnet50", pretrained=True).model()
    assert made["pretrained"]
    with pytest.raises(UserError, match=r"^model\.timm is resnet5: Unknown model \(resnet5\); .* timm.list_models"):
        make_workload(store, timm="resnet5").model()


def test_normalize_is_mean_and_std_of_a_channel_or_the_range_of_the_dtype():
    layer = Normalize({"mean": [10.0, 20.0], "std": [2.0, 4.0]}, 2, UINT8)
    x = images((3, 2, 4, 4))
    expected = (x.float() - torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)) / torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(Normalize({}, 2, UINT8)(x), x / 127.5 - 1)
    for dtype in ("float16", "float32"):
        x = torch.randn(3, 2, 4, 4).to(getattr(torch, dtype))
        assert torch.equal(Normalize({}, 2, np.dtype(dtype))(x), x.float())
        scaled = Normalize({"mean": 0.5, "std": [0.25, 2]}, 2, np.dtype(dtype))
        torch.testing.assert_close(scaled(x), (x.float() - 0.5) / torch.tensor([0.25, 2]).view(1, 2, 1, 1))


# ---------------------------------------------------------------------------------------------- augmentation

EACH = {"flip": True, "crop_padding": 2, "min_crop_scale": 0.3, "cutout_size": 3, "mixup_alpha": 0.4}


@pytest.mark.parametrize("name", EACH)
def test_an_augmentation_is_drawn_anew_each_time_repeats_with_the_seed_and_can_be_trained_on(store, name):
    workload = make_workload(store, **{name: EACH[name]})
    batch = labelled()
    generator = rng(1)
    first = workload.transform(batch, generator)
    assert not torch.equal(first["images"], workload.transform(batch, generator)["images"])
    assert torch.equal(first["images"], workload.transform(batch, rng(1))["images"])
    loss = workload.loss(workload.model(), first)
    loss.backward()
    assert torch.isfinite(loss)
    unchanged = make_workload(store).transform(batch, rng())
    assert unchanged["images"].data_ptr() == batch["images"].data_ptr()  # without it, they are not even copied


def test_what_is_cut_out_is_0_for_the_network():
    pixels = np.full((4, 3, 8, 8), 200, np.uint8)
    workload = make_workload(rows_of(pixels, np.arange(4), mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 5.0]), cutout_size=3)
    cut = workload.transform(Rows({"images": torch.from_numpy(pixels), "labels": torch.arange(4)}), rng())["images"]
    assert (cut != 200).any()
    assert not workload.normalize(cut)[cut != 200].any()


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8)])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_every_type_of_image_is_augmented_in_its_own_and_fits_the_protocol(dtype, shape):
    pixels = (np.random.default_rng(0).random((12, *shape)) * (255 if dtype == "uint8" else 1)).astype(dtype)
    batch = Rows({"images": torch.from_numpy(pixels), "labels": torch.arange(12) % 4})
    for options in ({}, EACH):
        workload = make_workload(rows_of(pixels, np.arange(12) % 4), **options)
        assert str(workload.transform(batch, rng())["images"].dtype) == f"torch.{dtype}"
        check_workload(workload, batch, batch)


# ---------------------------------------------------------------------------------------------- loss and scores


def test_smoothed_and_mixed_labels_against_the_formula(store):
    logits = torch.randn(6, 4, generator=rng())
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    workload = make_workload(store, label_smoothing=0.2)
    target = 0.8 * torch.eye(4)[labels] + 0.2 / 4
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    for given in (labels, torch.eye(4)[labels]):
        batch = Rows({"images": logits, "labels": given})
        torch.testing.assert_close(workload.loss(lambda _: logits, batch), expected)


@pytest.mark.parametrize("n_classes", [4, 10])  # five answers of few classes are no metric
def test_scores_of_classes_against_the_formula(n_classes):
    workload = make_workload(rows_of(numbered(40, (3, 8, 8)), np.arange(40) % n_classes))
    logits = torch.randn(50, n_classes, generator=rng())
    labels = torch.arange(50) % n_classes
    ranks = (-logits).argsort(1).argsort(1)[torch.arange(50), labels]
    loss = -logits.log_softmax(1)[torch.arange(50), labels].mean()
    sums = workload.score(lambda _: logits, Rows({"images": images((50, 3, 8, 8)), "labels": labels}))
    expected = {"top1_pct": 2 * float((ranks < 1).sum()), "loss": float(loss)}
    if n_classes == 10:
        expected["top5_pct"] = 2 * float((ranks < 5).sum())
    assert workload.metrics({**sums, "n": torch.tensor(50.0)}) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_loss_and_scores_of_attributes_against_the_formula(dtype):
    attributes = np.random.default_rng(0).integers(0, 2, (40, 5), dtype=dtype)
    store = rows_of(numbered(40, (3, 8, 8)), attributes)
    workload = make_workload(store, label_smoothing=0.1)
    assert workload.n_outputs == 5
    assert workload.best == ("accuracy_pct", "higher")
    logits = torch.randn(40, 5, generator=rng())
    truth = torch.from_numpy(attributes)
    batch = Rows({"images": images((40, 3, 8, 8)), "labels": truth})
    p = logits.sigmoid()
    loss = -(truth * p.log() + (1 - truth.float()) * (1 - p).log()).mean()
    accuracy_pct = 100 * ((p > 0.5) == (truth == 1)).float().mean()
    metrics = workload.metrics({**workload.score(lambda _: logits, batch), "n": torch.tensor(40.0)})
    assert metrics == pytest.approx({"accuracy_pct": float(accuracy_pct), "loss": float(loss)})
    target = truth * 0.9 + 0.05
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), expected)
    mixed = make_workload(store, mixup_alpha=0.2)
    assert mixed.transform(batch, rng())["labels"].shape == (40, 5)
    check_workload(mixed, batch, batch)


# ---------------------------------------------------------------------------------------------- rows that fit or not


@pytest.mark.parametrize(
    ("attributes", "n_outputs"), [({}, 4), ({"class_names": list("abcdefg")}, 7), ({"n_classes": 7}, 7)]
)
def test_classes_come_from_their_names_their_number_or_the_labels(attributes, n_outputs):
    workload = make_workload(rows_of(numbered(40, (3, 8, 8)), np.arange(40) % 4, **attributes))
    assert workload.n_outputs == n_outputs
    assert workload.class_names == attributes.get("class_names", [])


def test_a_file_may_say_that_its_channels_come_first():
    assert make_workload(rows_of(numbered(5, (2, 8, 4)), np.arange(5), layout="nchw")).shape_CHW == (2, 8, 4)


def test_labels_of_validation_may_be_integers_of_another_type(store):
    val = rows_of(numbered(5, (3, 8, 8)), np.arange(5, dtype="u1") % 4)
    assert Workload(Workload.Options(), store, val).n_outputs == 4


@pytest.mark.parametrize("labels", [np.arange(12) % 4, np.ones((12, 3), int)])
def test_fields_attributes_and_the_card_are_enough_to_build_the_model_again(labels):
    store = rows_of(numbered(12, (3, 8, 8)), labels)
    workload = make_workload(store)
    attributes = store.attributes | workload.card()
    described = SimpleNamespace(name="model.json", fields=store.fields, attributes=attributes, column=lambda name: None)
    again = make_workload(described).model()
    again.load_state_dict(workload.model().state_dict())


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with config.yaml and easy images, whose class is their brightness, in three types."""
    rng = np.random.default_rng(0)
    labels = np.arange(480) % 4
    pixels = rng.integers(0, 60, (480, 1, 8, 8)) + 60 * labels[:, None, None, None]
    for name, dtype in (("rows", np.uint8), ("halves", np.float16), ("floats", np.float32)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("images", data=pixels.astype(dtype), chunks=(10, 1, 8, 8))
            file["labels"] = labels
    config = {
        "workload": "images",
        "run": {"name": "a"},
        "data": {"train": "rows.h5", "val": "rows.h5", "fields": FIELDS, "batch_size": 32},
        "model": {"width": 8, "flip": True},
        "train": {"epochs": 3},
        "dist": {"device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_easy_images_are_learned(image_folder):
    train()
    assert metrics_of(image_folder / "runs/a")[-1]["val/top1_pct"] >= 90


def test_equal_numbers_of_another_type_train_the_same_weights(image_folder):
    for name in ("halves", "floats"):
        train(f"run.name={name}", f"data.train={name}.h5", f"data.val={name}.h5", "train.epochs=1")
    assert same_weights(image_folder / "runs/halves", image_folder / "runs/floats")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "setting",
    ["train.precision=bf16", "train.precision=fp16", "train.compile=true", "data.tier=disk", "data.tier=host"],
)
def test_easy_images_are_learned_on_a_gpu(image_folder, setting):
    done = run_train("dist.device=cuda", "train.epochs=6", setting, cwd=image_folder)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert metrics_of(image_folder / "runs/a")[-1]["val/top1_pct"] >= 90


OWN_WORKLOAD = """
import torch
from torch import nn

from workloads import images


class Workload(images.Workload):
    def model(self):
        backbone = images.resnet(self.shape_CHW, 16, width=4, blocks=1)
        backbone.load_state_dict(torch.load("pretrained.pt", weights_only=True))
        backbone[0].requires_grad_(False)
        return nn.Sequential(self.normalize, backbone, nn.Linear(16, self.n_outputs))
"""


@pytest.mark.slow
def test_an_own_network_is_a_subclass_of_a_few_lines(image_folder):
    """Pretrained weights from a file and frozen layers, with the gradients of two ranks."""
    root = copy_project(image_folder)
    (root / "workloads/own.py").write_text(OWN_WORKLOAD)
    torch.manual_seed(1)
    pretrained = resnet((1, 8, 8), 16, 4, 1).state_dict()
    torch.save(pretrained, image_folder / "pretrained.pt")
    settings = ("workload=own", "train.epochs=1", "optim.lr=0.01", "optim.weight_decay=0")
    done = run_train(*settings, ranks=2, cwd=image_folder, root=root)
    assert done.returncode == 0, done.stderr
    trained = weights_of(image_folder / "runs/a")
    assert torch.equal(trained["1.0.weight"], pretrained["0.weight"])
    learned = [name for name, _ in resnet((1, 8, 8), 16, 4, 1).named_parameters() if name != "0.weight"]
    assert any(not torch.equal(trained[f"1.{name}"], pretrained[name]) for name in learned)
