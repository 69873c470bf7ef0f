"""The optimizer step of train.py against a plain one, and its parts: optimizer, learning rate, precision."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from train import Training, make_optimizer, schedule, train_step

from fastgpu.process.config import Dist, Optim, Precision
from fastgpu.process.launch import SharedError, UserError
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.training.average import AveragedModel
from fastgpu.training.parallel import wrap_in_ddp
from fastgpu.training.step import mixed_precision, move_model, prepare_optimizer
from support.ranks import CPU, in_world, needs_gpu, no_host_sync
from support.runs import parts_of_step

CUDA = torch.device("cuda", 0)


class Regression:
    """A workload of which only the loss is asked."""

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        predicted = model(batch["x"])
        self.dtype = predicted.dtype
        return nn.functional.mse_loss(predicted, batch["y"])


def make_batch(rows: int = 12, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return Rows({"x": torch.randn(rows, 3, generator=rng), "y": torch.randn(rows, 2, generator=rng)})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def make_parts(
    model: nn.Module, precision: Precision = "fp32", *, ddp: nn.Module | None = None, ema: float = 0.0, **optim: object
) -> Training:
    """ema: the decay of the average. optim: settings of section `optim`. `train_step` takes the rate itself."""
    parts = parts_of_step(Regression(), model, Optim(lr=1.0, **optim), precision, ddp=ddp)
    return parts._replace(ema=AveragedModel(model, ema))


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# ---------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("clip_grad_norm", [0.0, 0.5])  # 0 clips nothing
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_step_is_that_of_a_plain_loop(name, clip_grad_norm, accumulation_steps):
    ours = make_model()
    plain = make_model()
    optim = {"weight_decay": 0.01, "clip_grad_norm": clip_grad_norm, "accumulation_steps": accumulation_steps}
    parts = make_parts(ours, ema=0.9, name=name, **optim)
    average = AveragedModel(plain, 0.9)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True, foreach=False)
    for number in range(5):
        batch = make_batch(seed=number)
        lr = 0.01 * (number + 1)
        loss = train_step(parts, batch, lr)["train/loss"]
        assert not loss.requires_grad
        assert all(parameter.grad is None for parameter in ours.parameters())
        for group in optimizer.param_groups:
            group["lr"] = lr
        expected = Regression().loss(plain, batch)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), clip_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(plain)
        torch.testing.assert_close(loss, expected.detach())
    assert_same_weights(ours, plain)
    assert_same_weights(parts.ema, average)


def test_step_fp16_clips_unscaled_gradients():
    """Plain SGD at a learning rate of 1: the update is the gradient."""
    model = make_model()
    before = make_model()
    optim = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "accumulation_steps": 3}
    parts = make_parts(model, "fp16", clip_grad_norm=0.25, **optim)
    train_step(parts, make_batch(), 1.0)
    assert parts.workload.dtype == torch.float16
    Regression().loss(before, make_batch()).backward()
    assert nn.utils.clip_grad_norm_(before.parameters(), 0.25) > 0.25
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(old - new, old.grad, rtol=0, atol=5e-3)


@pytest.mark.parametrize(("n_rows", "n_steps"), [(10, 4), (2, 4), (0, 1)])
def test_step_of_unequal_micro_batches_is_one_line(n_rows, n_steps):
    """Of ten rows, four micro-batches of two would leave a fifth, whose gradients no rank averages."""
    parts = make_parts(make_model(), accumulation_steps=n_steps)
    message = f"optim.accumulation_steps is {n_steps}, and a batch has {n_rows} rows; use a divisor"
    with pytest.raises(SharedError, match=message):
        train_step(parts, make_batch(n_rows), 1.0)
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def count_averages(world: World) -> int:
    """How often gradients are averaged in two steps. Those of this model fill one bucket."""
    model = make_model()
    ddp = wrap_in_ddp(model, Dist(), world)
    averages: list[dist.GradBucket] = []

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        averages.append(bucket)
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, average)
    for _ in range(2):
        train_step(make_parts(model, ddp=ddp, accumulation_steps=3), make_batch(24), 0.1)
    return len(averages)


@pytest.mark.slow
def test_step_of_micro_batches_averages_once():
    """What it averages is compared in test_reference.py."""
    assert in_world(2, count_averages) == [2, 2]


# ---------------------------------------------------------------------------------------------- its parts


@pytest.mark.parametrize(
    ("name", "warmup_share", "factors"),
    [
        ("cosine", 0.1, {0: 0, 0.05: 0.5, 0.1: 1, 0.55: 0.5, 1: 0, 1.2: 0}),
        ("cosine", 0.0, {0: 1}),
        ("cosine", 1.0, {0: 0, 0.5: 0.5, 0.99: 0.99}),
        ("linear", 0.2, {0.1: 0.5, 0.2: 1, 0.6: 0.5, 1: 0, 1.1: 0}),
        ("constant", 0.2, {0.1: 0.5, 0.2: 1, 0.6: 1, 1: 1}),
    ],
)
def test_step_learning_rate_schedules(name, warmup_share, factors):
    optim = Optim(lr=2.0, warmup_share=warmup_share, schedule=name)
    assert {share: schedule(share, optim) for share in factors} == pytest.approx(factors, abs=1e-9)


def test_step_groups_train_at_their_own_rates():
    """Layer-wise decay, and a layer that was forgotten. SGD: the step of a weight is rate times gradient."""
    model, before = make_model(), make_model()
    layers = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(layers, lr=0.1)
    with pytest.raises(UserError, match="no group of the optimizer has 1.weight, 1.bias, so training would not change"):
        prepare_optimizer(model, optimizer)
    model[1].requires_grad_(False)
    prepare_optimizer(model, optimizer)
    train_step(make_parts(model, clip_grad_norm=0.0)._replace(optimizer=optimizer), make_batch(), 0.5)
    Regression().loss(before, make_batch()).backward()
    for layer, rate in ((0, 0.05), (1, 0.0), (3, 0.005)):
        for new, old in zip(model[layer].parameters(), before[layer].parameters(), strict=True):
            torch.testing.assert_close(old - new, rate * old.grad)


@pytest.mark.parametrize("name", ["adamw", "sgd", "fused_adam"])
def test_step_optimizer_settings(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=torch.optim.AdamW))
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, Optim(name=name, lr=0.3, momentum=0.8))
    momentum = {"momentum": 0.8, "nesterov": True} if name == "sgd" else {"betas": (0.8, 0.999)}
    fused = {} if name == "fused_adam" else {"fused": True}
    assert optimizer.defaults.items() >= ({"lr": 0.3} | momentum | fused).items()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {*trained} == {*model[1].parameters(), *model[3].parameters()}


def test_step_lamb_does_not_clip_twice(monkeypatch):
    made = SimpleNamespace(FusedLAMB=lambda groups, **options: options)
    monkeypatch.setitem(sys.modules, "apex.optimizers", made)
    options = make_optimizer(make_model(), Optim(name="fused_lamb", clip_grad_norm=0.0))
    assert options["max_grad_norm"] == float("inf")  # that of Apex is 1


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(
    ("asked", "device", "has_bf16", "name", "dtype"),
    [
        ("auto", CPU, True, "fp32", torch.float32),
        ("bf16", CPU, False, "bf16", torch.bfloat16),
        ("fp16", CPU, True, "fp16", torch.float16),
        ("auto", CUDA, True, "bf16", None),
        ("auto", CUDA, False, "fp16", None),  # it emulates bf16
    ],
)
def test_step_precision_auto(monkeypatch, asked, device, has_bf16, name, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    precision = mixed_precision(asked, device)
    assert precision.name == name
    if device == CPU:
        assert precision.scaler.is_enabled() == (name == "fp16")
        with precision.autocast:
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


def test_step_convolutions_get_the_memory_format_of_tensor_cores():
    """Those of any number of dimensions may be in one model, which keeps its values."""
    model = nn.ModuleList([nn.Conv1d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.BatchNorm2d(4)])
    model.register_buffer("kernel", torch.rand(2, 3, 4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    move_model(model, CPU)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert model.kernel.is_contiguous(memory_format=torch.channels_last)
    assert model[2].weight.is_contiguous()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model[1].weight, nn.Parameter)


def test_step_fp16_skipped_leaves_no_momentum():
    """torch.empty would: what is in the memory by chance."""
    model = nn.Conv2d(4, 4, 3).to(CPU, memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    optimizer = make_optimizer(model, Optim(name="sgd"))
    precision = mixed_precision("fp16", CPU, optimizer)
    precision.scaler.scale(model(torch.full((1, 4, 3, 3), torch.nan)).sum()).backward()
    precision.scaler.step(optimizer)
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_step_on_a_gpu_never_waits(precision):
    parts = make_parts(make_model().to(CUDA), precision, ema=0.9, accumulation_steps=2)
    batch = make_batch().to(CUDA)
    train_step(parts, batch, 0.1)
    with no_host_sync():
        train_step(parts, batch, 0.1)
