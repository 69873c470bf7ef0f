import h5py
import numpy as np
import pytest
import torch
from harness import numbered

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import Store, open_store
from workloads.images import Normalize, ResNet, Workload

OFF = {
    "flip": False,
    "crop_pad": 0,
    "crop_share": 1.0,
    "jitter": 0.0,
    "cutout": 0,
    "mixup": 0.0,
    "label_smoothing": 0.0,
}
SETTINGS = {"width": 4, "blocks": 1} | OFF | {"flip": True, "crop_pad": 2}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng())


@pytest.fixture
def store(write) -> Store:
    return open_store("data.train", write(40, (3, 8, 8)), {"images": "images", "labels": "labels"})


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 218, 178), (1, 5, 90), (4, 1, 1), (3, 224, 224)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_any_image_gives_logits_and_every_weight_a_gradient(shape, blocks):
    model = ResNet(shape, 7, 4, blocks)
    logits = model(images((2, *shape)).float())
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(("shape", "side"), [((1, 8, 8), 8), ((3, 64, 64), 64), ((3, 218, 178), 45)])
def test_small_images_keep_their_resolution_in_the_first_stage(shape, side):
    model = ResNet(shape, 7, 4, 1)
    seen = []
    first = next(layer for layer in model if type(layer).__name__ == "Block")
    first.register_forward_hook(lambda _, __, out: seen.append(out.shape[-1]))
    model(torch.zeros(1, *shape))
    assert seen == [side]


def test_normalize_is_mean_and_std_of_a_channel():
    layer = Normalize({"mean": [10.0, 20.0], "std": [2.0, 4.0]}, 2)
    x = images((3, 2, 4, 4))
    expected = (x.float() - torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)) / torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(Normalize({}, 2)(x), x / 127.5 - 1)


def test_augmentation_is_drawn_anew_each_time_and_repeats_with_the_seed(store):
    workload = Workload(store, store, **SETTINGS)
    batch = Rows({"images": images((8, 3, 8, 8)), "labels": torch.arange(8)})
    generator = rng(1)
    first, second = workload.transform(batch, generator), workload.transform(batch, generator)
    assert not torch.equal(first["images"], second["images"])
    assert torch.equal(first["images"], workload.transform(batch, rng(1))["images"])
    assert first["images"].dtype == torch.uint8
    assert torch.equal(first["labels"], batch["labels"])
    off = Workload(store, store, **SETTINGS | OFF).transform(batch, rng())
    assert off["images"].data_ptr() == batch["images"].data_ptr()


@pytest.mark.parametrize(
    ("key", "value"),
    [("flip", True), ("crop_pad", 1), ("crop_share", 0.3), ("jitter", 0.3), ("cutout", 3), ("mixup", 0.4)],
)
def test_each_augmentation_redraws_and_can_be_trained_on(store, key, value):
    workload = Workload(store, store, **SETTINGS | OFF | {key: value})
    assert workload.is_random
    assert not Workload(store, store, **SETTINGS | OFF).is_random
    batch, generator = Rows({"images": images((8, 3, 8, 8)), "labels": torch.arange(8) % 4}), rng()
    first, second = workload.transform(batch, generator), workload.transform(batch, generator)
    assert not torch.equal(first["images"], second["images"])
    loss = workload.loss(workload.model(), first)
    loss.backward()
    assert torch.isfinite(loss)


def test_smoothed_and_mixed_labels_against_the_formula(store):
    logits, labels = torch.randn(6, 4, generator=rng()), torch.tensor([0, 1, 2, 3, 0, 1])
    workload = Workload(store, store, **SETTINGS | OFF | {"label_smoothing": 0.2})
    shares = 0.8 * torch.eye(4)[labels] + 0.2 / 4
    expected = -(shares * logits.log_softmax(1)).sum(1).mean()
    for given in (labels, torch.eye(4)[labels]):
        torch.testing.assert_close(workload.loss(lambda _: logits, Rows({"images": logits, "labels": given})), expected)


def test_scores_are_sums_that_add_up_over_any_split(store):
    workload = Workload(store, store, **SETTINGS)
    workload.classes = 10
    logits, labels = torch.randn(50, 10, generator=rng()), torch.arange(50) % 10

    def scores(a: int, b: int) -> torch.Tensor:
        batch = Rows({"images": images((b - a, 3, 8, 8)), "labels": labels[a:b]})
        return torch.stack([s.double() for s in workload.score(lambda _: logits[a:b], batch)[1]])

    rank = (-logits).argsort(1).argsort(1)[torch.arange(50), labels]
    loss = -logits.log_softmax(1)[torch.arange(50), labels].sum()
    expected = torch.stack([loss, 100 * (rank < 1).sum(), 100 * (rank < 5).sum()]).double()
    torch.testing.assert_close(scores(0, 50), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(scores(0, 17) + scores(17, 49) + scores(49, 50), expected, rtol=1e-6, atol=0)


def test_fewer_than_five_classes(store):
    workload = Workload(store, store, **SETTINGS)
    assert workload.classes == 4
    model = workload.model().eval()
    batch = Rows({"images": images((6, 3, 8, 8)), "labels": torch.zeros(6, dtype=torch.int64)})
    assert workload.score(model, batch)[1][2] == 600


def test_classes_come_from_the_names_if_there_are_any(write):
    path = write(40, (3, 8, 8))
    with h5py.File(path, "r+") as file:
        file.attrs["class_names"] = list("abcdefg")
    store = open_store("data.train", path, {"images": "images", "labels": "labels"})
    assert Workload(store, store, **SETTINGS).classes == 7


def _store(tmp_path, images, labels, name="x.h5") -> Store:
    with h5py.File(tmp_path / name, "w") as file:
        file["images"], file["labels"] = images, labels
    return open_store("data.train", str(tmp_path / name), {"images": "images", "labels": "labels"})


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (
            numbered(5, (1, 8, 8)).astype("f4"),
            np.arange(5),
            r"images are float32 \('N', 1, 8, 8\); allowed is uint8 .N, C",
        ),
        (numbered(5, (8, 8)), np.arange(5), r"images are uint8 \('N', 8, 8\); allowed is uint8 \(N, C, H, W\)"),
        (numbered(5, (1, 8, 8)), np.arange(5.0), r"labels are float64 \('N',\); allowed are integers \(N,\)"),
        (numbered(5, (1, 8, 8)), np.zeros((5, 2, 2), int), r"labels are int64 \('N', 2, 2\); allowed are integers"),
        (numbered(5, (1, 8, 8)), np.arange(5) - 1, "labels run from -1 to 3; allowed are 0 to 3"),
    ],
)
def test_rows_that_are_no_labelled_images(tmp_path, pixels, labels, message):
    store = _store(tmp_path, pixels, labels)
    with pytest.raises(UserError, match=message):
        Workload(store, store, **SETTINGS)


def test_validation_must_be_of_the_same_kind(tmp_path):
    train = _store(tmp_path, numbered(5, (1, 8, 8)), np.arange(5), "train.h5")
    with pytest.raises(UserError, match="labels run from 0 to 9; allowed are 0 to 4"):
        Workload(train, _store(tmp_path, numbered(10, (1, 8, 8)), np.arange(10), "val.h5"), **SETTINGS)
    with pytest.raises(UserError, match=r"images are \(1, 8, 4\), those of .* are \(1, 8, 8\)"):
        Workload(train, _store(tmp_path, numbered(5, (1, 8, 4)), np.arange(5), "val.h5"), **SETTINGS)


def test_needs_images_and_labels(write):
    store = open_store("data.train", write(), {"pixels": "images"})
    with pytest.raises(UserError, match="data.fields has pixels; the images workload needs images and labels"):
        Workload(store, store, **SETTINGS)


def test_many_attributes_at_once(tmp_path):
    labels = np.random.default_rng(0).integers(0, 2, (40, 5), dtype=np.uint8)
    store = _store(tmp_path, numbered(40, (3, 8, 8)), labels)
    workload = Workload(store, store, **SETTINGS | {"label_smoothing": 0.1, "mixup": 0.2})
    assert (workload.classes, workload.metrics, workload.best) == (5, ("loss", "accuracy_pct"), "accuracy_pct")
    logits, truth = torch.randn(40, 5, generator=rng()), torch.from_numpy(labels)
    rows = Rows({"images": images((40, 3, 8, 8)), "labels": truth})
    p = logits.sigmoid()
    loss = -(truth * p.log() + (1 - truth.float()) * (1 - p).log()).mean(1).sum()
    hits = 100 * ((p > 0.5) == (truth == 1)).float().mean(1).sum()
    for found, expected in zip(workload.score(lambda _: logits, rows)[1], (loss, hits), strict=True):
        torch.testing.assert_close(found, expected)
    target = truth * 0.9 + 0.05
    expected = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
    torch.testing.assert_close(workload.loss(lambda _: logits, rows), expected)
    mixed = workload.transform(rows, rng())["labels"]
    assert mixed.shape == (40, 5)
    assert torch.isfinite(workload.loss(workload.model(), rows))
    with pytest.raises(UserError, match="labels run from 0 to 2; allowed are 0 to 1"):
        Workload(store, _store(tmp_path, numbered(40, (3, 8, 8)), labels * 2, "val.h5"), **SETTINGS)
    with pytest.raises(UserError, match=r"labels are \('N', 4\), those of .* are \('N', 5\)"):
        Workload(store, _store(tmp_path, numbered(40, (3, 8, 8)), labels[:, :4], "val.h5"), **SETTINGS)
