import copy
import math

import pytest
import torch
from harness import in_world, no_host_sync
from torch import nn

from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.training.optim import make_optimizer, schedule
from fastgpu.training.parallel import wrap
from fastgpu.training.step import Step, choose_precision

CPU = torch.device("cpu")


def loss(model: nn.Module, batch: Rows) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch(rows: int = 12, seed: int = 0) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return Rows({"x": torch.randn(rows, 3, generator=rng), "y": torch.randn(rows, 2, generator=rng)})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_as_a_plain_loop_would(name):
    ours, plain = model(), model()
    step = Step(ours, loss, make_optimizer(ours, name, 0.1, 0.01, 0.9), "fp32", CPU, clip_norm=0.5)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), foreach=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    }[name]()
    for number in range(5):
        lr = 0.01 * (number + 1)
        mean = step(batch(seed=number), lr)
        for group in reference.param_groups:
            group["lr"] = lr
        expected = loss(plain, batch(seed=number))
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(mean, expected.detach())
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_optimizers_are_fused():
    for name in ("adamw", "sgd"):
        assert make_optimizer(model(), name, 0.1, 0.0, 0.9).defaults["fused"]


def test_biases_and_norms_do_not_decay():
    groups = make_optimizer(model(), "adamw", 0.1, 0.5, 0.9).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.5, {2}), (0.0, {1})]


@pytest.mark.parametrize("accumulation", [2, 3, 12])
def test_accumulation_is_the_whole_batch(accumulation):
    whole, parts = model(), model()
    for made, count in ((whole, 1), (parts, accumulation)):
        step = Step(made, loss, make_optimizer(made, "sgd", 0.1, 0.0, 0.0), "fp32", CPU, accumulation=count)
        value = step(batch(), 0.1)
    torch.testing.assert_close(value, loss(model(), batch()).detach())
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def _two_ranks(world: World, accumulation: int):
    made = model()
    shared = wrap(world, made, "ddp", static_graph=accumulation == 1)
    step = Step(shared, loss, make_optimizer(made, "sgd", 0.1, 0.0, 0.9), "fp32", CPU, accumulation, 1.0)
    whole = batch(24)
    reduced = [0]
    if world.world_size > 1:

        def count(_, bucket):
            reduced[0] += 1
            future = torch.futures.Future()
            tensor = bucket.buffer() / world.world_size
            torch.distributed.all_reduce(tensor)
            future.set_result(tensor)
            return future

        if accumulation > 1:
            shared.register_comm_hook(None, count)
    for _ in range(3):
        step(whole.slice(12 * world.rank, 12 * world.rank + 12) if world.world_size > 1 else whole, 0.1)
    return [p.tolist() for p in made.parameters()], reduced[0]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_are_one_with_the_whole_batch_and_talk_once_a_step(accumulation):
    alone, _ = _two_ranks(World(0, 1, 1, CPU), 1)
    (first, reductions), (second, _) = in_world(2, _two_ranks, accumulation)
    assert first == second
    for mine, theirs in zip(first, alone, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
    if accumulation > 1:
        assert reductions == 3  # the gradients of this model fill one bucket


def test_schedule():
    assert schedule(0.0, 0.1) == 0
    assert schedule(0.05, 0.1) == pytest.approx(0.5)
    assert schedule(0.1, 0.1) == 1
    assert schedule(0.55, 0.1) == pytest.approx(0.5)
    assert schedule(1.0, 0.1) == pytest.approx(0)
    assert schedule(1.2, 0.1) == pytest.approx(0)
    assert schedule(0.0, 0.0) == 1
    assert schedule(0.25, 0.0) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert 0 < schedule(0.99, 1.0) <= 1


def test_state_of_a_step_comes_back():
    first, second = model(), model()
    one = Step(first, loss, make_optimizer(first, "adamw", 0.1, 0.0, 0.9), "fp16", CPU)
    for number in range(3):
        one(batch(seed=number), 0.1)
    second.load_state_dict(first.state_dict())
    other = Step(second, loss, make_optimizer(second, "adamw", 0.1, 0.0, 0.9), "fp16", CPU)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    torch.testing.assert_close(one(batch(seed=9), 0.1), other(batch(seed=9), 0.1))
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns(precision):
    made = model()
    step = Step(made, loss, make_optimizer(made, "adamw", 0.01, 0.0, 0.9), precision, CPU, clip_norm=1.0)
    losses = [step(batch(), 0.01).item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype == torch.float32 for p in made.parameters())


def test_precision(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("fp16", CPU) == "fp16"
    for has, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has: has)
        assert choose_precision("auto", gpu) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_makes_the_host_wait(precision):
    gpu = torch.device("cuda", 0)
    made = model().to(gpu)
    step = Step(made, loss, make_optimizer(made, "adamw", 0.1, 0.0, 0.9), precision, gpu, 2, 1.0)
    rows = batch().to(gpu)
    step(rows, 0.1)
    with no_host_sync():
        step(rows, 0.1)
