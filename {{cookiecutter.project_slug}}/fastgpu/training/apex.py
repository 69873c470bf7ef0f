"""NVIDIA Apex (https://github.com/NVIDIA/apex), where it is installed."""

from importlib import import_module
from typing import Any

import torch

from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError

CLASSES = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""


def from_apex(setting: str, module: str, name: str, *arguments: Any, **options: Any) -> Any:
    """An object of the class apex.<module>.<name>. Raises UserError if Apex is missing, or refuses.

    setting: what asks for it, for the message.
    """
    try:
        return getattr(import_module(f"apex.{module}"), name)(*arguments, **options)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None


def apex_optimizer(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    """FusedAdam or FusedLAMB, with betas (momentum, 0.999). Raises UserError if Apex is missing."""
    setting, name = f"optim.name is {optim.name}", CLASSES[optim.name]
    betas = (optim.momentum, 0.999)
    optimizer: torch.optim.Optimizer = from_apex(setting, "optimizers", name, groups, lr=optim.lr, betas=betas)
    return optimizer
