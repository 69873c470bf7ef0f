"""Packages stand in for every state in which NVIDIA Apex is found. The real one runs on a GPU only."""

import importlib
import sys
from textwrap import dedent

import pytest
import torch
from harness import needs_gpu
from torch import nn

from fastgpu.process.config import Kernels, Optim
from fastgpu.process.launch import UserError
from fastgpu.training import apex
from fastgpu.training.optim import make_optimizer
from fastgpu.training.step import OptimizerState

OPTIMIZERS = dedent('''
    """The signatures of NVIDIA Apex with the arithmetic of torch's documentation. The groups count the steps."""
    import torch

    class _Base(torch.optim.Optimizer):
        def zero_grad(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None

    class FusedAdam(_Base):
        def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                     weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False):
            super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                          weight_decay=weight_decay))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                b1, b2 = group["betas"]
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["exp_avg"].lerp_(p.grad, 1 - b1)
                    state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    mean = state["exp_avg"] / (1 - b1 ** group["step"])
                    square = state["exp_avg_sq"] / (1 - b2 ** group["step"])
                    p.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))

    class FusedLAMB(FusedAdam):
        def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                     amsgrad=False, adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0,
                     use_nvlamb=False):
            super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay)

    class FusedSGD(_Base):
        def __init__(self, params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
                     wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False):
            super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    grad = p.grad + group["weight_decay"] * p
                    state = self.state[p]
                    first = "momentum_buffer" not in state
                    if first:
                        state["momentum_buffer"] = grad.clone()
                    else:
                        state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                    p.sub_(group["lr"] * (grad + group["momentum"] * state["momentum_buffer"]))
''')
PARALLEL = """
import torch
class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module, message_size=10000000, delay_allreduce=False):
        super().__init__()
        self.module = module
    def forward(self, *rows):
        return self.module(*rows)
"""
WHOLE = {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": "", "apex/optimizers/__init__.py": OPTIMIZERS}
KERNELS = {"amp_C.py": ""}
OLD = {"apex/parallel/__init__.py": PARALLEL, "apex/amp/__init__.py": ""}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(files, cuda=...) makes a package that is found before any other of its name."""

    def make(files: dict[str, str], cuda: bool = True) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # torch 2.6 would ask a driver
        # torch 2.13 would, too, if it is a CUDA build
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


BROKEN = {"apex/optimizers/__init__.py": "class FusedAdam: pass\nraise RuntimeError('undefined symbol')"}
STATES = {
    "missing": ({}, True, r"NVIDIA Apex is not installed \(from source: https://github.com/NVIDIA/apex"),
    "wrong": (
        {"apex/__init__.py": "raise ImportError"},
        True,
        "not NVIDIA's but another project .* pip uninstall apex",
    ),
    "no kernels": (WHOLE, True, r"built without its CUDA kernels \(amp_C\): build it again"),
    "no class": (WHOLE | KERNELS | {"apex/optimizers/__init__.py": ""}, True, "has no apex.optimizers.FusedAdam"),
    "no CUDA": (WHOLE | KERNELS, False, "needs CUDA, and torch sees no GPU"),
    "broken": (WHOLE | KERNELS | BROKEN, True, r"cannot be imported \(undefined symbol\): build it for torch"),
}
"""{state: (files, whether there is CUDA, the reason why it cannot be used)}"""


@pytest.mark.parametrize("state", STATES)
def test_the_reason_why_apex_cannot_be_used_is_told_with_the_cure(install, capsys, state):
    files, cuda, message = STATES[state]
    install(files, cuda)
    with pytest.raises(UserError, match=f"optim.name is adamw, optim.fused is apex, but .*{message}"):
        apex.usable_kernels(Optim(fused="apex"))
    with pytest.raises(UserError, match="optim.name is lamb"):
        apex.usable_kernels(Optim(name="lamb", fused="auto"))
    assert capsys.readouterr().out == ""
    assert apex.usable_kernels(Optim(fused="auto")) == "torch"
    assert capsys.readouterr().out.startswith("warning: optim.fused is auto: torch's own kernels are used, because ")
    assert apex.usable_kernels(Optim(fused="torch")) == "torch"
    assert capsys.readouterr().out == ""
    if state in ("wrong", "no kernels", "no CUDA"):
        assert "apex" not in sys.modules  # nothing of it was executed


def test_lamb_without_apex_is_refused():
    for fused in ("torch", "none"):
        with pytest.raises(UserError, match=f"lamb, which torch does not have, but optim.fused is {fused}; use apex"):
            apex.usable_kernels(Optim(name="lamb", fused=fused))


def test_a_whole_apex_is_used(install, capsys):
    install(WHOLE | KERNELS)
    for name in apex.CLASSES:
        for fused in ("auto", "apex"):
            assert apex.usable_kernels(Optim(name=name, fused=fused)) == "apex"
        optimizer = make_optimizer(nn.Linear(2, 1), Optim(name=name), "apex")
        assert apex.label(optimizer) == f"{apex.CLASSES[name]} of apex"
    assert apex.usable_kernels(Optim(fused="none")) == "none"
    assert capsys.readouterr().out == ""


def test_its_data_parallel_was_removed(install):
    install(WHOLE | KERNELS)
    message = r"dist.strategy is apex, but .* no apex.parallel.DistributedDataParallel: .* removed on 2025-05-08 .*ddp"
    with pytest.raises(UserError, match=message):
        apex.distributed(nn.Linear(1, 1), 1)


def test_an_older_apex_wraps_the_model(install):
    install(WHOLE | OLD)
    model = nn.Linear(2, 1)
    shared = apex.distributed(model, 2)
    assert type(shared).__module__ == "apex.parallel"
    assert shared.module is model
    assert apex.distributed(model, 1) is model


# ---------------------------------------------------------------------------------------------- steps and checkpoints


def make(name: str, kernels: Kernels) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    return model, make_optimizer(model, Optim(name=name, lr=0.01, weight_decay=0.01), kernels)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 3, generator=rng)
    y = torch.randn(12, 2, generator=rng)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(optimizer: torch.optim.Optimizer) -> OptimizerState:
    return OptimizerState(optimizer, torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("before", "after"), [("torch", "apex"), ("apex", "torch"), ("torch", "none"), ("apex", "apex")]
)
def test_a_run_that_is_resumed_with_other_kernels_gives_the_same_weights(install, name, before, after):
    install(WHOLE | KERNELS)
    whole, whole_optimizer = make(name, "torch")
    first, first_optimizer = make(name, before)
    for seed in range(10):
        train_step(whole, whole_optimizer, seed)
        train_step(first, first_optimizer, seed)
    second, second_optimizer = make(name, after)
    second.load_state_dict(first.state_dict())
    state_of(second_optimizer).load_state_dict(state_of(first_optimizer).state_dict())
    for seed in range(10, 20):
        train_step(whole, whole_optimizer, seed)
        train_step(second, second_optimizer, seed)
    for ours, theirs in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "kernels"), [("sgd", "torch"), ("lamb", "apex")])
def test_another_algorithm_is_refused(install, name, kernels):
    install(WHOLE | KERNELS)
    model, adam = make("adamw", "torch")
    train_step(model, adam, 0)
    _, other = make(name, kernels)
    with pytest.raises(ValueError, match="saved by AdamW of torch, optim.name is now .* the one it began with"):
        state_of(other).load_state_dict(state_of(adam).state_dict())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_real_apex_gives_the_numbers_of_torch(name):
    """Most machines have no Apex; then there is nothing to compare."""
    if why := apex.why_unusable("optimizers", apex.CLASSES[name], "amp_C"):
        assert "apex" in why.lower()
        return
    ours = nn.Linear(64, 64).cuda()
    plain = nn.Linear(64, 64).cuda()
    plain.load_state_dict(ours.state_dict())
    settings = Optim(name=name, lr=1e-2, weight_decay=0.01)
    steps = [(ours, make_optimizer(ours, settings, "apex")), (plain, make_optimizer(plain, settings, "torch"))]
    for _ in range(100):
        x = torch.randn(32, 64, device="cuda")
        for model, optimizer in steps:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-5, atol=1e-6)
