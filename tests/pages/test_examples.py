"""The examples in docs/examples: their losses, metrics and messages; those with a state of their own are resumed. And
what docs/code.md adds to train.py: a plain DataLoader, a loader without a Dataset, a second model, a scheduler. The
linters of a project accept the code of the pages and of the examples.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from contract import check_workload

from fastgpu.convert.images.readers import IGNORED_CLASS
from fastgpu.rows.rows import Field, Ragged, Rows
from fastgpu.storage.arrays import ArrayDataset
from support import PROJECT
from support.projects import (
    EXAMPLES,
    draw_series,
    make_events,
    read_blocks,
    run_in,
    section_of_code_page,
    take_example,
    use_diff,
    use_loader,
    write_text,
)
from support.ranks import copy_project, printed_by, run_train
from support.rows import write_rows
from support.runs import metrics_of, newest, same_after_a_kill, step_of, weights_of
from tools.facts import LEAF_ROOMS
from workloads.recsys import rank

GENERATOR = torch.Generator()


def masked(n_rows: int) -> Rows:
    """Images that are their own masks, of three classes; the first line of pixels is ignored."""
    masks = torch.randint(0, 3, (n_rows, 16, 16), dtype=torch.uint8, generator=GENERATOR.manual_seed(0))
    masks[:, 0] = IGNORED_CLASS
    return Rows({"images": masks, "masks": masks})


def texts(n_kinds: int = 256) -> Rows:
    return Rows({"tokens": torch.randint(0, n_kinds, (12, 9), dtype=torch.uint8, generator=GENERATOR.manual_seed(0))})


def series(n_rows: int = 12) -> Rows:
    """Windows of 10 steps of two features, one of which has large values."""
    steps = torch.randn(n_rows, 10, 2, generator=GENERATOR.manual_seed(0))
    return Rows({"series": steps * torch.tensor([1.0, 50.0]) + torch.tensor([0.0, 1000.0])})


def brightness(*shape: int) -> Rows:
    """Images whose brightness is their label."""
    brightness = torch.arange(40, dtype=torch.uint8)
    labels = brightness.float().view(-1, *[1] * len(shape)).expand(40, *shape).contiguous()
    return Rows({"images": brightness.view(-1, 1, 1, 1).expand(40, 3, 8, 8).contiguous(), "labels": labels})


N_ITEMS = 30


def users(*, is_train: bool = False) -> Rows:
    """Users with 0 to 11 items in an order, and up to 2 others to be found."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(N_ITEMS).astype(np.int32) for _ in range(12)]
    columns = {"items": Ragged.of([order[:n] for n, order in enumerate(orders)])}
    return Rows(
        columns
        if is_train
        else columns | {"held_out": Ragged.of([order[20 : 20 + len(order) % 3 + 1] for order in orders])}
    )


def open_workload(
    name: str, batch: Rows, other: Rows | None = None, /, n_classes: int = 3, events: str = "{}", **options: object
):
    """The workload of an example. other: validation rows, if they are of another kind."""
    attributes = {"n_classes": n_classes, "target_names": ["height", "age"], "feature_names": ["load", "price"]}
    attributes["events"] = events
    sources = []
    for rows in (batch, other or batch):
        ragged = [name for name, column in rows.columns.items() if isinstance(column, Ragged)]
        fields = {name: Field(np.dtype(np.int32), (), n_items=N_ITEMS) for name in ragged}
        sources.append(ArrayDataset("rows.h5", rows.numpy(), attributes, fields=fields))
    kind = runpy.run_path(str(EXAMPLES / f"{name}.py"))["Workload"]
    return kind(kind.Options(**options), *sources)


@pytest.mark.parametrize(
    ("name", "batch", "options"),
    [
        ("segmentation", masked(12), {"width": 4, "crop_padding": 5}),
        ("gpt", texts(), {"dim": 4, "heads": 2}),
        ("forecast", series(), {"horizon": 4, "season": 6, "hidden_dim": 4}),
        ("forecast", Rows({"series": series()["series"][:, :, 1].short()}), {"horizon": 4, "season": 6}),
        ("image_numbers", brightness(), {"width": 4}),
        ("image_numbers", brightness(3), {"width": 4}),
        ("sasrec", users(), {"dim": 4, "length": 5}),
        ("two_towers", users(), {"dim": 4, "length": 5}),
    ],
)
def test_example_fits_the_protocol(name, batch, options):
    check_workload(open_workload(name, batch, **options), batch, batch)


def test_example_imports_no_tool():
    for path in EXAMPLES.glob("*.py"):
        is_dataset = path.stem == "published"  # which convert.py reads
        assert is_dataset or not re.search(rf"fastgpu\.({'|'.join(LEAF_ROOMS)})\b", path.read_text()), path


def test_messages_of_examples(compare_messages):
    images = masked(4)["images"]
    wide = Rows({"images": images, "masks": images.int()})
    mistakes = {
        "masks of int32": lambda: open_workload("segmentation", masked(4), wide),
        "masks without a number of classes": lambda: open_workload("segmentation", masked(4), n_classes=0),
        "tokens that are no windows": lambda: open_workload("gpt", Rows({"tokens": texts()["tokens"][:, 0]})),
        "tokens of floats": lambda: open_workload("gpt", texts(), Rows({"tokens": texts()["tokens"].float()})),
        "tokens that are not in the vocabulary": lambda: open_workload("gpt", texts(4), texts(200), vocab_size=4),
        "tokens, and heads of unequal width": lambda: open_workload("gpt", texts(), dim=6),
        "a series that is no window": lambda: open_workload("forecast", Rows({"series": series()["series"][:, 0, 0]})),
        "a series that is too short": lambda: open_workload("forecast", series(), horizon=4, season=7),
        "items without times": lambda: open_workload("sasrec", users(), events='{"columns": ["u", "i", "", ""]}'),
        "items, and heads of unequal width": lambda: open_workload("sasrec", users(), dim=5),
        "items that are not held out": lambda: open_workload("two_towers", users(is_train=True)),
        "numbers that are smoothed": lambda: open_workload("image_numbers", brightness(), label_smoothing=0.1),
    }
    compare_messages(mistakes)


def test_example_segmentation_moves_masks_alike():
    batch = masked(32)
    workload = open_workload("segmentation", batch, crop_padding=5)
    moved = workload.transform(batch, GENERATOR.manual_seed(0))
    counts = moved["masks"] != IGNORED_CLASS
    assert torch.equal(moved["images"][:, 0][counts], moved["masks"][counts])
    assert not torch.equal(moved["masks"], batch["masks"])
    assert (~counts).sum() > (batch["masks"] == IGNORED_CLASS).sum()  # what was padded is ignored, too


def test_example_segmentation_ignores_pixels():
    batch = masked(6)
    workload, masks = open_workload("segmentation", batch), batch["masks"]
    logits = torch.randn(6, 3, 16, 16, generator=GENERATOR.manual_seed(0))
    loss = F.cross_entropy(logits, masks.long(), ignore_index=IGNORED_CLASS)
    torch.testing.assert_close(workload.loss(lambda _: logits, batch), loss)
    ours, truth = logits.argmax(1)[masks != IGNORED_CLASS], masks[masks != IGNORED_CLASS]
    ious = [float(((ours == k) & (truth == k)).sum() / ((ours == k) | (truth == k)).sum()) for k in range(3)]
    accuracy = float((ours == truth).float().mean())
    expected = {"miou_pct": 100 * np.mean(ious), "pixel_accuracy_pct": 100 * accuracy, "loss": float(loss)}
    assert workload.metrics(workload.score(lambda _: logits, batch)) == pytest.approx(expected)
    ignored = Rows({"images": masks, "masks": torch.full_like(masks, IGNORED_CLASS)})
    assert workload.loss(lambda _: logits, ignored) == 0
    assert all(float(value.sum()) == 0 for value in workload.score(lambda _: logits, ignored).values())


@pytest.mark.parametrize("shape", [(), (3,)])
def test_example_numbers_loss_and_scores(shape):
    batch = brightness(*shape)
    workload = open_workload("image_numbers", batch)
    outputs_BK = torch.randn(40, *shape, generator=GENERATOR.manual_seed(0)).view(40, -1)
    labels_BK = batch["labels"].view(40, -1)
    torch.testing.assert_close(workload.loss(lambda _: outputs_BK, batch), F.mse_loss(outputs_BK, labels_BK))
    scores = workload.score(lambda _: outputs_BK, batch)
    torch.testing.assert_close(scores["mse"] / 40, F.mse_loss(outputs_BK, labels_BK))
    torch.testing.assert_close(scores["mae"] / 40, F.l1_loss(outputs_BK, labels_BK))


def test_example_numbers_mixed_and_named():
    batch = brightness(2)
    workload = open_workload("image_numbers", batch, width=4, mixup_alpha=0.4, crop_padding=0)
    mixed = workload.transform(batch, GENERATOR.manual_seed(0))
    torch.testing.assert_close(mixed["labels"][:, 0], mixed["images"][:, 0, 0, 0].float(), atol=0.51, rtol=0)
    assert not torch.equal(mixed["labels"], batch["labels"])
    assert list(workload.predict(workload.model().eval(), batch)) == ["height", "age"]


def test_example_gpt_scores_and_baseline():
    """Against the definitions; and no logit depends on a token that comes later."""
    batch = texts(5)
    workload = open_workload("gpt", batch, dim=4, heads=2)
    model = workload.model().requires_grad_(False)
    tokens = batch["tokens"].long()
    log_p_BTV = model(tokens[:, :-1]).log_softmax(2)
    nats = [-log_p_BTV[row, t, tokens[row, t + 1]].item() for row in range(12) for t in range(8)]
    p = np.bincount(tokens[:, 1:].flatten()) / (12 * 8)
    expected = {"nats_per_token": np.mean(nats), "baseline_nats_per_token": -np.sum(p * np.log(p))}
    sums = workload.score(model, batch) | {"n": torch.tensor(12)}
    assert workload.metrics(sums) == pytest.approx(expected)
    assert workload.loss(model, batch).item() == pytest.approx(expected["nats_per_token"])
    changed = tokens[:, :-1].clone()
    changed[:, 5:] = 0
    assert torch.equal(model(changed)[:, :5], model(tokens[:, :-1])[:, :5])
    drawn = model.generate(tokens[:3, :2], 20)
    assert drawn.shape == (3, 22)
    assert torch.equal(drawn[:, :2], tokens[:3, :2])


def test_example_forecast_scores_and_baselines():
    """Against the definitions: 10 steps are 6 to read and 4 to forecast, in deviations of the training steps alone."""
    train, val = series(), Rows({"series": series(40)["series"] + 5})
    workload = open_workload("forecast", train, val, horizon=4, season=3, hidden_dim=4)
    model = workload.model().requires_grad_(False)
    windows = val["series"].numpy()
    forecasts = {
        "": model(val["series"][:, :6]).numpy(),
        "last_value_": windows[:, [5, 5, 5, 5]],
        "last_season_": windows[:, [3, 4, 5, 3]],
    }
    expected = {}
    for name, forecast in forecasts.items():
        errors = (forecast - windows[:, 6:]) / train["series"].flatten(0, 1).std(0).numpy()
        expected |= {f"{name}mse": np.square(errors).mean(), f"{name}mae": np.abs(errors).mean()}
    sums = workload.score(model, val) | {"n": torch.tensor(40)}
    assert workload.metrics(sums) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(forecasts[""], forecasts["last_value_"])  # before any training
    predicted = workload.predict(model, val)
    assert list(predicted) == ["forecast_load", "forecast_price"]
    np.testing.assert_array_equal(predicted["forecast_load"], windows[:, [9, 9, 9, 9], 0])  # of the steps that follow


def test_example_sasrec_loss_is_that_of_plain_sequences():
    """Of users one by one without padding, over the last items alone; and a score depends on the items before only."""
    batch = users()
    workload = open_workload("sasrec", batch, dim=4, length=5)
    model = workload.model().eval().requires_grad_(False)
    orders = [batch["items"][row : row + 1].values.long() for row in range(12)]
    losses = []
    for order in orders[2:]:
        window = order[-6:]
        log_p = model(window[None, :-1])[0].log_softmax(1)
        losses += [-log_p[place, item] for place, item in enumerate(window[1:])]
    torch.testing.assert_close(workload.loss(model, batch), torch.stack(losses).mean())
    scores = workload.predict(model, batch)["scores"]
    for order, found in zip(orders[1:], scores[1:], strict=True):
        expected = model(order[None, -5:])[0, -1]
        expected[order] = -torch.inf
        torch.testing.assert_close(found, expected)
    changed = torch.cat([orders[11][:5], orders[11][6:7]])[None]
    torch.testing.assert_close(model(changed[:, :5])[:, :4], model(orders[11][None, :5])[:, :4])
    torch.testing.assert_close(model(changed[:, 1:])[:, :4], model(orders[11][None, 1:5]))


def test_example_two_towers_draws_items_and_those_before():
    batch = users()
    workload = open_workload("two_towers", batch, dim=4, length=5, draws=200)
    drawn = workload.transform(batch, GENERATOR.manual_seed(0))
    for row in range(12):
        order = batch["items"][row : row + 1].values.tolist()
        expected = {(*([N_ITEMS] * 5 + order[:n])[-5:], order[n]) for n in range(1, row)} or {(N_ITEMS,) * 6}
        assert {
            (*h, n) for h, n in zip(drawn["history"][row].tolist(), drawn["next"][row].tolist(), strict=True)
        } == expected


@pytest.mark.parametrize("correct_bias", [False, True])
def test_example_two_towers_loss_is_its_definition(correct_bias):
    """Against loops: log q is of all draws so far; draws of the own item and users without a draw do not count."""
    batch = users()
    workload = open_workload("two_towers", batch, dim=4, length=5, draws=2, correct_bias=correct_bias)
    model = workload.model().eval().requires_grad_(False)
    counts = np.zeros(N_ITEMS)
    for step in range(2):
        drawn = workload.transform(batch, GENERATOR.manual_seed(step))
        items = [item for item in drawn["next"].flatten().tolist() if item < N_ITEMS]
        users_ND = model.user(drawn["history"].flatten(0, 1))[drawn["next"].flatten() < N_ITEMS]
        items_ID = model.item(model.items.weight)
        np.add.at(counts, items, 1)
        losses = []
        for own, item in enumerate(items):
            logits = [(users_ND[own] @ items_ID[each]).item() / 0.05 for each in items]
            if correct_bias:
                logits = [
                    logit - np.log(counts[each] / counts.sum()) for logit, each in zip(logits, items, strict=True)
                ]
            others = [n for n, each in enumerate(items) if each != item]
            losses.append(np.log(sum(np.exp(logits[n] - logits[own]) for n in [own, *others])))
        assert workload.loss(model, drawn).item() == pytest.approx(np.mean(losses), rel=1e-4)


def test_example_baselines_measure_like_the_workloads():
    batch = users()
    scores = torch.randn(12, N_ITEMS, generator=GENERATOR.manual_seed(0))
    ranking = rank(scores.clone(), batch["items"], batch["held_out"], recall_at=(10,), ndcg_at=10)
    plain = runpy.run_path(str(EXAMPLES / "baselines.py"))["metrics"]
    rows = [[batch[name][row : row + 1].values.numpy() for name in ("items", "held_out")] for row in range(12)]
    expected = [plain(scores[row].numpy(), *rows[row]) for row in range(12)]
    torch.testing.assert_close(torch.stack([ranking.recall[10], ranking.ndcg], 1), torch.tensor(expected).float())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_towers", pytest.param("sasrec", marks=pytest.mark.nightly)])
def test_example_of_events_is_resumed(own_copy, name):
    project = own_copy("recsys")
    take_example(project, name)
    make_events(project, name)
    words = ["--config", f"configs/{name}.yaml", "model.dim=8", "train.epochs=2", "run.checkpoint_every_steps=5"]
    assert same_after_a_kill(project, "last-00000[2-9]", *words, "dist.device=cpu", "data.tier=disk")
    if name == "two_towers":
        assert weights_of(project / "runs/whole")["drawn"].sum() == 2 * 4 * (2928 // 128 * 128)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sasrec", "two_towers"])
def test_example_of_events_is_better_than_baselines(own_copy, name):
    """As README.md of the examples says, for the items that are found last."""
    project = own_copy("recsys")
    take_example(project, name)
    make_events(project, name)
    run_in(project, "train.py", "--config", f"configs/{name}.yaml", "run.name=a", "dist.device=cpu")
    kind = {"sasrec": "last", "two_towers": "time"}[name]
    printed = run_in(project, "predict.py", "runs/a", "--evaluate", f"data/{kind}-test.h5")
    baselines = run_in(project, str(EXAMPLES / "baselines.py"), f"data/{kind}-train.h5", f"data/{kind}-test.h5")
    for metric in ("recall_at_10", "ndcg_at_10"):
        (ours,) = re.findall(rf"{metric} (\S+)", printed)
        popularity, followers = map(float, re.findall(rf"{metric} (\S+)", baselines))
        assert float(ours) > max(popularity, followers), printed + baselines
    lines = run_in(project, "predict.py", "runs/a", f"data/{kind}-test.h5", "--top", "3").splitlines()
    assert lines[0].split(",")[-9:] == [f"{title}_{n}" for title in ("items", "item_ids", "scores") for n in range(3)]
    assert "item-" in lines[1]
    run_in(project, "predict.py", "runs/a", "--export", "a.pt2")
    assert (project / "a.pt2").exists()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "best", "baseline"),
    [
        ("gpt", "data.window=17 data.stride=16 model.dim=32", "nats_per_token", "baseline_nats_per_token"),
        ("forecast", "model.hidden_dim=16", "mse", "last_season_mse"),
    ],
)
def test_example_of_windows_learns_and_is_resumed(own_copy, name, settings, best, baseline):
    """Two ranks, which are killed and resumed, are better than the baseline at the end."""
    project = own_copy("own")
    (project / "configs").mkdir()
    take_example(project, name)
    (write_text if name == "gpt" else draw_series)(project)
    words = ["--config", f"configs/{name}.yaml", *settings.split(), "train.epochs=2", "dist.device=cpu"]
    words += ["data.tier=disk", "run.checkpoint_every_steps=100"]
    assert same_after_a_kill(project, "last-00000[2-9]", *words)
    *_, point = [each for each in metrics_of(project / "runs/whole") if f"val/{best}" in each]
    assert point[f"val/{best}"] < 0.9 * point[f"val/{baseline}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "heading", "shown"),
    [
        ("docs/data.md", "### Tokens of a language model", "The class "),
        pytest.param("docs/examples/README.md", "## A forecast", "tensor(", marks=pytest.mark.nightly),
    ],
)
def test_page_of_an_example_of_windows_is_run(own_copy, page, heading, shown):
    """Its files are written, its commands are run, with smaller networks."""
    project = own_copy("own")
    for path in (project / "docs/examples").glob("*.yaml"):
        path.write_text(re.sub(r"dim: \d+", "dim: 8", re.sub(r"epochs: \d+", "epochs: 1", path.read_text())))
    section = (project / page).read_text().split(f"{heading}\n")[1].split("\n## ")[0]
    (project / "section.md").write_text(section)
    blocks = read_blocks(project / "section.md")
    for block in blocks:
        if block.target:
            (project / block.target).write_text(block.text)
    commands = "".join(block.text for block in blocks if block.language == "bash")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = printed_by(["bash", "-ec", commands], project, PATH=path, OMP_NUM_THREADS="1")
    assert shown in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"),
    [("gan", "model.noise_dim=8"), pytest.param("contrastive", "model.queue=96", marks=pytest.mark.nightly)],
)
def test_example_with_a_state_is_resumed(own_copy, name, setting):
    project = own_copy("both")
    take_example(project, name)
    write_rows(project / "data/images.h5", 240, (3, 16, 16))
    if name == "gan":
        subprocess.run(["git", "apply", "gan.diff"], cwd=project, check=True)
    words = [
        *("--config", f"configs/{name}.yaml", "data.val=20%", "data.batch_size=16", "data.tier=disk", "train.epochs=4"),
        *("run.checkpoint_every_steps=3", "data.pool_batches=2", "dist.device=cpu", "model.width=4", setting),
    ]
    assert same_after_a_kill(project, "last-00000[5-9]", *words)


DIGITS = """
import h5py
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, path):
        file, _, group = path.partition("::")
        with h5py.File(file) as opened:
            self.images, self.labels = opened[group]["images"][:], opened[group]["labels"][:]
        self.attributes = {"n_classes": 10}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": int(self.labels[index])}
"""
WORDS = ["data.dataset=digits:Digits", "data.val=10%", "dist.device=cpu", "loader.num_workers=1"]


@pytest.mark.nightly
@pytest.mark.slow
def test_torch_loader_trains_resumes_and_is_diagnosed(own_copy):
    """The words and the code of the page: two ranks learn (10 % is chance) without the rows that are held out, and do
    the same after SIGKILL. The project's tests pass."""
    project = own_copy("both")
    (project / "digits.py").write_text(DIGITS)
    use_loader(project, "Another loader in this loop", "torch_loader", "TorchLoader")
    assert same_after_a_kill(project, "last-00000[3-9]", *WORDS, "run.checkpoint_every_steps=5", "train.epochs=2")
    assert [point["val/top1_pct"] for point in metrics_of(project / "runs/whole") if "val/top1_pct" in point][-1] > 35
    assert step_of(newest(project / "runs/whole")) == 2 * (1442 * 9 // 10 // 64)
    config = yaml.safe_load((project / "config.yaml").read_text())
    config["data"] |= {"dataset": "digits:Digits", "val": "10%"}
    (project / "config.yaml").write_text(yaml.safe_dump(config))
    run_in(project, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "tests")
    printed = printed_by([sys.executable, "diagnose.py", *WORDS, "--seconds=0.05"], project)
    assert "TorchLoader as the loader" in printed
    assert "supply" in printed


INSIDE = ("run.checkpoint_every_steps=5", "train.validate_every_steps=8", "data.tier=disk")
"""Two ranks of the workload `minimal` are killed inside an epoch of 21 steps."""


@pytest.mark.slow
def test_loader_without_a_dataset_is_resumed(folder):
    """Two ranks, and the end after steps, inside an epoch. The error falls, so the rows are those that were meant."""
    use_loader(copy_project(folder), "A loader without a Dataset", "made_up", "MadeUpLoader")
    shutil.copyfile(PROJECT / "diagnose.py", folder / "diagnose.py")
    words = [
        "data.dataset=made_up:MadeUp",
        "data.train=6400",
        "data.val=640",
        "loader.num_workers=0",
        "train.steps=330",
    ]
    assert same_after_a_kill(folder, "last-00000[5-9]", *words, *INSIDE[:2])
    run = folder / "runs/killed"
    errors = [point["val/mse"] for point in metrics_of(run) if "val/mse" in point]
    assert errors[-1] < 0.5 * errors[0]
    assert step_of(newest(run)) == 330
    assert "MadeUpLoader as the loader" in printed_by([sys.executable, "diagnose.py", *words, "--seconds=0.05"], folder)


TEACHER = """
import torch
from torch import nn

from workloads import minimal


class Workload(minimal.Workload):
    def loss(self, model, batch, teacher=None):
        loss = super().loss(model, batch)
        if teacher is None:
            return loss
        with torch.no_grad():
            expected = teacher(batch["x"])
        return loss + nn.functional.mse_loss(model(batch["x"]), expected)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_second_model_that_is_averaged_is_resumed(folder):
    """A momentum encoder, as the page says: its own file of a checkpoint, and no part of the model to use."""
    project = copy_project(folder)
    _, diff = section_of_code_page("A second model")
    (project / "train.py").write_text(use_diff((project / "train.py").read_text(), diff))
    (project / "workloads/taught.py").write_text(TEACHER)
    assert same_after_a_kill(folder, "last-00000[5-9]", "workload=taught", *INSIDE)
    whole, killed = (weights_of(folder / "runs" / name, "teacher") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert whole["n_averaged"] == 63
    assert not torch.equal(whole["module.0.weight"], weights_of(folder / "runs/whole")["0.weight"])


@pytest.mark.slow
def test_second_model_that_is_frozen_is_in_no_checkpoint(folder):
    project = copy_project(folder)
    workload, _ = section_of_code_page("A second model")
    (project / "workloads/distilled.py").write_text(workload)
    assert same_after_a_kill(folder, "last-00000[5-9]", "workload=distilled", *INSIDE)
    saved = newest(folder / "runs/whole")
    assert {path.stem for path in saved.glob("*.pt")} == {"model", "optimizer", "scaler"}
    assert set(weights_of(folder / "runs/whole")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.nightly
@pytest.mark.slow
def test_scheduler_of_torch_is_resumed(folder):
    project = copy_project(folder)
    (diff,) = section_of_code_page("A scheduler of torch")
    (project / "train.py").write_text(use_diff((project / "train.py").read_text(), diff))
    assert same_after_a_kill(folder, "last-00000[5-9]", *INSIDE)
    run = folder / "runs/killed"
    rates = {point["step"]: point["train/lr"] for point in metrics_of(run) if "train/lr" in point}
    assert rates == pytest.approx({step: 3e-3 * 0.999**step for step in rates})
    assert weights_of(run, "scheduler")["last_epoch"] == 63


TABLE = """
import torch
from torch import nn

from workloads import minimal


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(60, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.table((2 * x).long() % 10 + 10 * torch.arange(6)))


class Workload(minimal.Workload):
    def model(self):
        return Table()
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_large_table_with_sparse_gradients_is_resumed(folder):
    """The changes of the page train it on two ranks, with clipping and accumulation; without them it is one line."""
    project = copy_project(folder)
    (project / "workloads/table.py").write_text(TABLE)
    refused = run_train("workload=table", cwd=project, root=project)
    assert refused.returncode == 2
    assert "error: table.weight is of an embedding with sparse=True, and AdamW of make_optimizer" in refused.stderr
    for name, diff in zip(
        ("train.py", "fastgpu/process/config.py"), section_of_code_page("Large embedding tables"), strict=True
    ):
        (project / name).write_text(use_diff((project / name).read_text(), diff))
    words = ("workload=table", "optim.name=adagrad", "optim.lr=0.3", "optim.accumulation_steps=2")
    assert same_after_a_kill(folder, "last-00000[5-9]", *words, *INSIDE)
    errors = [point["val/mse"] for point in metrics_of(folder / "runs/killed") if "val/mse" in point]
    assert errors[-1] < 0.9 * errors[0]


@pytest.mark.slow
def test_code_of_pages_and_examples(own_copy):
    """It passes the gate that a project ships."""
    project = own_copy("both")
    for page in ("tutorial.md", "code.md"):  # with the sections of all projects
        for block in read_blocks(PROJECT / "docs" / page):
            if block.language == "python" and block.target:
                (project / block.target).write_text(block.text)
    cells = [block.text for block in read_blocks(project / "docs/python.md") if block.language == "python"]
    (project / "page.py").write_text("# ruff: noqa: E402\n" + "\n".join(cells))  # a notebook imports in its cells, too
    for example in EXAMPLES.glob("*.py"):
        is_workload = example.with_suffix(".yaml").exists()
        shutil.copyfile(example, project / ("workloads" if is_workload else "") / example.name)
    mypy = ("mypy", "--ignore-missing-imports")  # torchvision is not installed here
    for command in (("ruff", "check"), ("ruff", "format", "--check"), mypy):
        run_in(project, "-m", *command)

    # Two that change train.py, each in its own way.
    program = (project / "train.py").read_text()
    subprocess.run(["git", "apply", EXAMPLES / "gan.diff"], cwd=project, check=True)
    run_in(project, "-m", *mypy)
    (project / "train.py").write_text(program)
    use_loader(project, "Another loader in this loop", "torch_loader", "TorchLoader")
    for command in (("ruff", "check", "--fix"), mypy):  # two imports of train.py are no longer used
        run_in(project, "-m", *command)
