"""The optimizer step of train.py against a plain one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ALONE, in_world, needs_gpu, no_host_sync
from short_run import parts_of_step
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from train import Parts, train_step

from fastgpu.process.config import Dist, Optim, Precision
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.average import AveragedModel
from fastgpu.training.parallel import share_gradients

ROWS = ArrayDataset("x.h5", {"x": np.zeros((1, 3), np.float32)})

PLAIN_SGD = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
"""The update is lr times the gradient."""


class Regression:
    """A workload of which only the loss is asked."""

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make_batch(rows: int = 12, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return Rows({"x": torch.randn(rows, 3, generator=rng), "y": torch.randn(rows, 2, generator=rng)})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def make_parts(model: nn.Module, settings: Optim, precision: Precision = "fp32", ddp: nn.Module | None = None) -> Parts:
    return parts_of_step(Regression(), model, settings, precision, ddp=ddp)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("clip_grad_norm", [0.0, 0.5])  # 0 clips nothing
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_is_that_of_a_plain_loop(name, clip_grad_norm):
    ours = make_model()
    plain = make_model()
    parts = make_parts(ours, Optim(name=name, lr=0.1, weight_decay=0.01, clip_grad_norm=clip_grad_norm))
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    for number in range(5):
        batch = make_batch(seed=number)
        lr = 0.01 * (number + 1)
        loss = train_step(parts, batch, lr)["train/loss"]
        assert not loss.requires_grad
        assert all(parameter.grad is None for parameter in ours.parameters())
        for group in optimizer.param_groups:
            group["lr"] = lr
        expected = nn.functional.mse_loss(plain(batch["x"]), batch["y"])
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    assert_same_weights(ours, plain)


@pytest.mark.parametrize("accumulation_steps", [2, 3, 12])
def test_accumulated_parts_are_one_big_batch(accumulation_steps):
    whole = make_model()
    cut = make_model()
    loss = train_step(make_parts(whole, Optim(**PLAIN_SGD)), make_batch(), 0.1)["train/loss"]
    settings = Optim(**PLAIN_SGD, accumulation_steps=accumulation_steps)
    torch.testing.assert_close(train_step(make_parts(cut, settings), make_batch(), 0.1)["train/loss"], loss)
    assert_same_weights(whole, cut)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_gradients_are_clipped_after_they_are_unscaled(accumulation_steps):
    settings = Optim(**PLAIN_SGD, clip_grad_norm=0.25, accumulation_steps=accumulation_steps)
    updates = {}
    for precision in ("fp32", "fp16"):
        model = make_model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        parts = make_parts(model, settings, precision)
        assert parts.precision.scaler.is_enabled() == (precision == "fp16")
        train_step(parts, make_batch(), 1.0)
        pairs = zip(before, model.parameters(), strict=True)
        updates[precision] = torch.cat([(old - new).flatten() for old, new in pairs])
        assert updates[precision].norm().item() == pytest.approx(0.25, rel=1e-2)
    torch.testing.assert_close(updates["fp16"], updates["fp32"], rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_and_keeps_its_weights_in_fp32(precision):
    model = make_model()
    parts = make_parts(model, Optim(lr=0.01, weight_decay=0.0), precision)
    losses = [train_step(parts, make_batch(), 0.01)["train/loss"].item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def three_steps(world: World, accumulation_steps: int) -> tuple[list, int]:
    """The weights after three steps on this rank's part of each batch, with their average over the steps, and how often
    gradients were averaged."""
    model = make_model()
    ddp = share_gradients(model, Dist(), world, ROWS)
    averages: list[dist.GradBucket] = []

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        averages.append(bucket)
        return allreduce_hook(dist.group.WORLD, bucket)

    if world.world_size > 1:
        ddp.register_comm_hook(None, average)
    ema = AveragedModel(model, 0.5)
    parts = make_parts(model, Optim(name="sgd", accumulation_steps=accumulation_steps), ddp=ddp)._replace(ema=ema)
    share = 24 // world.world_size
    for _ in range(3):
        train_step(parts, make_batch(24).slice(share * world.rank, share * (world.rank + 1)), 0.1)
    return [parameter.tolist() for parameter in (*model.parameters(), *ema.parameters())], len(averages)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_two_ranks_are_one_with_the_whole_batch_and_average_once_a_step(accumulation_steps):
    expected, _ = three_steps(ALONE, 1)
    (weights, n_averages), second = in_world(2, three_steps, accumulation_steps)
    assert (weights, n_averages) == second
    assert n_averages == 3  # the gradients of this model fill one bucket
    for mine, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


def test_the_average_of_the_weights_is_updated_once_a_step():
    model = make_model()
    parts = make_parts(model, Optim(lr=0.1, accumulation_steps=3))._replace(ema=AveragedModel(model, 0.9))
    expected = AveragedModel(model, 0.9)
    for number in range(4):
        train_step(parts, make_batch(seed=number), 0.1)
        expected.update_parameters(model)
    for mine, theirs in zip(parts.ema.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_makes_the_host_wait(precision):
    device = torch.device("cuda", 0)
    model = make_model().to(device)
    parts = make_parts(model, Optim(accumulation_steps=2), precision)._replace(ema=AveragedModel(model, 0.9))
    batch = make_batch().to(device)
    train_step(parts, batch, 0.1)
    with no_host_sync():
        train_step(parts, batch, 0.1)


@pytest.mark.gpu
@needs_gpu
def test_gradients_that_nccl_averages_over_one_rank_are_those_without_it():
    device = torch.device("cuda", 0)
    batch = make_batch().to(device)
    plain = make_model().to(device)
    shared = make_model().to(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        for model, ddp in ((plain, plain), (shared, DistributedDataParallel(shared))):
            parts = make_parts(model, Optim(), "bf16", ddp)
            for _ in range(3):
                train_step(parts, batch, 0.1)
    finally:
        dist.destroy_process_group()
    assert_same_weights(shared, plain)
