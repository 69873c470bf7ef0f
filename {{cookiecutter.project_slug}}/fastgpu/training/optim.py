"""The optimizer that the config asks for."""

import torch
from torch import nn

from fastgpu.process.config import Kernels, Optim
from fastgpu.training import apex


def make_optimizer(model: nn.Module, settings: Optim, kernels: Kernels = "torch") -> torch.optim.Optimizer:
    """AdamW with betas (momentum, 0.999), SGD with Nesterov momentum, or Apex's LAMB.

    kernels: the fused kernels to use, see `apex.choose_kernels`. Parameters with fewer than two dimensions (biases and
    norms) get no weight decay. To add an optimizer, add its name to `Optim.name` and a branch here.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = settings.lr
    momentum = settings.momentum
    if kernels == "apex":
        return apex.make_optimizer(settings.name, groups, lr, momentum)
    is_fused = kernels == "torch"
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=is_fused)
    assert settings.name == "sgd", f"optim.name is {settings.name}: add a branch here"
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=is_fused)
