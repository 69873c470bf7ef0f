"""The optimizer that the config asks for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError
from fastgpu.training import apex


def make_optimizer(
    model: nn.Module, settings: Optim, own_groups: Sequence[dict[str, Any]] = ()
) -> torch.optim.Optimizer:
    """AdamW with betas (momentum, 0.999), SGD with Nesterov momentum, or one of Apex, all with fused kernels.

    Parameters with fewer than two dimensions (biases and norms) get no weight decay. To add an optimizer, add its name
    to `Optim.name` and a branch here.

    own_groups: parameters that train differently (see `Workload.parameter_groups`). Frozen parameters are left out.
    """
    own_groups = [{**group, "params": list(group["params"])} for group in own_groups]
    listed = {id(p) for group in own_groups for p in group["params"]}
    rest = {"params": [p for p in model.parameters() if id(p) not in listed]}
    groups = [part for group in (rest, *own_groups) for part in _split_group(group, settings.weight_decay)]
    lr = settings.lr
    momentum = settings.momentum
    if settings.name in apex.CLASSES:
        return apex.make_optimizer(settings.name, groups, lr, momentum)
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=True)
    assert settings.name == "sgd", f"optim.name is {settings.name}: add a branch here"
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)


def _split_group(group: dict[str, Any], weight_decay: float) -> list[dict[str, Any]]:
    """A group as two: matrices with weight decay, and biases and norms without, unless the group sets its own."""
    if "lr" in group:
        raise UserError("parameter_groups sets lr, which follows the schedule; set lr_scale, a factor of optim.lr")
    trained = [p for p in group["params"] if p.requires_grad]
    return [
        {"weight_decay": weight_decay, **group, "params": [p for p in trained if p.ndim >= 2]},
        {"weight_decay": 0.0, **group, "params": [p for p in trained if p.ndim < 2]},
    ]
