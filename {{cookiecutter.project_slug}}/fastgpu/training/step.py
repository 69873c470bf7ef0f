"""Parts of an optimizer step: precision, parts of a batch, learning rate, and the state that a checkpoint keeps.

The step itself is in train.py. Nothing here makes the host wait for the device.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.process.config import Auto, Kernels, OnNan, Precision
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.training import apex


class MixedPrecision(NamedTuple):
    """The numerics of a step."""

    name: Precision
    autocast: torch.autocast
    scaler: torch.amp.GradScaler
    """Scales the loss in fp16. Enabled, it skips the steps whose gradients are not finite."""
    undoes_skipped: bool = False
    """Whether a skipped step leaves no trace in the buffers and the loss either (train.on_nan=skip_step)."""


class ConstantScaler(torch.amp.GradScaler):
    """A scaler whose scale is always 1: it only skips the steps whose gradients are not finite."""

    def __init__(self, device: torch.device):
        super().__init__(device.type, init_scale=1.0)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Forget the step. The scale stays 1."""
        super().update(1.0)

    def state_dict(self) -> dict[str, Any]:
        """Nothing, like a disabled scaler, so that train.on_nan may change when a run is resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


def mixed_precision(precision: Precision | Auto, device: torch.device, on_nan: OnNan = "stop") -> MixedPrecision:
    """auto: bf16 (no loss scaling) on a GPU that supports it, fp16 on an older GPU, fp32 on a CPU."""
    if precision == "auto":
        precision = _best_precision(device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
    skips = on_nan == "skip_step"
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    if skips and precision != "fp16":
        scaler = ConstantScaler(device)
    return MixedPrecision(precision, autocast, scaler, skips)


def _best_precision(device: torch.device) -> Precision:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def to_device(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """The model on the device, with its weights in the NHWC memory format if `channels_last`."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    moved: nn.Module = model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
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


def lr_factor(progress: float, warmup_share: float) -> float:
    """Factor of the peak learning rate: a linear rise until `warmup_share`, then a cosine to 0 at progress 1.

    progress: fresh rows / planned fresh rows, so that echoing a batch does not change the schedule.
    """
    if progress < warmup_share:
        return progress / warmup_share
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup_share) / max(1e-9, 1 - warmup_share))))


def prepare_to_skip(optimizer: torch.optim.Optimizer, precision: MixedPrecision, kernels: Kernels) -> None:
    """Make the optimizer fit for steps that are skipped on the device.

    torch's fused SGD (2.13) leaves the momentum without a value if its first step is skipped: it begins with zeros.
    Raises UserError for other kernels: the host would have to wait for the gradients of each step.
    """
    if precision.undoes_skipped and kernels != "torch":
        raise UserError(
            f"train.on_nan is skip_step, but optim.fused is {kernels}; only torch's kernels skip a step without making "
            "the host wait: use optim.fused=torch, or train.on_nan=rewind"
        )
    if isinstance(optimizer, torch.optim.SGD) and precision.scaler.is_enabled():
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def find_skipped(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> Tensor | None:
    """Whether the scaler has skipped this step: a bool on the device. None if it skips none.

    Call it between `scaler.step` and `scaler.update`. DDP has averaged the gradients, so all ranks skip the same steps.
    """
    if not scaler.is_enabled():
        return None
    (found_inf,) = scaler._found_inf_per_device(optimizer).values()
    return found_inf > 0


def undo_skipped(model: nn.Module, buffers: list[Tensor], is_skipped: Tensor | None, loss: Tensor) -> Tensor:
    """Give the model its buffers back if the step was skipped: the forward pass may have made NaN of them.

    buffers: copies from before the step. Returns the loss, which is NaN for a skipped step and for no other.
    """
    assert is_skipped is not None
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(torch.where(is_skipped, before, buffer))
    return torch.where(is_skipped, math.nan, loss.nan_to_num(math.inf, math.inf, -math.inf))


class OptimizerState:
    """The state of the optimizer and of the loss scaler, as a checkpoint keeps it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler):
        self._optimizer = optimizer
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, the kind of optimizer, and the loss scale."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "kind": apex.label(self._optimizer),
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to another algorithm."""
        self._optimizer.load_state_dict(apex.converted(state["optimizer"], state["kind"], self._optimizer))
        self._scaler.load_state_dict(state["scaler"])
