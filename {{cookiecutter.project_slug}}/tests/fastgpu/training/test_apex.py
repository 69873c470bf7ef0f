"""Against packages that stand in for every state of NVIDIA Apex in the wild; the real one runs on a GPU only."""

import importlib
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.training import apex
from fastgpu.training.optim import make_optimizer
from fastgpu.training.step import Step

CPU = torch.device("cpu")
OPTIMIZERS = dedent('''
    """Signatures of NVIDIA Apex; the arithmetic is that of torch's documentation, the step count in the groups."""
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
    """install(files, cuda=...): a package of that name that is found first."""

    def make(files: dict[str, str], cuda: bool = True) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


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
    "broken": (
        WHOLE
        | KERNELS
        | {"apex/optimizers/__init__.py": "class FusedAdam: pass\nraise RuntimeError('undefined symbol')"},
        True,
        r"cannot be imported \(undefined symbol\): build it for torch",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_why_not_is_told_with_the_cure(install, state):
    files, cuda, message = STATES[state]
    install(files, cuda)
    with pytest.raises(UserError, match=f"optim.name is adamw, optim.fused is apex, but .*{message}"):
        apex.choose("apex", "adamw")
    kernels, text = apex.choose("auto", "adamw")
    assert kernels == "torch"
    assert text.startswith("\noptim.fused is auto: torch's own kernels, as ")
    with pytest.raises(UserError, match="optim.name is lamb"):
        apex.choose("auto", "lamb")
    assert apex.choose("torch", "adamw") == ("torch", "")
    if state in ("wrong", "no kernels", "no CUDA"):
        assert "apex" not in sys.modules  # nothing of it was executed


def test_lamb_without_apex_is_refused():
    for fused in ("torch", "off"):
        with pytest.raises(UserError, match=f"lamb, which torch does not have, but optim.fused is {fused}; use apex"):
            apex.choose(fused, "lamb")


def test_where_it_is_whole_it_is_used(install):
    install(WHOLE | KERNELS)
    for name in ("adamw", "sgd", "lamb"):
        assert apex.choose("auto", name) == apex.choose("apex", name) == ("apex", "")
    assert "lamb" in apex.CLASSES


def test_its_data_parallel_is_there_or_was_removed(install):
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


def loss(model: nn.Module, batch: Rows) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch(seed: int) -> Rows:
    rng = torch.Generator().manual_seed(seed)
    return Rows({"x": torch.randn(12, 3, generator=rng), "y": torch.randn(12, 2, generator=rng)})


def made(name: str, kernels: apex.Kernels) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    return model, Step(model, loss, make_optimizer(model, name, 0.1, 0.01, 0.9, kernels), "fp32", CPU)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("before", "after"), [("torch", "apex"), ("apex", "torch"), ("torch", "off"), ("apex", "apex")]
)
def test_a_run_goes_on_with_the_other_kernels_as_if_nothing_had_changed(install, name, before, after):
    install(WHOLE | KERNELS)
    whole, whole_step = made(name, "torch")
    first, first_step = made(name, before)
    for number in range(10):
        whole_step(batch(number), 0.01)
        first_step(batch(number), 0.01)
    second, second_step = made(name, after)
    second.load_state_dict(first.state_dict())
    second_step.load_state_dict(first_step.state_dict())
    for number in range(10, 20):
        whole_step(batch(number), 0.01)
        second_step(batch(number), 0.01)
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_another_algorithm_is_refused(install):
    install(WHOLE | KERNELS)
    _, adam = made("adamw", "torch")
    adam(batch(0), 0.01)
    for name, kernels in (("sgd", "torch"), ("lamb", "apex")):
        with pytest.raises(ValueError, match="saved by AdamW of torch, optim.name is now .* go on with the one"):
            made(name, kernels)[1].load_state_dict(adam.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_numbers_are_those_of_torch(name):
    """With a real Apex only; there is none on most machines, and then there is nothing to compare."""
    if why := apex.reason_against("optimizers", apex.CLASSES[name], "amp_C"):
        assert "apex" in why.lower()
        return
    ours, plain = (nn.Linear(64, 64).cuda() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    steps = [make_optimizer(m, name, 1e-2, 0.01, 0.9, k) for m, k in ((ours, "apex"), (plain, "torch"))]
    for _ in range(100):
        x = torch.randn(32, 64, device="cuda")
        for model, optimizer in zip((ours, plain), steps, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-5, atol=1e-6)
