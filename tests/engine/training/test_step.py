import copy
import math
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from harness import CPU
from torch import nn
from train import learning_rate, make_optimizer

from fastgpu.process.config import Optim
from fastgpu.rows.rows import Rows
from fastgpu.training.step import (
    OptimizerState,
    micro_batches,
    mixed_precision,
    to_device,
)


class Recorder(nn.Module):
    """Stands in for a DDP module: it records when it is told not to synchronise."""

    def __init__(self):
        super().__init__()
        self.synchronises = True

    @contextmanager
    def no_sync(self):
        self.synchronises = False
        yield
        self.synchronises = True


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_parts_are_equal_in_order_and_only_the_last_one_synchronises(steps):
    ddp = Recorder()
    numbers = []
    synchronises = []
    for part, sync in micro_batches(Rows({"x": torch.arange(12)}), steps, ddp):
        assert len(part) == 12 // steps
        assert isinstance(sync, AbstractContextManager)
        with sync:
            synchronises.append(ddp.synchronises)
        numbers += part["x"].tolist()
    assert numbers == list(range(12))
    assert synchronises == [False] * (steps - 1) + [True]


def test_a_model_without_ddp_is_cut_in_the_same_way():
    parts = []
    for part, sync in micro_batches(Rows({"x": torch.arange(6)}), 3, nn.Linear(1, 1)):
        with sync:
            parts.append(part["x"].tolist())
    assert parts == [[0, 1], [2, 3], [4, 5]]


def rate(share: float, warmup_share: float, schedule: str = "cosine") -> float:
    return learning_rate(share, Optim(lr=2.0, warmup_share=warmup_share, schedule=schedule))


def test_the_learning_rate_rises_linearly_and_follows_a_cosine():
    assert rate(0.0, 0.1) == 0
    assert rate(0.05, 0.1) == pytest.approx(1)
    assert rate(0.1, 0.1) == 2
    assert rate(0.55, 0.1) == pytest.approx(1)
    assert rate(1.0, 0.1) == pytest.approx(0)
    assert rate(1.2, 0.1) == pytest.approx(0)


def test_the_learning_rate_without_warmup_and_with_nothing_else():
    assert rate(0.0, 0.0) == 2
    assert rate(0.25, 0.0) == pytest.approx(1 + math.cos(math.pi / 4))
    assert 0 < rate(0.99, 1.0) <= 2


def test_the_learning_rate_may_fall_in_a_line_or_stay():
    assert [rate(share, 0.2, "linear") for share in (0.1, 0.2, 0.6, 1.0, 1.1)] == pytest.approx([1, 2, 1, 0, 0])
    assert [rate(share, 0.2, "constant") for share in (0.1, 0.2, 0.6, 1.0)] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("asked", "name", "dtype", "scales"),
    [
        ("auto", "fp32", torch.float32, False),
        ("fp32", "fp32", torch.float32, False),
        ("bf16", "bf16", torch.bfloat16, False),
        ("fp16", "fp16", torch.float16, True),
    ],
)
def test_precision_on_a_cpu(asked, name, dtype, scales):
    precision = mixed_precision(asked, CPU)
    assert precision.name == name
    assert precision.scaler.is_enabled() == scales
    with precision.autocast:
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_the_precision_that_the_gpu_has(monkeypatch, has_bf16, name):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert mixed_precision("auto", torch.device("cuda", 0)).name == name


def test_weights_take_the_memory_format():
    model = to_device(nn.Conv2d(4, 4, 3), CPU)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def train_some(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randn(8, 3, generator=generator)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def make(precision: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, make_optimizer(model, Optim(lr=0.1)), mixed_precision(precision, CPU).scaler


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_state_of_optimizer_and_scaler_comes_back(precision):
    whole, optimizer, scaler = make(precision)
    for seed in range(3):
        train_some(whole, optimizer, scaler, seed)
    state = copy.deepcopy(OptimizerState(optimizer, scaler).state_dict())
    assert state["kind"] == "AdamW of torch"
    resumed, new_optimizer, new_scaler = make(precision)
    resumed.load_state_dict(whole.state_dict())
    OptimizerState(new_optimizer, new_scaler).load_state_dict(state)
    assert new_scaler.get_scale() == scaler.get_scale()
    train_some(whole, optimizer, scaler, 9)
    train_some(resumed, new_optimizer, new_scaler, 9)
    for ours, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_can_be_saved_without_code(tmp_path):
    model, optimizer, scaler = make("fp16")
    train_some(model, optimizer, scaler, 0)
    torch.save(OptimizerState(optimizer, scaler).state_dict(), tmp_path / "step.pt")
    state = torch.load(tmp_path / "step.pt", weights_only=True)
    OptimizerState(optimizer, scaler).load_state_dict(state)


def test_the_state_of_another_algorithm_is_refused():
    model, optimizer, scaler = make("fp32")
    train_some(model, optimizer, scaler, 0)
    state = OptimizerState(optimizer, scaler).state_dict()
    sgd = make_optimizer(model, Optim(name="sgd"))
    with pytest.raises(ValueError, match="saved by AdamW of torch, optim.name is now SGD of torch"):
        OptimizerState(sgd, scaler).load_state_dict(state)


def test_a_first_step_that_is_skipped_in_fp16_leaves_no_value_in_the_momentum():
    """torch.empty would: what is in the memory by chance."""
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, Optim(name="sgd"))
    precision = mixed_precision("fp16", CPU, optimizer)
    precision.scaler.scale(model(torch.full((1, 2), torch.nan)).sum()).backward()
    precision.scaler.step(optimizer)
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())
