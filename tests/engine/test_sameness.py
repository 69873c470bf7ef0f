"""A seed gives the same rows in the same order, bit for bit: one matrix over all kinds of rows, and whole runs."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import train as script
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset as TorchDataset

from fastgpu.feed import PoolLoader
from fastgpu.feed.sources import open_splits
from fastgpu.images.crops import centre_box, draw, random_box
from fastgpu.images.decode import EncodedImage
from fastgpu.process import signals
from fastgpu.process.config import Data, LoaderConfig, Tier
from fastgpu.process.world import World
from fastgpu.report.results import read_run
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Ragged, Rows
from support.images import photo, write_photos
from support.ranks import ALONE, copy_project, in_world, kill_tree, needs_gpu, printed_by, run_to_end, train_command
from support.rows import numbered, open_feed, ragged, rows_before, write_ragged, write_rows
from support.runs import (
    at_call,
    same_weights,
    saved_steps,
    signalled,
    train,
    train_rank,
    val_points,
    wait_for_step,
    weights_of,
)
from workloads import minimal

N_ROWS = 150
N_FIRST = 70
"""Rows of the first of two files."""
LARGE = (1, 96, 96)
PIXELS = (16, 16)
BATCH_SIZE = 8
CANONICAL_RANKS = 4
SEED = 5
TIERS = ("device", "host", "disk")

Row = dict[str, np.ndarray | np.generic]


# ---------------------------------------------------------------------------------------------- rows, read plainly


def dense_row(number: int, epoch: int, shape: tuple[int, ...] = (1, 4, 2)) -> Row:
    return {"images": numbered(1, shape, number)[0], "labels": np.int64(number % 4)}


def ragged_row(number: int, epoch: int) -> Row:
    return {"items": ragged([number]).values, "number": np.int64(number)}


def decoded_row(number: int, epoch: int, min_scale: float = 1.0) -> Row:
    """The centre of an image, or the part that seed, epoch and number decide."""
    image = EncodedImage(np.frombuffer(photo(number), np.uint8))
    box = centre_box(image.height, image.width, PIXELS)
    if min_scale < 1:
        (draws,) = draw((SEED, epoch), np.array([number])).tolist()
        box = random_box(draws, image.height, image.width, min_scale)
    return {"images": image.decode(box, PIXELS), "labels": np.int64(number)}


def own_row(number: int, epoch: int) -> Row:
    boxes = np.arange(number % 5 * 4, dtype=np.float32).reshape(-1, 4) + number
    return {**dense_row(number, epoch), "boxes": boxes}


class Own(TorchDataset):
    """Rows with any number of boxes (k, 4), if these are asked for."""

    targets = np.arange(N_ROWS) % 4

    def __init__(self, path: str):
        pass

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, number: int) -> Row:
        return own_row(number, 0)


# ---------------------------------------------------------------------------------------------- kinds of rows


def fields(*names: str) -> dict[str, str]:
    return {name: name for name in names}


DENSE = {"train": ["dense-0.h5", "dense-1.h5"], "val": "dense-0.h5", "fields": fields("images", "labels")}
LARGE_ROWS = DENSE | {"train": ["large-0.h5", "large-1.h5"], "val": "large-0.h5"}
RAGGED = {"train": ["ragged-0.h5", "ragged-1.h5"], "val": "ragged-0.h5", "fields": fields("items", "number")}
PHOTOS = DENSE | {"train": ["photos-0.h5", "photos-1.h5"], "val": "photos-0.h5", "image_size": 16}
OWN = DENSE | {"train": "own", "val": "other", "dataset": "test_sameness:Own"}
BOXES = OWN | {"fields": fields("images", "labels", "boxes")}
WEIGHTS = RAGGED | {"train": {"ragged-0.h5": 1, "ragged-1.h5": 2.5}}
KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Row], tuple[Tier, ...]]] = {
    "dense": (DENSE, dense_row, TIERS),
    "large": (LARGE_ROWS, partial(dense_row, shape=LARGE), TIERS),
    "ragged": (RAGGED, ragged_row, TIERS),
    "encoded": (PHOTOS, decoded_row, TIERS),
    "random parts": (PHOTOS | {"min_crop_scale": 0.2}, partial(decoded_row, min_scale=0.2), ("disk",)),
    "own Dataset": (OWN, dense_row, TIERS),
    "own Dataset of any length": (BOXES, own_row, ("disk",)),
    "weights": (WEIGHTS, ragged_row, TIERS),
    "weights without a share": (WEIGHTS | {"val": "10%"}, ragged_row, TIERS),
    "classes without a share": (DENSE | {"balance": "classes", "val": "10%"}, dense_row, TIERS),
    "classes of a Dataset without a share": (OWN | {"balance": "classes", "val": "10%"}, dense_row, ("disk", "host")),
    "encoded without a share": (PHOTOS | {"val": "20%"}, decoded_row, ("disk", "host")),
}
"""{kind: (settings of section `data`, what a row holds in an epoch, where the rows may stay)}"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with two files of each kind, which lie in other pieces."""
    folder = tmp_path_factory.mktemp("files")
    pieces = ((0, N_FIRST, 7, {}), (N_FIRST, N_ROWS - N_FIRST, 5, {"chunks": (16,), "compression": "gzip"}))
    for number, (start, n_rows, chunk, options) in enumerate(pieces):
        write_rows(folder / f"dense-{number}.h5", n_rows, chunk=chunk, start=start)
        write_rows(folder / f"large-{number}.h5", n_rows, LARGE, chunk, start=start)
        write_ragged(folder / f"ragged-{number}.h5", n_rows, start, **options)
        write_photos(folder / f"photos-{number}.h5", n_rows, start)
    return folder


# ---------------------------------------------------------------------------------------------- the matrix


def sampler_of(source: Dataset, pool_batches: int, world_size: int = 1, rank: int = 0) -> BlockSampler:
    shard = Shard(rank, world_size, CANONICAL_RANKS)
    return BlockSampler(source, BATCH_SIZE // world_size, shard, pool_batches, seed=SEED)


def bytes_of_rows(batch: Rows) -> list[dict[str, bytes]]:
    """The bytes of each field of each row."""
    columns: dict[str, Sequence[np.ndarray]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            assert column.offsets.tolist() == column.host_offsets.tolist()
            values = column.values[: column.host_offsets[-1]].cpu().numpy()
            columns[name] = np.split(values, column.host_offsets[1:-1])
        else:
            columns[name] = column.cpu().numpy()
    return [{name: column[place].tobytes() for name, column in columns.items()} for place in range(len(batch))]


def global_rows(feeds: list[PoolLoader], epoch: int, first_pool: int) -> list[dict[str, bytes]]:
    """The rows of an epoch, global batch after global batch, from the feeds of all ranks."""
    batches_of_ranks = []
    for feed in feeds:
        pools = feed.pools(epoch, first_pool)
        batches_of_ranks.append(
            [bytes_of_rows(batch) for pool in pools for batch in pool.rows.batches(feed.sampler.batch_size)]
        )
    return [row for batches in zip(*batches_of_ranks, strict=True) for batch in batches for row in batch]


CASES = [(kind, tier) for kind, (_, _, tiers) in KINDS.items() for tier in tiers]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize(("kind", "tier"), CASES)
def test_same_rows_for_a_seed(files, monkeypatch, kind, tier, device):
    """Whatever the tier, the readers, the ranks, the epoch that was read before, and the pool that a run resumes at."""
    monkeypatch.chdir(files)
    data, row, _ = KINDS[kind]

    @cache
    def bytes_of(number: int, epoch: int) -> dict[str, bytes]:
        return {name: value.tobytes() for name, value in row(number, epoch).items()}

    source, _ = open_splits(Data(batch_size=BATCH_SIZE, **data), LoaderConfig(num_workers=0), SEED)
    for world_size, n_readers, pool_batches in ((1, 0, 3), (2, 4, 1000), (4, 1, 2)):
        alone = sampler_of(source, pool_batches)
        with ExitStack() as stack:
            feeds = []
            for rank in range(world_size):
                sampler = sampler_of(source, pool_batches, world_size, rank)
                feed = open_feed(source, sampler, tier, n_readers, device=torch.device(device), prefetch_pools=1)
                feeds.append(stack.enter_context(closing(feed)))
            for epoch, first_pool in ((0, 0), (1, 0), (1, 1), (0, 0)):
                alone.set_epoch(epoch)
                numbers = list(alone)[rows_before(alone, first_pool) :]
                assert global_rows(feeds, epoch, first_pool) == [bytes_of(n, epoch) for n in numbers]
                if first_pool:
                    for feed in feeds:
                        next(feed.pools(2), None)  # the loop leaves an epoch early


@pytest.mark.slow
def test_same_rows_as_the_goldens():
    printed_by([sys.executable, "goldens.py", "--only", "g1", "g2"], Path(__file__).parents[1] / "goldens")


# ---------------------------------------------------------------------------------------------- whole runs

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SHORT = ("data.tier=disk", "train.epochs=2")
MIXTURE = ("data.train={rows.h5::/train: 1, rows.h5::/val: 2}", "data.val=10%")


def assert_same_end(run: Path, other: Path, *more: str) -> None:
    """Two runs have ended with the same weights, bit for bit, and with the same metrics. more: other saved parts."""
    assert all(same_weights(run, other, name) for name in ("model", *more))
    assert val_points(run)[-1]["val/mse"] == val_points(other)[-1]["val/mse"]


def train_until(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object], *words: str) -> int:
    """Train, but something happens before a step. Returns the exit code."""
    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", at_call(step, script.train_step, what))
        return train(*words)


def test_same_weights_on_every_tier(folder):
    for tier in TIERS:
        train(f"run.name={tier}", f"data.tier={tier}", "data.echo=1.7", "loader.prefetch_pools=1")
    for tier in ("host", "disk"):
        assert_same_end(folder / "runs/device", folder / "runs" / tier)


@pytest.mark.parametrize(
    ("number", "stop_at", "more"),
    [
        (signal.SIGTERM, 1, ("data.echo=1",)),
        (signal.SIGINT, 58, ("data.echo=2.5", "data.pool_batches=7")),
        (signal.SIGUSR2, 75, ("data.echo=2.5", "train.ema=0.9")),
        (signal.SIGTERM, 30, ("data.echo=1", *MIXTURE)),
    ],
)
def test_same_weights_after_a_signal(folder, monkeypatch, capsys, number, stop_at, more):
    train("run.name=whole", *SHORT, *more)
    assert train_until(monkeypatch, stop_at, signalled(number), *SHORT, *more) == 128 + number
    run = folder / "runs/a"
    assert f"asked to stop at step {stop_at}, which is saved" in capsys.readouterr().out
    assert json.loads((run / "stopped.json").read_text())["step"] == stop_at == saved_steps(run)[-1]
    assert [point["step"] for point in read_run(run).points if "train/loss" in point][-1] == stop_at
    assert train("run.resume=auto", *SHORT, *more) == 0
    assert not (run / "stopped.json").exists()
    assert_same_end(folder / "runs/whole", run, *(["ema"] if "train.ema=0.9" in more else []))


OFTEN = ("data.echo=2.5", "train.validate_every_steps=7")


def assert_validation_changes_nothing(folder: Path, train: Callable[..., object]) -> None:
    """Three runs end with the same weights and moments: validated after each epoch, or inside them, or also saved."""
    saves = "run.checkpoint_every_steps=5"
    train("run.name=plain", "data.echo=2.5", *SHORT)
    train("run.name=often", *OFTEN, *SHORT)
    train("run.name=saves", *OFTEN, saves, *SHORT)
    plain, *others = (folder / "runs" / name for name in ("plain", "often", "saves"))
    assert (len(val_points(plain)), *map(len, map(val_points, others))) == (2, 15, 15)
    assert val_points(others[0])[-1]["val/mse"] == val_points(others[1])[-1]["val/mse"]
    for other in others:
        assert_same_end(plain, other)
        ours, theirs = (tree_leaves(weights_of(run, "optimizer")["state"]) for run in (plain, other))
        assert all(map(torch.equal, ours, theirs))


def test_same_weights_with_validation_inside_epochs(folder):
    assert_validation_changes_nothing(folder, train)


@pytest.mark.slow
def test_same_weights_with_validation_inside_on_two_ranks(folder):
    assert_validation_changes_nothing(folder, partial(in_world, 2, train_rank))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_same_weights_after_kills_inside_validations(folder, monkeypatch, n_ranks):
    """SIGKILL and SIGTERM at random batches of validations inside epochs. All values of all validations are the same,
    too."""
    rng = random.Random(n_ranks)
    words = (*OFTEN, *SHORT, "run.checkpoint_every_steps=5", "run.resume=auto")
    train_all = train_command(*words, ranks=n_ranks, root=copy_project(folder))
    (folder / "workloads/killed.py").write_text(KILLED)
    printed_by([*train_all, "workload=killed", "run.name=whole"], folder)
    expected = [point["val/mse"] for point in val_points(folder / "runs/whole")]
    for number in range(4):
        name = f"run.name=killed{number}"
        batch, signal_number = rng.randrange(1, 4 * len(expected) - 4), (signal.SIGKILL, signal.SIGTERM)[number % 2]
        killed = {"KILL_AT": str(batch), "KILL_BY": str(int(signal_number))}
        run_to_end([*train_all, "workload=killed", name], folder, **killed)
        run = folder / f"runs/killed{number}"
        assert len(val_points(run)) < len(expected)
        printed_by([*train_all, "workload=killed", name], folder)
        assert_same_end(folder / "runs/whole", run)
        assert [point["val/mse"] for point in read_run(run).points if "val/mse" in point] == expected


KILLED = """
import os
from itertools import count

from workloads import minimal


class Workload(minimal.Workload):
    calls = count(1)

    def score(self, model, batch):
        if next(self.calls) == int(os.environ.get("KILL_AT", 0)) and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), int(os.environ["KILL_BY"]))
        return super().score(model, batch)
"""
"""A signal comes to rank 0 at a batch of a validation."""


def test_same_weights_after_a_crash(folder, monkeypatch):
    words = (*SHORT, "data.echo=2.5", "run.checkpoint_every_steps=35")
    train("run.name=whole", *words)
    with pytest.raises(RuntimeError, match="stopped"):
        train_until(monkeypatch, 75, Mock(side_effect=RuntimeError("stopped")), *words)
    assert saved_steps(folder / "runs/a")[-1] == 70  # in the second epoch, within the echoes of a pool
    train("run.resume=auto", *words)
    assert_same_end(folder / "runs/whole", folder / "runs/a")


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=two_gpus)])
def test_same_weights_after_a_kill_on_a_gpu(folder, ranks):
    words = ("dist.device=cuda", "run.deterministic=true", "run.checkpoint_every_steps=1", "data.echo=2.5")
    command = train_command(*words, "train.epochs=6", "run.resume=auto", ranks=ranks)
    shown = printed_by([*command, "run.name=whole"], folder)
    assert torch.cuda.get_device_name(0) in shown
    assert ranks == 1 or "nccl" in shown
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        wait_for_step(folder / "runs/a", 60, process)  # inside the second epoch, which has 52 or 53 steps
        kill_tree(process)
    printed_by(command, folder)
    assert same_weights(folder / "runs/whole", folder / "runs/a")


@pytest.mark.slow
def test_same_weights_on_one_and_then_two_ranks(folder, monkeypatch):
    """The global batches are the same; only the order in which gradients are summed differs."""
    words = ("optim.name=sgd", "optim.lr=0.01")
    train("run.name=whole", *words)
    assert train_until(monkeypatch, 30, signalled(signal.SIGTERM), *words) == 128 + signal.SIGTERM
    assert in_world(2, train_rank, "run.resume=auto", *words) == [0, 0]
    whole, run = folder / "runs/whole", folder / "runs/a"
    torch.testing.assert_close(weights_of(whole), weights_of(run), rtol=1e-3, atol=1e-4)
    assert val_points(whole)[-1]["val/mse"] == pytest.approx(val_points(run)[-1]["val/mse"], rel=1e-4)


def train_rows(world: World, stop_at: int, *words: str) -> list[np.ndarray]:
    """The rows of this rank in each step, up to a step in which a signal comes; 0: to the end."""
    batches: list[np.ndarray] = []

    def keep(training: script.Training, batch: Rows, factor: float) -> dict[str, Tensor]:
        batches.append(batch["x"].numpy().copy())
        return script_step(training, batch, factor)

    script_step = script.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "MAX_CALLS", 1)  # the ranks ask each other for signals in each step
        patch.setattr(script, "train_step", at_call(stop_at, keep, signalled(signal.SIGTERM)))
        train("train.epochs=2", "data.tier=disk", *words, world=world)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("echo", ["1", "2.5"])
def test_same_global_batches_on_fewer_and_fewer_ranks(folder, echo):
    """Inside an epoch: a run keeps its canonical ranks, of which it would choose fewer today."""
    words = (f"data.echo={echo}", "data.pool_batches=3")
    whole = train_rows(ALONE, 0, "run.name=whole", "data.canonical_ranks=16", *words)
    steps: list[np.ndarray] = []
    for n_ranks, stop_at, word in (
        (4, 5, "data.canonical_ranks=16"),
        (2, 6, "run.resume=auto"),
        (1, 0, "run.resume=auto"),
    ):
        of_ranks = in_world(n_ranks, train_rows, stop_at, word, *words)
        steps += [np.concatenate(batches) for batches in zip(*of_ranks, strict=True)]
    assert len(steps) == len(whole) > 40
    for step, (ours, expected) in enumerate(zip(steps, whole, strict=True)):
        np.testing.assert_array_equal(ours, expected, f"step {step}")


def train_norms(world: World, *words: str, step: int = 0) -> dict[str, Tensor]:
    """Train a model that begins with batch norm; a signal comes before this step. Returns the values of this rank."""
    make_model, trainings = minimal.Workload.model, []

    def build_model(workload: minimal.Workload) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), make_model(workload))

    def keep(training: script.Training, *arguments: Any) -> dict[str, Tensor]:
        trainings.append(training)
        return script_step(training, *arguments)

    script_step = script.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal.Workload, "model", build_model)
        patch.setattr(signals, "MAX_CALLS", 1)  # the ranks ask each other for signals in each step
        patch.setattr(script, "train_step", at_call(step, keep, signalled(signal.SIGTERM)))
        train("data.batch_size=30", "train.ema=0.9", "optim.accumulation_steps=3", *SHORT, *words, world=world)
    modules = nn.ModuleDict({"model": trainings[-1].model, "ema": trainings[-1].ema})
    return {name: values.clone() for name, values in modules.state_dict().items()}


def norms_of_two_runs(world: World) -> list[dict[str, Tensor]]:
    """The values of a rank after a whole run, a run that stops in the second epoch, and its end."""
    return [
        train_norms(world, "run.name=whole"),
        train_norms(world, step=31),
        train_norms(world, "run.resume=auto"),
    ]


@pytest.mark.slow
def test_same_running_statistics_on_two_ranks(folder):
    """Each rank has its own in a step, and those of rank 0 when a step or a validation begins, as after a resume."""
    whole, stopped, resumed = zip(*in_world(2, norms_of_two_runs), strict=True)
    for rank in range(2):
        assert all(torch.equal(whole[rank][name], resumed[rank][name]) for name in whole[rank])
    for ranks, differ in ((whole, {"model"}), (stopped, {"model", "ema"})):
        names = {name for name in ranks[0] if not torch.equal(ranks[0][name], ranks[1][name])}
        assert {name.partition(".")[0] for name in names} == differ  # the average has just been validated
        assert {name.rpartition(".")[2] for name in names} == {"running_mean", "running_var"}
    assert_same_end(folder / "runs/whole", folder / "runs/a", "ema")


@pytest.mark.nightly
@pytest.mark.slow
def test_same_weights_after_a_kill_on_four_ranks(folder):
    """Sums of two ranks have one order only."""
    words = ("data.echo=2.5", "run.checkpoint_every_steps=1", "data.tier=disk", "train.epochs=6", "train.ema=0.9")
    printed_by(train_command("run.name=whole", *words, ranks=4), folder)
    run = folder / "runs/a"
    with subprocess.Popen(train_command(*words, ranks=4), cwd=folder, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run, 60, process)  # inside the second epoch, which has 52 or 53 steps
        kill_tree(process)
    last_step = saved_steps(run)[-1]
    assert f"at step {last_step}" in printed_by(train_command(*words, "run.resume=auto", ranks=4), folder)
    assert_same_end(folder / "runs/whole", run, "ema")
