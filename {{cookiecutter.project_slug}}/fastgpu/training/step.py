"""Parts of an optimizer step: Apex, precision, parts of a batch, state for a checkpoint. The step is in train.py."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from fastgpu.process.config import Auto, Optim, Precision
from fastgpu.rows.rows import Rows
from fastgpu.training.parallel import explain_apex

APEX_CLASSES = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""


def apex_optimizer(groups: list[dict[str, Any]], settings: Optim) -> torch.optim.Optimizer:
    """FusedAdam or FusedLAMB, with betas (momentum, 0.999). Raises UserError if Apex is missing."""
    with explain_apex(f"optim.name is {settings.name}"):
        kind = getattr(import_module("apex.optimizers"), APEX_CLASSES[settings.name])
        optimizer: torch.optim.Optimizer = kind(groups, lr=settings.lr, betas=(settings.momentum, 0.999))
    return optimizer


class MixedPrecision(NamedTuple):
    """The numerics of a step."""

    name: Precision
    autocast: torch.autocast
    scaler: torch.amp.GradScaler
    """Scales the loss in fp16. Enabled, it skips the steps whose gradients are not finite."""


def mixed_precision(
    precision: Precision | Auto, device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> MixedPrecision:
    """auto: see `Train.precision`. optimizer: is made fit for steps that the scaler skips in fp16."""
    if precision == "auto":
        precision = _best_precision(device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    if isinstance(optimizer, torch.optim.SGD) and precision == "fp16":
        _begin_momentum(optimizer)
    return MixedPrecision(precision, autocast, scaler)


def _best_precision(device: torch.device) -> Precision:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, with its weights in the NHWC memory format, which tensor cores prefer."""
    moved: nn.Module = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved


def micro_batches(batch: Rows, steps: int, ddp: nn.Module) -> Iterator[tuple[Rows, AbstractContextManager[None]]]:
    """The batch in `steps` equal parts, each with the context to run it in.

    Only the last part averages gradients over the ranks: the others run in the `no_sync` context of the DDP module.
    """
    n_rows = len(batch) // steps
    no_sync = getattr(ddp, "no_sync", nullcontext)
    for number in range(steps):
        is_last = number == steps - 1
        yield batch.slice(number * n_rows, (number + 1) * n_rows), nullcontext() if is_last else no_sync()


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Let momentum begin with zeros.

    torch's fused SGD (2.13) leaves it without a value if its first step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class OptimizerState:
    """The state of the optimizer and of the loss scaler, as a checkpoint keeps it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler):
        self._optimizer = optimizer
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, the kind of optimizer, and the loss scale."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "kind": _label(self._optimizer),
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to another algorithm."""
        now = _label(self._optimizer)
        if state["kind"] != now:
            raise ValueError(f"saved by {state['kind']}, optim.name is now {now}; continue with the one it began with")
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])


def _label(optimizer: torch.optim.Optimizer) -> str:
    """Class and package of an optimizer, for the checkpoint: `FusedAdam of apex`."""
    return f"{type(optimizer).__name__} of {type(optimizer).__module__.partition('.')[0]}"
