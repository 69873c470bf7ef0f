"""Optimizer, schedule, precision, and the step that they make together."""

import math
from typing import Literal

import torch
from torch import nn

from fastgpu.training import apex


def make_optimizer(
    model: nn.Module,
    name: Literal["adamw", "sgd", "lamb"],
    lr: float,
    weight_decay: float,
    momentum: float,
    kernels: apex.Kernels = "torch",
) -> torch.optim.Optimizer:
    """AdamW (betas = momentum, 0.999) or SGD with Nesterov momentum, fused into one kernel a step; LAMB of Apex.

    kernels: whose; off: not fused. Biases and norms (parameters with fewer than two dimensions) get no weight decay.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kernels == "apex":
        return apex.make(name, groups, lr, momentum)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=kernels == "torch")
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=kernels == "torch")


def schedule(progress: float, warmup: float) -> float:
    """Factor of the peak learning rate: a linear rise up to progress = warmup, then a cosine to 0 at progress = 1.

    progress = fresh / planned fresh rows, so that echoing a batch does not bend it.
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))))
