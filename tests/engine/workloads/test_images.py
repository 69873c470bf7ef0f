"""The workload `images`: one class of many, any number of attributes, or numbers."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import train as script
import yaml
from contract import check_workload
from harness import (
    ALONE,
    copy_project,
    metrics_of,
    needs_gpu,
    numbered,
    run_train,
    same_weights,
    weights_of,
)
from PIL import Image

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import HDF5Dataset, open_store
from fastgpu.training.parallel import freeze
from workloads.images import Normalize, Workload, resnet

OFF = {
    "flip": False,
    "crop_padding": 0,
    "min_crop_scale": 1.0,
    "cutout_size": 0,
    "mixup_alpha": 0.0,
    "label_smoothing": 0.0,
}
"""Settings without any augmentation."""
UINT8 = np.dtype("uint8")
FIELDS = {"images": "images", "labels": "labels"}


def make_workload(train: HDF5Dataset, val: HDF5Dataset | None = None, **options: Any) -> Workload:
    """A small network without augmentation, unless the options say otherwise."""
    return Workload(Workload.Options(**({"width": 4, "blocks": 1} | OFF | options)), train, val or train)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng())


def labelled(n_rows: int = 8) -> Rows:
    return Rows({"images": images((n_rows, 3, 8, 8)), "labels": torch.arange(n_rows) % 4})


@pytest.fixture
def store(write) -> HDF5Dataset:
    return open_store("data.train", write(40, (3, 8, 8)), FIELDS)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 218, 178), (1, 5, 90), (4, 1, 1), (3, 224, 224)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_any_image_gives_logits_and_every_weight_a_gradient(shape, blocks):
    model = resnet(shape, 7, 4, blocks)
    logits = model(images((2, *shape)).float())
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_layers_of_the_network_can_be_sliced():
    network = resnet((3, 32, 32), 7, 4, 1)
    assert network[:-1](images((2, 3, 32, 32)).float()).shape == (2, 32)
    freeze(network[:3])
    assert [p.requires_grad for p in network.parameters()][:4] == [False, False, False, True]


def test_a_published_network_has_its_number_of_parameters():
    """He et al., arXiv:1512.03385, as torchvision builds it."""
    with torch.device("meta"):
        resnet18 = resnet((3, 224, 224), 1000, 64, 2)
    assert sum(p.numel() for p in resnet18.parameters()) == 11_689_512


def test_weights_keep_the_names_that_checkpoints_have():
    names = [name for name, _ in resnet((1, 8, 8), 7, 4, 1).named_parameters()]
    norms = [f"{module}.{kind}" for module in ("body.1", "body.4", "shortcut.2") for kind in ("weight", "bias")]
    inner = [f"3.{name}" for name in ("body.0.weight", *norms[:2], "body.3.weight", *norms[2:4])]
    outer = [name.replace("3.", "4.", 1) for name in inner] + [
        f"4.{name}" for name in ("shortcut.1.weight", *norms[4:])
    ]
    assert names == ["0.weight", "1.weight", "1.bias", *inner, *outer, "7.weight", "7.bias"]


def test_a_network_of_timm_takes_the_place_of_the_one_here(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    workload = make_workload(store, timm="resnet50")
    with pytest.raises(UserError, match=r"^model\.timm is resnet50, but .*timm.*; pip install timm$"):
        workload.model()
    made = {}

    def create_model(name: str, **options: int) -> torch.nn.Module:
        if name != "resnet50":
            raise RuntimeError(f"Unknown model ({name})")
        made.update(options)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(options["num_classes"]))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    assert workload.model()(images((2, 3, 8, 8))).shape == (2, 4)
    assert made == {"in_chans": 3, "num_classes": 4, "pretrained": False}
    make_workload(store, timm="resnet50", pretrained=True).model()
    assert made["pretrained"]
    with pytest.raises(UserError, match=r"model.pretrained is true, but only networks of timm have such weights"):
        make_workload(store, pretrained=True)
    with pytest.raises(UserError, match=r"^model\.timm is resnet5: Unknown model \(resnet5\); timm.list_models"):
        make_workload(store, timm="resnet5").model()


@pytest.mark.parametrize(("shape", "side"), [((1, 8, 8), 8), ((3, 64, 64), 64), ((3, 218, 178), 45)])
def test_small_images_keep_their_resolution_in_the_first_stage(shape, side):
    model = resnet(shape, 7, 4, 1)
    widths = []
    first = next(layer for layer in model if type(layer).__name__ == "Block")
    first.register_forward_hook(lambda _, __, out: widths.append(out.shape[-1]))
    model(torch.zeros(1, *shape))
    assert widths == [side]


def test_normalize_is_mean_and_std_of_a_channel():
    layer = Normalize({"mean": [10.0, 20.0], "std": [2.0, 4.0]}, 2, UINT8)
    x = images((3, 2, 4, 4))
    expected = (x.float() - torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)) / torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(Normalize({}, 2, UINT8)(x), x / 127.5 - 1)


@pytest.mark.parametrize("options", [{}, {"flip": True, "mixup_alpha": 0.2}], ids=["plain", "augmented"])
def test_the_workload_fits_the_protocol(store, options):
    check_workload(make_workload(store, **options), labelled(12), labelled(12))


def test_augmentation_is_drawn_anew_each_time_and_repeats_with_the_seed(store):
    workload = make_workload(store, flip=True, crop_padding=2)
    batch = labelled()
    generator = rng(1)
    first = workload.transform(batch, generator)
    second = workload.transform(batch, generator)
    assert not torch.equal(first["images"], second["images"])
    assert torch.equal(first["images"], workload.transform(batch, rng(1))["images"])
    assert first["images"].dtype == torch.uint8
    assert torch.equal(first["labels"], batch["labels"])


def test_without_augmentation_the_images_are_not_even_copied(store):
    batch = labelled()
    unchanged = make_workload(store).transform(batch, rng())
    assert unchanged["images"].data_ptr() == batch["images"].data_ptr()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flip", True),
        ("crop_padding", 1),
        ("min_crop_scale", 0.3),
        ("cutout_size", 3),
        ("mixup_alpha", 0.4),
    ],
)
def test_each_augmentation_changes_the_rows_each_time_and_can_be_trained_on(store, key, value):
    workload = make_workload(store, **{key: value})
    batch = labelled()
    generator = rng()
    first = workload.transform(batch, generator)
    second = workload.transform(batch, generator)
    assert not torch.equal(first["images"], second["images"])
    loss = workload.loss(workload.model(), first)
    loss.backward()
    assert torch.isfinite(loss)


def test_smoothed_and_mixed_labels_against_the_formula(store):
    logits = torch.randn(6, 4, generator=rng())
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    workload = make_workload(store, label_smoothing=0.2)
    target = 0.8 * torch.eye(4)[labels] + 0.2 / 4
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    for given in (labels, torch.eye(4)[labels]):
        batch = Rows({"images": logits, "labels": given})
        torch.testing.assert_close(workload.loss(lambda _: logits, batch), expected)


def test_scores_are_sums_against_the_formula(store):
    workload = make_workload(store)
    workload.n_outputs = 10
    logits = torch.randn(50, 10, generator=rng())
    labels = torch.arange(50) % 10

    def score(start: int, stop: int) -> dict[str, torch.Tensor]:
        batch = Rows({"images": images((stop - start, 3, 8, 8)), "labels": labels[start:stop]})
        sums = workload.score(lambda _: logits[start:stop], batch)
        return {name: value.double() for name, value in sums.items()}

    ranks = (-logits).argsort(1).argsort(1)[torch.arange(50), labels]
    expected = {
        "top1": (ranks < 1).sum(),
        "top5": (ranks < 5).sum(),
        "loss": -logits.log_softmax(1)[torch.arange(50), labels].sum(),
    }
    whole = score(0, 50)
    parts = [score(0, 17), score(17, 49), score(49, 50)]
    metrics = workload.metrics({**whole, "n": torch.tensor(50.0)})
    assert list(metrics) == ["top1_pct", "top5_pct", "loss"]
    assert metrics["top5_pct"] == pytest.approx(2 * float(expected["top5"]))
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value.double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(sum(part[name] for part in parts), value.double(), rtol=1e-6, atol=0)


def test_five_answers_of_few_classes_are_no_metric(store):
    workload = make_workload(store)
    assert workload.n_outputs == 4
    batch = Rows({"images": images((6, 3, 8, 8)), "labels": torch.zeros(6, dtype=torch.int64)})
    sums = workload.score(workload.model().eval(), batch)
    assert list(workload.metrics({**sums, "n": torch.tensor(6.0)})) == ["top1_pct", "loss"]


def test_classes_come_from_the_names_if_there_are_any(write):
    path = write(40, (3, 8, 8))
    with h5py.File(path, "r+") as file:
        file.attrs["class_names"] = list("abcdefg")
    workload = make_workload(open_store("data.train", path, FIELDS))
    assert workload.n_outputs == 7
    assert workload.card()["class_names"] == list("abcdefg")


def open_rows(folder, pixels, labels, name="x.h5") -> HDF5Dataset:
    with h5py.File(folder / name, "w") as file:
        file["images"] = pixels
        file["labels"] = labels
    return open_store("data.train", str(folder / name), FIELDS)


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (numbered(5, (1, 8, 8)).astype("f8"), np.arange(5), r"float64 \(N, 1, 8, 8\); allowed are uint8.* as bytes"),
        (numbered(5, (1, 8, 8)).astype("u2"), np.arange(5), r"uint16 \(N, 1, 8, 8\); allowed are uint8.* as bytes"),
        (numbered(5, (64,)), np.arange(5), r"images are uint8 \(N, 64\); allowed are .*\(N, C, H, W\) or \(N, H, W\)"),
        (numbered(5, (8, 8, 3)), np.arange(5), r"\(N, 8, 8, 3\), which looks like \(N, H, W, C\).* --layout nhwc"),
        (numbered(5, (8, 8, 1)), np.arange(5), r"\(N, 8, 8, 1\), which looks like \(N, H, W, C\).* --layout nhwc"),
        (numbered(5, (1, 8, 8)), np.zeros((5, 2, 2), int), r"labels are int64 \(N, 2, 2\); allowed are integers"),
        (numbered(5, (1, 8, 8)), np.arange(5)[:, None], r"labels are int64 \(N, 1\); did you mean \(N,\)\?"),
        (numbered(5, (1, 8, 8)), np.arange(5) - 1, "labels are \\[-1\\] in 1 of 5 rows; allowed are 0 to 3"),
        (
            numbered(29, (1, 8, 8)),
            -(10**15) * np.arange(29),
            r"labels are .-28[^\n]* -1000000000000000. in 28 of 29 rows",
        ),
        (
            numbered(5, (1, 8, 8)),
            np.eye(5),
            r"float64 \(N, 5\); allowed are integers, .*argmax.* docs/examples/image_numbers.py",
        ),
        (numbered(5, (1, 8, 8)), np.arange(5) + (1 << 40), "labels run up to 1099511627780; allowed are classes"),
    ],
)
def test_rows_that_are_no_labelled_images(tmp_path, pixels, labels, message):
    store = open_rows(tmp_path, pixels, labels)
    with pytest.raises(UserError, match=message):
        make_workload(store)


def test_attributes_that_may_be_classes_are_pointed_out(tmp_path):
    store = open_rows(tmp_path, numbered(5, (1, 8, 8)), np.eye(5, dtype=int))
    hint = "(a single 1 in each row: for classes, write their numbers, labels.argmax(1))"
    assert make_workload(store).summary.endswith(f"5 attributes {hint}")


def test_a_file_may_say_that_its_channels_come_first(tmp_path):
    path = tmp_path / "x.h5"
    open_rows(tmp_path, numbered(5, (2, 8, 4)), np.arange(5))
    with h5py.File(path, "r+") as file:
        file.attrs["layout"] = "nchw"
    assert make_workload(open_store("data.train", str(path), FIELDS)).shape_CHW == (2, 8, 4)


def test_validation_must_be_of_the_same_kind(tmp_path):
    train = open_rows(tmp_path, numbered(5, (1, 8, 8)), np.arange(5), "train.h5")
    more_classes = open_rows(tmp_path, numbered(10, (1, 8, 8)), np.arange(10), "more.h5")
    with pytest.raises(UserError, match=r"labels are \[5, 6, 7, 8, 9\] in 5 of 10 rows; allowed are 0 to 4"):
        make_workload(train, more_classes)
    narrower = open_rows(tmp_path, numbered(5, (1, 8, 4)), np.arange(5), "narrower.h5")
    with pytest.raises(UserError, match=r"images are uint8 \(N, 1, 8, 4\), those of .* are uint8 \(N, 1, 8, 8\)"):
        make_workload(train, narrower)
    deeper = open_rows(tmp_path, numbered(5, (1, 8, 8)).astype("f4"), np.arange(5), "deeper.h5")
    with pytest.raises(UserError, match=r"images are float32 .*, those of .* are uint8"):
        make_workload(train, deeper)
    numbers = open_rows(tmp_path, numbered(5, (1, 8, 8)), np.arange(5.0), "numbers.h5")
    with pytest.raises(UserError, match=r"labels are float64 \(N\), those of .* are int64 \(N\)"):
        make_workload(train, numbers)
    make_workload(train, open_rows(tmp_path, numbered(5, (1, 8, 8)), np.arange(5, dtype="u1"), "bytes.h5"))


def test_images_and_labels_are_needed(write):
    store = open_store("data.train", write(), {"pixels": "images"})
    with pytest.raises(UserError, match="data.fields has pixels; this workload needs images and labels"):
        make_workload(store)


def test_classes_come_from_their_number_if_they_have_no_names(write):
    path = write(40, (3, 8, 8))
    with h5py.File(path, "r+") as file:
        file.attrs["n_classes"] = 7
    assert make_workload(open_store("data.train", path, FIELDS)).n_outputs == 7


@pytest.mark.parametrize("labels", [np.arange(12) % 4, np.ones((12, 3), int)])
def test_fields_attributes_and_the_card_are_enough_to_build_the_model_again(tmp_path, labels):
    store = open_rows(tmp_path, numbered(12, (3, 8, 8)), labels)
    workload = make_workload(store)
    attributes = store.attributes | workload.card()
    described = SimpleNamespace(
        name="model.json", fields=store.fields, attributes=attributes, in_memory=lambda name: None
    )
    again = make_workload(described).model()
    again.load_state_dict(workload.model().state_dict())
    assert workload.summary.startswith(make_workload(described).summary)


# ---------------------------------------------------------------------------------------------- dtypes and layouts


def test_normalize_knows_the_range_of_the_dtype():
    assert Normalize({}, 2, UINT8).mean_color(torch.uint8).tolist() == [127, 127]
    for dtype in ("float16", "float32"):
        x = torch.randn(3, 2, 4, 4).to(getattr(torch, dtype))
        assert torch.equal(Normalize({}, 2, np.dtype(dtype))(x), x.float())
        scaled = Normalize({"mean": 0.5, "std": [0.25, 2]}, 2, np.dtype(dtype))
        torch.testing.assert_close(scaled(x), (x.float() - 0.5) / torch.tensor([0.25, 2]).view(1, 2, 1, 1))
        torch.testing.assert_close(scaled.mean_color(x.dtype).float(), torch.tensor([0.5, 0.5]))


def test_attributes_of_other_channels_are_refused():
    with pytest.raises(UserError, match="attribute std has 3 numbers, but images have 1 channels"):
        Normalize({"std": [1.0, 2.0, 3.0]}, 1, UINT8)


def pixels_of(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(0).random(shape)
    return (values * (np.iinfo(dtype).max if dtype.startswith("u") else 1)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_every_augmentation_keeps_the_dtype_and_can_be_trained_on(tmp_path, dtype):
    pixels = pixels_of(dtype, (12, 3, 8, 8))
    store = open_rows(tmp_path, pixels, np.arange(12) % 4)
    options = {"flip": True, "crop_padding": 2, "min_crop_scale": 0.5, "cutout_size": 3, "mixup_alpha": 0.3}
    workload = make_workload(store, **options)
    batch = Rows({"images": torch.from_numpy(pixels), "labels": torch.arange(12) % 4})
    assert str(workload.transform(batch, rng())["images"].dtype) == f"torch.{dtype}"
    check_workload(workload, batch, batch)


@pytest.mark.parametrize("name", ["crop_padding", "cutout_size"])
def test_an_augmentation_that_leaves_nothing_of_an_image_is_refused(tmp_path, name):
    store = open_rows(tmp_path, numbered(12, (3, 16, 8)), np.arange(12) % 4)
    make_workload(store, **{name: 7})
    with pytest.raises(UserError, match=f"model.{name} is 8, but images are 8 pixels high or wide; use fewer"):
        make_workload(store, **{name: 8})


def test_random_parts_of_random_parts_are_told(store, monkeypatch, capsys):
    make_workload(store, min_crop_scale=0.5)
    assert not capsys.readouterr().out
    monkeypatch.setattr(HDF5Dataset, "encoded", object())
    make_workload(store, min_crop_scale=0.5)
    assert "the model sees parts of parts" in capsys.readouterr().out


def test_the_summary_says_what_is_odd_about_the_labels(tmp_path):
    def summary(labels: np.ndarray) -> str:
        return make_workload(open_rows(tmp_path, numbered(len(labels), (3, 8, 8)), labels)).summary

    assert "labels: 8 classes, 5 of them without training rows" in summary(np.array([2, 5, 7, 7]))
    assert summary(np.array([0, 1, 2, 2])).endswith("labels: 3 classes")


# ---------------------------------------------------------------------------------------------- attributes


@pytest.fixture(params=["uint8", "uint16"])
def attributes(request) -> np.ndarray:
    """(40, 5): five attributes of each image."""
    return np.random.default_rng(0).integers(0, 2, (40, 5), dtype=request.param)


def test_loss_and_scores_of_attributes_against_the_formula(tmp_path, attributes):
    store = open_rows(tmp_path, numbered(40, (3, 8, 8)), attributes)
    workload = make_workload(store, label_smoothing=0.1)
    assert workload.n_outputs == 5
    assert workload.best == ("accuracy_pct", "higher")
    logits = torch.randn(40, 5, generator=rng())
    truth = torch.from_numpy(attributes)
    batch = Rows({"images": images((40, 3, 8, 8)), "labels": truth})
    p = logits.sigmoid()
    scores = workload.score(lambda _: logits, batch)
    loss = -(truth * p.log() + (1 - truth.float()) * (1 - p).log()).mean(1).sum()
    torch.testing.assert_close(scores["loss"], loss)
    hits = ((p > 0.5) == (truth == 1)).float().mean(1).sum()
    torch.testing.assert_close(scores["hits"], hits)
    metrics = workload.metrics({**scores, "n": torch.tensor(40.0)})
    assert metrics == pytest.approx({"accuracy_pct": 100 * float(hits) / 40, "loss": float(loss) / 40})
    target = truth * 0.9 + 0.05
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), expected)


def test_attributes_can_be_mixed_and_fit_the_protocol(tmp_path, attributes):
    workload = make_workload(open_rows(tmp_path, numbered(40, (3, 8, 8)), attributes), mixup_alpha=0.2)
    batch = Rows({"images": images((40, 3, 8, 8)), "labels": torch.from_numpy(attributes)})
    assert workload.transform(batch, rng())["labels"].shape == (40, 5)
    check_workload(workload, batch, batch)


def test_attributes_of_validation_must_be_of_the_same_kind(tmp_path, attributes):
    pixels = numbered(40, (3, 8, 8))
    train = open_rows(tmp_path, pixels, attributes)
    with pytest.raises(UserError, match=r"labels are \[2\] in 39 of 40 rows; allowed are 0 to 1.* leave such"):
        make_workload(train, open_rows(tmp_path, pixels, attributes * 2, "twos.h5"))
    with pytest.raises(UserError, match=r"labels are uint\d+ \(N, 4\), those of .* are uint\d+ \(N, 5\)"):
        make_workload(train, open_rows(tmp_path, pixels, attributes[:, :4], "four.h5"))


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def image_folder(tmp_path, monkeypatch):
    """The current folder, with config.yaml and easy images: the class of an image is its brightness."""
    rng = np.random.default_rng(0)
    labels = np.arange(480) % 4
    pixels = rng.integers(0, 60, (480, 1, 8, 8)) + 60 * labels[:, None, None, None]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("images", data=pixels.astype(np.uint8), chunks=(10, 1, 8, 8))
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
    script.train(script.build(load_config([]), ALONE), ALONE)
    last = metrics_of(image_folder / "runs/a")[-1]
    assert last["val/top1_pct"] >= 90


GPU_SETTINGS = {
    "bf16": ["train.precision=bf16"],
    "fp16": ["train.precision=fp16"],
    "compiled": ["train.compile=true"],
    "disk tier": ["data.tier=disk"],
    "host tier": ["data.tier=host"],
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("settings", GPU_SETTINGS.values(), ids=list(GPU_SETTINGS))
def test_easy_images_are_learned_on_a_gpu(image_folder, settings):
    done = run_train("dist.device=cuda", "train.epochs=6", *settings, cwd=image_folder)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
    assert metrics_of(image_folder / "runs/a")[-1]["val/top1_pct"] >= 90


def train_in(folder, name: str, pixels: np.ndarray, labels: np.ndarray, *settings: str) -> None:
    """Train on these rows in a run of that name."""
    file_name = f"{name}.h5"
    with h5py.File(folder / file_name, "w") as file:
        file.create_dataset("images", data=pixels, chunks=(10, *pixels.shape[1:]))
        file["labels"] = labels
    paths = [f"data.train={file_name}", f"data.val={file_name}"]
    script.train(script.build(load_config([f"run.name={name}", *paths, *settings]), ALONE), ALONE)


def test_every_dtype_comes_through_every_tier_unchanged(image_folder, capsys):
    """Images whose values are the same numbers in any dtype give the same weights on all tiers, bit for bit."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 4
    pixels = rng.integers(0, 60, (120, 1, 8, 8)) + 40 * labels[:, None, None, None]
    for dtype in ("uint8", "float16", "float32"):
        short = ("train.epochs=1", "data.echo=2", "model.flip=true")
        for tier in ("device", "host", "disk"):
            train_in(image_folder, f"{dtype}-{tier}", pixels.astype(dtype), labels, *short, f"data.tier={tier}")
            assert same_weights(image_folder / f"runs/{dtype}-{tier}", image_folder / f"runs/{dtype}-device")
        assert f"images: 1 x 8 x 8 (channels x height x width), {dtype}; labels: 4 classes" in capsys.readouterr().out
    assert same_weights(image_folder / "runs/float16-disk", image_folder / "runs/float32-disk")


def test_images_without_a_channel_axis_have_one_channel(image_folder):
    with h5py.File(image_folder / "rows.h5") as file:
        pixels = file["images"][:120]
        labels = file["labels"][:120]
    settings = ("train.epochs=1", "model.crop_padding=1", "model.min_crop_scale=0.5")
    train_in(image_folder, "channel", pixels, labels, *settings)
    train_in(image_folder, "none", pixels[:, 0], labels, *settings)
    assert same_weights(image_folder / "runs/channel", image_folder / "runs/none")


def write_encoded(path, files: list[bytes], labels: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "png"
        file["labels"] = labels


def to_jpeg(image_CHW: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image_CHW.transpose(1, 2, 0))).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_jpegs(path: Path) -> None:
    """The rows of rows.h5 with three channels and 20 x 20 pixels, as JPEG files."""
    with h5py.File("rows.h5") as rows, h5py.File(path, "w") as file:
        files = [to_jpeg(np.kron(image, np.ones((3, 3, 3), np.uint8))[:, :20, :20]) for image in rows["images"][:80]]
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "jpeg"
        file["labels"] = rows["labels"][:80]


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


def test_a_setting_of_another_workload_is_an_error(image_folder):
    message = r"config.yaml:\d+: unknown key model.hidden_dim \(allowed are: .*model.width, .*model.label_smoothing\)"
    text = (image_folder / "config.yaml").read_text()
    (image_folder / "config.yaml").write_text(text.replace("  flip: true", "  flip: true\n  hidden_dim: 200"))
    with pytest.raises(UserError, match=message):
        script.train(script.build(load_config([]), ALONE), ALONE)


@pytest.mark.slow
def test_a_new_setting_takes_two_lines_in_the_workload(image_folder):
    path = copy_project(image_folder) / "workloads/images.py"
    text = path.read_text()
    field = "class Options(Section):\n"
    use = "return F.cross_entropy(logits_BK, target,"
    assert field in text
    assert use in text
    text = text.replace(field, field + "        loss_scale: float = 1.0\n", 1)
    text = text.replace(use, use.replace("return ", "return self.options.loss_scale * "), 1)
    path.write_text(text)
    done = run_train("model.loss_scale=0.0", "train.epochs=1", cwd=image_folder, root=image_folder)
    assert done.returncode == 0, done.stderr
    losses = [point["train/loss"] for point in metrics_of(image_folder / "runs/a") if "train/loss" in point]
    assert losses
    assert not any(losses)
