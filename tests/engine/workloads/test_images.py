"""The workloads `images`, one class of many, and `attributes`, any number of labels of an image."""

import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
import train as script
from contract import check_workload

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from support.ranks import needs_gpu, run_train
from support.rows import numbered
from support.runs import at_call, metrics_of, same_weights, signalled, train, weights_of
from workloads import attributes
from workloads.images import Normalize, Workload, resnet

EACH = {"flip": True, "crop_padding": 2, "min_crop_scale": 0.3, "cutout_size": 3, "mixup_alpha": 0.4}
OFF = {"flip": False, "crop_padding": 0, "min_crop_scale": 1, "cutout_size": 0, "mixup_alpha": 0, "label_smoothing": 0}
PIXELS = numbered(40, (3, 8, 8))
CLASSES = np.arange(40) % 4
ATTRIBUTES = np.random.default_rng(0).integers(0, 2, (40, 5))


def image_rows(pixels: np.ndarray = PIXELS, labels: np.ndarray = CLASSES, **attributes: Any) -> ArrayDataset:
    return ArrayDataset("made up", {"images": pixels, "labels": labels}, attributes)


def make_workload(source: ArrayDataset | None = None, **options: Any) -> Workload:
    """A small network without augmentation, unless the options say otherwise. Labels of two axes are attributes."""
    source = source or image_rows()
    kind = attributes.Workload if source.fields["labels"].shape else Workload
    return kind(kind.Options(**({"width": 4} | OFF | options)), source, source)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng())


# ---------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("shape", "side"), [((1, 8, 8), 8), ((3, 64, 64), 64), ((3, 218, 178), 45), ((1, 5, 90), 90), ((4, 1, 1), 1)]
)
def test_resnet_takes_any_image(shape, side):
    """Small images keep their resolution in the first stage."""
    model = resnet(shape, 7, 4, blocks=2)
    first = next(number for number, layer in enumerate(model) if type(layer).__name__ == "Block")
    x = images(2, *shape).float()
    assert model[: first + 1](x).shape[-1] == side
    assert model[:-1](x).shape == (2, model[-1].in_features)  # features
    logits = model(x)
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_resnet_has_the_published_parameters():
    """He et al., arXiv:1512.03385, as torchvision builds it."""
    with torch.device("meta"):
        resnet18 = resnet((3, 224, 224), 1000, 64, 2)
    assert sum(p.numel() for p in resnet18.parameters()) == 11_689_512
    inner = [f"3.body.{layer}" for layer in (0, 1, 1, 3, 4, 4)]
    outer = [f"4.body.{layer}" for layer in (0, 1, 1, 3, 4, 4)] + [f"4.shortcut.{layer}" for layer in (1, 2, 2)]
    names = [name.rpartition(".")[0] for name, _ in resnet((1, 8, 8), 7, 4, 1).named_parameters()]
    assert names == ["0", "1", "1", *inner, *outer, "7", "7"]


def test_images_network_of_timm(monkeypatch):
    def create_model(name: str, **options: int) -> torch.nn.Module:
        if name != "resnet50":
            raise RuntimeError(f"Unknown model ({name})")
        made.update(options)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(options["num_classes"]))

    made = {}
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"^model\.timm is resnet50: .*timm.*; pip install .*\[timm\]"):
        make_workload(timm="resnet50").model()
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    model = make_workload(timm="resnet50", pretrained=True).model()
    assert model(images(2, 3, 8, 8)).shape == (2, 4)
    assert made == {"in_chans": 3, "num_classes": 4, "pretrained": True}
    with pytest.raises(UserError, match=r"^model\.timm is resnet5: Unknown model \(resnet5\); .* timm.list_models"):
        make_workload(timm="resnet5").model()
    unloadable = Mock(side_effect=RuntimeError("operator torchvision::nms does not exist"))
    monkeypatch.setattr(sys.modules["timm"], "create_model", unloadable)
    with pytest.raises(UserError, match=r"does not exist; torchvision .*constraints\.txt"):
        make_workload(timm="resnet50").model()


@pytest.mark.parametrize(
    ("dtype", "attributes", "mean", "std"),
    [
        ("uint8", {}, [127.5, 127.5], [127.5, 127.5]),
        ("float16", {}, [0.0, 0.0], [1.0, 1.0]),
        ("float32", {"mean": 0.5, "std": [0.25, 2]}, [0.5, 0.5], [0.25, 2.0]),
    ],
)
def test_images_normalize_by_channel_or_dtype(dtype, attributes, mean, std):
    x = images(3, 2, 4, 4).to(getattr(torch, dtype))
    expected = (x.float() - torch.tensor(mean).view(1, 2, 1, 1)) / torch.tensor(std).view(1, 2, 1, 1)
    torch.testing.assert_close(Normalize(attributes, 2, np.dtype(dtype))(x), expected)


@pytest.mark.parametrize("name", EACH)
def test_images_augmentation_is_random_and_repeatable(name):
    workload = make_workload(**{name: EACH[name]})
    batch = Rows({"images": images(8, 3, 8, 8), "labels": torch.arange(8) % 4})
    generator = rng(1)
    first = workload.transform(batch, generator)
    assert not torch.equal(first["images"], workload.transform(batch, generator)["images"])
    assert torch.equal(first["images"], workload.transform(batch, rng(1))["images"])
    unchanged = make_workload().transform(batch, rng())
    assert unchanged["images"].data_ptr() == batch["images"].data_ptr()  # without it, they are not even copied


def test_images_cutout_is_0_for_the_network():
    pixels = np.full((4, 3, 8, 8), 200, np.uint8)
    workload = make_workload(
        image_rows(pixels, np.arange(4), mean=[10.0, 20.0, 30.0], std=[2.0, 4.0, 5.0]), cutout_size=3
    )
    cut = workload.transform(Rows({"images": torch.from_numpy(pixels), "labels": torch.arange(4)}), rng())["images"]
    assert (cut != 200).any()
    assert not workload.normalize()(cut)[cut != 200].any()


@pytest.mark.parametrize("labels", [CLASSES[:12], ATTRIBUTES[:12]], ids=["classes", "attributes"])
@pytest.mark.parametrize("options", [{}, EACH], ids=["plain", "augmented"])
@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8)])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_images_of_every_type_fit_the_protocol(dtype, shape, options, labels):
    pixels = (np.random.default_rng(0).random((12, *shape)) * (255 if dtype == "uint8" else 1)).astype(dtype)
    workload = make_workload(image_rows(pixels, labels), **options)
    batch = Rows({"images": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)})
    assert str(workload.transform(batch, rng())["images"].dtype) == f"torch.{dtype}"
    check_workload(workload, batch, batch)


# ---------------------------------------------------------------------------------------------- loss and scores


@pytest.mark.parametrize("n_classes", [4, 10])  # five answers of few classes are no metric
def test_images_loss_and_scores_of_classes(n_classes):
    labels = torch.arange(50) % n_classes
    logits = torch.randn(50, n_classes, generator=rng())
    workload = make_workload(image_rows(labels=np.arange(40) % n_classes), label_smoothing=0.2)
    one_hot = torch.eye(n_classes)[labels]
    target = 0.8 * one_hot + 0.2 / n_classes
    for given in (labels, one_hot):  # as mixup makes them
        loss = workload.loss(lambda _: logits, Rows({"images": logits, "labels": given}))
        torch.testing.assert_close(loss, -(target * logits.log_softmax(1)).sum(1).mean())
    ranks = (-logits).argsort(1).argsort(1)[one_hot.bool()]
    expected = {"top1_pct": 2 * float((ranks < 1).sum()), "loss": -float(logits.log_softmax(1)[one_hot.bool()].mean())}
    if n_classes == 10:
        expected["top5_pct"] = 2 * float((ranks < 5).sum())
    sums = workload.score(lambda _: logits, Rows({"images": logits, "labels": labels}))
    assert workload.metrics({**sums, "n": torch.tensor(50.0)}) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_attributes_loss_and_scores(dtype):
    labels = ATTRIBUTES.astype(dtype)
    workload = make_workload(image_rows(labels=labels), label_smoothing=0.1)
    logits = torch.randn(40, 5, generator=rng())
    truth = torch.from_numpy(labels).float()
    batch = Rows({"images": logits, "labels": torch.from_numpy(labels)})
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    expected = cross_entropy(logits, truth * 0.9 + 0.05)
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), expected)
    accuracy_pct = 100 * ((logits > 0) == (truth == 1)).float().mean()
    metrics = workload.metrics({**workload.score(lambda _: logits, batch), "n": torch.tensor(40.0)})
    assert metrics == pytest.approx({"accuracy_pct": float(accuracy_pct), "loss": float(cross_entropy(logits, truth))})


@pytest.mark.parametrize(
    ("attributes", "n_outputs"), [({}, 4), ({"class_names": list("abcdefg")}, 7), ({"n_classes": 7}, 7)]
)
def test_images_number_of_classes(attributes, n_outputs):
    assert make_workload(image_rows(**attributes)).n_outputs == n_outputs


@pytest.mark.parametrize(
    ("described", "names"),
    [({}, ["attribute_0", "attribute_1"]), ({"class_names": ["hat", "smile"]}, ["hat", "smile"])],
)
def test_attributes_are_predicted_by_their_names(described, names):
    logits = torch.randn(3, 2, generator=rng())
    workload = make_workload(image_rows(labels=ATTRIBUTES[:, :2], **described))
    predicted = workload.predict(lambda _: logits, Rows({"images": logits}))
    assert [*predicted] == names
    torch.testing.assert_close(torch.stack([*predicted.values()], 1), logits.sigmoid())


def test_images_channels_first_and_label_types():
    pixels = numbered(5, (2, 8, 4))
    train, val = (image_rows(pixels, np.arange(5, dtype=dtype), layout="nchw") for dtype in ("i8", "u1"))
    assert Workload(Workload.Options(), train, val).shape_CHW == (2, 8, 4)


@pytest.mark.parametrize("labels", [CLASSES, ATTRIBUTES], ids=["classes", "attributes"])
def test_images_model_from_its_card(labels):
    store = image_rows(labels=labels)
    workload = make_workload(store)
    attributes = store.attributes | workload.card()
    described = SimpleNamespace(
        name="model.json", fields=store.fields, attributes=attributes, stored_column=lambda name: None
    )
    make_workload(described).model().load_state_dict(workload.model().state_dict())


# ---------------------------------------------------------------------------------------------- whole runs

CONFIG = """
workload: images
run: {name: a}
data: {train: rows.h5, val: rows.h5, fields: {images: images, labels: labels}, batch_size: 32}
model: {width: 8, flip: true}
train: {epochs: 3}
dist: {device: cpu}
"""


@pytest.fixture
def image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with config.yaml and easy images, whose class is their brightness."""
    labels = np.arange(480) % 4
    pixels = np.random.default_rng(0).integers(0, 60, (480, 1, 8, 8)) + 60 * labels[:, None, None, None]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("images", data=pixels.astype(np.uint8), chunks=(10, 1, 8, 8))
        file["labels"] = labels
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_images_easy_ones_are_learned(image_folder):
    train()
    assert metrics_of(image_folder / "runs/a")[-1]["val/top1_pct"] >= 90


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of its own parts while it traces
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_images_compiled_training_resumes_and_changes_little(image_folder, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(image_folder / "inductor"))
    words = ("train.epochs=1", "model.width=4", "model.blocks=1", "optim.name=sgd", "train.precision=fp32")
    compiled = (*words, "train.compile=true")
    train("run.name=eager", *words)
    train("run.name=whole", *compiled)
    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", at_call(9, script.train_step, signalled(signal.SIGTERM)))
        assert train("run.name=stopped", *compiled) == 128 + signal.SIGTERM
    assert train("run.resume=runs/stopped", *compiled) == 0
    runs = image_folder / "runs"
    assert same_weights(runs / "whole", runs / "stopped")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    torch.testing.assert_close(weights_of(runs / "whole"), weights_of(runs / "eager"), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(
    "setting",
    [
        "train.precision=bf16",
        "train.precision=fp16",
        pytest.param("train.compile=true", marks=pytest.mark.real_gpu),
        "data.tier=disk",
        "data.tier=host",
    ],
)
def test_images_easy_ones_are_learned_on_a_gpu(image_folder, setting):
    done = run_train("dist.device=cuda", "train.epochs=6", setting, cwd=image_folder)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert metrics_of(image_folder / "runs/a")[-1]["val/top1_pct"] >= 90
