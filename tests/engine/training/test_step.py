"""Optimizer, learning rate, precision, and the parts of a batch."""

import math
from contextlib import contextmanager

import pytest
import torch
from harness import CPU
from torch import nn
from train import learning_rate, make_optimizer

from fastgpu.process.config import Optim
from fastgpu.rows.rows import Rows
from fastgpu.training.step import micro_batches, mixed_precision, to_device


class Recorder:
    """Stands in for a DDP module: it records when it is told not to synchronise."""

    synchronises = True

    @contextmanager
    def no_sync(self):
        self.synchronises = False
        yield
        self.synchronises = True


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
@pytest.mark.parametrize("ddp", [Recorder(), nn.Linear(1, 1)])
def test_parts_are_equal_in_order_and_only_the_last_one_synchronises(steps, ddp):
    numbers = []
    synchronises = []
    for part, sync in micro_batches(Rows({"x": torch.arange(12)}), steps, ddp):
        with sync:
            synchronises.append(getattr(ddp, "synchronises", None))
        assert len(part) == 12 // steps
        numbers += part["x"].tolist()
    assert numbers == list(range(12))
    assert synchronises == ([False] * (steps - 1) + [True] if isinstance(ddp, Recorder) else [None] * steps)


@pytest.mark.parametrize(
    ("schedule", "warmup_share", "rates"),
    [
        ("cosine", 0.1, {0: 0, 0.05: 1, 0.1: 2, 0.55: 1, 1: 0, 1.2: 0}),
        ("cosine", 0.0, {0: 2, 0.25: 1 + math.cos(math.pi / 4), 1: 0}),
        ("cosine", 1.0, {0: 0, 0.5: 1, 0.99: 1.98}),
        ("linear", 0.2, {0.1: 1, 0.2: 2, 0.6: 1, 1: 0, 1.1: 0}),
        ("constant", 0.2, {0.1: 1, 0.2: 2, 0.6: 2, 1: 2}),
    ],
)
def test_the_learning_rate_rises_linearly_and_follows_its_schedule(schedule, warmup_share, rates):
    optim = Optim(lr=2.0, warmup_share=warmup_share, schedule=schedule)
    assert {share: learning_rate(share, optim) for share in rates} == pytest.approx(rates, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "momentum", "expected"),
    [
        ("adamw", 0.8, {"betas": (0.8, 0.999)}),
        ("sgd", 0.8, {"momentum": 0.8, "nesterov": True}),
        ("sgd", 0.0, {"momentum": 0.0, "nesterov": False}),
    ],
)
def test_the_optimizer_has_the_settings_and_frozen_weights_are_left_out(name, momentum, expected):
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, Optim(name=name, momentum=momentum, weight_decay=0.5))
    assert optimizer.defaults.items() >= (expected | {"fused": True}).items()
    matrices, others = optimizer.param_groups
    assert [*map(id, matrices["params"])] == [id(model[2].weight)]
    assert {parameter.ndim for parameter in others["params"]} == {1}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.5, 0.0)


@pytest.mark.parametrize("asked", ["auto", "fp32", "bf16", "fp16"])
def test_precision_on_a_cpu(asked):
    precision = mixed_precision(asked, CPU)
    assert precision.name == ("fp32" if asked == "auto" else asked)
    assert precision.scaler.is_enabled() == (asked == "fp16")
    with precision.autocast:
        dtype = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    assert dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(asked, torch.float32)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_the_precision_that_the_gpu_has(monkeypatch, has_bf16, name):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert mixed_precision("auto", torch.device("cuda", 0)).name == name


def test_weights_take_the_memory_format():
    model = to_device(nn.Conv2d(4, 4, 3), CPU)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_first_step_that_is_skipped_in_fp16_leaves_no_value_in_the_momentum():
    """torch.empty would: what is in the memory by chance."""
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, Optim(name="sgd"))
    precision = mixed_precision("fp16", CPU, optimizer)
    precision.scaler.scale(model(torch.full((1, 2), torch.nan)).sum()).backward()
    precision.scaler.step(optimizer)
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
