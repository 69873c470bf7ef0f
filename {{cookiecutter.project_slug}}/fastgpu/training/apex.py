"""NVIDIA Apex (https://github.com/NVIDIA/apex): its fused optimizers and old DDP, imported only if the config asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fastgpu.process.launch import UserError

CLASSES = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}"""


def make_optimizer(name: str, groups: list[dict[str, Any]], lr: float, momentum: float) -> torch.optim.Optimizer:
    """FusedAdam as AdamW, or FusedLAMB (You et al., arXiv:1904.00962), with betas (momentum, 0.999)."""
    with _explained(f"optim.name is {name}"):
        kind = getattr(import_module("apex.optimizers"), CLASSES[name])
        optimizer: torch.optim.Optimizer = kind(groups, lr=lr, betas=(momentum, 0.999))
    return optimizer


def distributed(model: nn.Module, world_size: int) -> nn.Module:
    """The model in apex.parallel.DistributedDataParallel, which Apex had until 25.05; unchanged for one rank."""
    with _explained("dist.strategy is apex"):
        kind = import_module("apex.parallel").DistributedDataParallel
        shared: nn.Module = kind(model) if world_size > 1 else model
    return shared


@contextmanager
def _explained(setting: str) -> Iterator[None]:
    """Raise UserError for whatever a missing, foreign or unfit package raises."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None
