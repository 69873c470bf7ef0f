"""NVIDIA Apex (https://github.com/NVIDIA/apex), where it is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError

CLASSES = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""


def apex_optimizer(groups: list[dict[str, Any]], settings: Optim) -> torch.optim.Optimizer:
    """FusedAdam or FusedLAMB, with betas (momentum, 0.999). Raises UserError if Apex is missing."""
    with explain_apex(f"optim.name is {settings.name}"):
        kind = getattr(import_module("apex.optimizers"), CLASSES[settings.name])
        optimizer: torch.optim.Optimizer = kind(groups, lr=settings.lr, betas=(settings.momentum, 0.999))
    return optimizer


@contextmanager
def explain_apex(setting: str) -> Iterator[None]:
    """Turn whatever Apex raises if it is missing or unfit into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None
