"""train.py on stand-ins for GPUs: the weights of a CPU, no wait and no allocation in a step, no race."""

import json
from pathlib import Path

import pytest
import torch

from support import PROJECT
from support.hollow import check_steps, edited_project, train_on_gpus
from support.ranks import printed_by, train_command
from support.runs import newest, same_weights, weights_of

pytestmark = [pytest.mark.hollow, pytest.mark.slow]

IMAGES = ("model.width=8", "data.pool_batches=4")
RECSYS = ("--config", "config.recsys.yaml", "model.hidden_dim=32", "data.pool_batches=4")
"""Both draw random numbers in each step: crops, and a dropout."""
COMMON = ("train.epochs=3", "log.every_steps=7", "loader.prefetch_pools=1", "dist.timeout_s=60")


@pytest.mark.parametrize(
    ("words", "ranks", "copy_us"),
    [
        ((*IMAGES, "data.tier=device"), 1, 0),
        ((*IMAGES, "data.tier=disk", "data.echo=1.7"), 1, 3000),
        ((*IMAGES, "data.tier=host", "optim.name=sgd", "optim.accumulation_steps=2", "model.mixup_alpha=0.2"), 1, 3000),
        ((*RECSYS, "data.tier=disk", "data.echo=1.5"), 1, 4000),
        ((*IMAGES, "data.tier=disk", "data.echo=2.5", "train.ema=0.9"), 2, 3000),
        ((*RECSYS, "data.tier=device"), 2, 0),
    ],
)
def test_hollow_weights_are_those_of_a_cpu(tmp_path, words, ranks, copy_us):
    """Bit for bit. Two ranks on CPUs sum gradients by gloo, two on GPUs by NCCL: two numbers have one sum."""
    words = (*COMMON, *words, "train.precision=fp32", f"run.folder={tmp_path}")
    printed_by(train_command(*words, "run.name=cpu", "dist.device=cpu", ranks=ranks), PROJECT)
    train_on_gpus(tmp_path, *words, "run.name=gpu", ranks=ranks, copy_us=copy_us)
    assert same_weights(tmp_path / "cpu", tmp_path / "gpu")
    for rank in range(ranks):
        check_steps(tmp_path, "gpu", rank)


HALF = ("optim.name=sgd", "optim.accumulation_steps=2", "train.ema=0.9", "run.deterministic=true")


@pytest.mark.parametrize(
    ("words", "ranks", "capability"),
    [
        ((*RECSYS, "data.tier=disk", "data.echo=1.5"), 1, 90),
        ((*IMAGES, "data.tier=disk", "model.cutout_size=2", "model.mixup_alpha=0.2", *HALF), 1, 75),
        ((*IMAGES, "data.tier=disk", *HALF), 2, 75),
    ],
)
def test_hollow_half_precision_never_waits(tmp_path, words, ranks, capability):
    """train.precision=auto: bf16, or fp16 with a GradScaler on a GPU of an older generation."""
    words = (*COMMON, *words, f"run.folder={tmp_path}", "run.name=gpu")
    train_on_gpus(tmp_path, *words, ranks=ranks, copy_us=3000, nccl_us=2000, capability=capability)
    chosen = json.loads((newest(tmp_path / "gpu") / "model.json").read_text())["precision"]
    assert chosen == ("bf16" if capability >= 80 else "fp16")
    for rank in range(ranks):
        check_steps(tmp_path, "gpu", rank)


SGD = (*IMAGES, "train.epochs=1", "train.precision=fp32", "optim.name=sgd", "optim.lr=0.01", "model.crop_padding=0")
"""A training that amplifies no difference in rounding, and draws nothing, so it is the same on any number of ranks."""


def assert_close(folder: Path, *runs: str) -> None:
    """The runs have ended with about the same parameters."""
    first, second = (weights_of(folder / run) for run in runs)
    parameters = [name for name in first if "running" not in name]  # statistics are those of rank 0
    for name in parameters:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


def test_hollow_sync_batch_norm_is_that_of_the_batch(tmp_path):
    """Its statistics are those of the global batch, as of one rank."""
    words = (*SGD, f"run.folder={tmp_path}")
    model = "network = resnet(self.shape_CHW, self.n_outputs, o.width, o.blocks)"
    synced = f"{model}\n            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)"
    project = edited_project(tmp_path, "workloads/images.py", model, synced)
    train_on_gpus(tmp_path, *words, "run.name=one")
    train_on_gpus(tmp_path, *words, "run.name=two", ranks=2, root=project)
    assert_close(tmp_path, "one", "two")


def test_hollow_data_parallel_is_that_of_two_ranks(tmp_path):
    """One process with two GPUs: each normalizes its half of the batch, as a rank does."""
    words = (*SGD, f"run.folder={tmp_path}")
    train_on_gpus(tmp_path, *words, "run.name=ddp", ranks=2)
    train_on_gpus(tmp_path, *words, "run.name=dp", "dist.strategy=dp", devices=2)
    assert_close(tmp_path, "ddp", "dp")
