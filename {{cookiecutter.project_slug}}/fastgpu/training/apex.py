"""NVIDIA Apex (https://github.com/NVIDIA/apex), where it is installed."""

from math import inf
from pkgutil import resolve_name
from typing import Any

import torch

from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError

OPTIMIZERS = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""


def from_apex(setting: str, name: str, *arguments: Any, **options: Any) -> Any:
    """An object of a class such as apex.optimizers:FusedAdam. Raises UserError if Apex is missing, or refuses.

    setting: what asks for it, for the message.
    """
    try:
        return resolve_name(name)(*arguments, **options)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None


def apex_optimizer(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    """FusedAdam or FusedLAMB, with betas (momentum, 0.999). Raises UserError if Apex is missing."""
    name, betas = f"apex.optimizers:{OPTIMIZERS[optim.name]}", (optim.momentum, 0.999)
    # FusedLAMB would clip gradients at a norm of 1, whatever optim.clip_grad_norm is, by which train.py clips.
    options = {"max_grad_norm": inf} if optim.name == "fused_lamb" else {}
    return from_apex(f"optim.name is {optim.name}", name, groups, lr=optim.lr, betas=betas, **options)
