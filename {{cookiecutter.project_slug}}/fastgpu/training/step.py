"""One optimizer step."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.training import apex

Precision = Literal["bf16", "fp16", "fp32"]


def choose_precision(precision: Precision | Literal["auto"], device: torch.device) -> Precision:
    """`auto`: bf16 (no loss scaling) on a GPU that computes in it, fp16 on an older GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def check_finite(loss: float, step: int, lr: float) -> None:
    """Raises UserError if training has come to nothing. lr: optim.lr, for the message."""
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}; lower optim.lr ({lr}) or optim.clip_norm")


class Step:
    """One optimizer step: forward and backward over `accumulation` equal parts of a batch, clip, update.

    loss: (model, rows) -> mean loss of the rows. model: may be wrapped in DDP, whose ranks then share gradients once a
    step. Nothing here makes the host wait for the device.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Rows], Tensor],
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        device: torch.device,
        accumulation: int = 1,
        clip_norm: float = 0.0,
    ):
        self.model, self._loss, self._optimizer, self.precision = model, loss, optimizer, precision
        self._accumulation, self._clip_norm = accumulation, clip_norm
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        self.cast = torch.autocast(device.type, dtype, enabled=precision != "fp32")

    def __call__(self, batch: Rows, lr: float) -> Tensor:
        """The mean loss of the batch before the update, on the device."""
        losses = []
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for part in range(self._accumulation):
            rows = len(batch) // self._accumulation
            is_last = part == self._accumulation - 1
            with nullcontext() if is_last else getattr(self.model, "no_sync", nullcontext)():
                with self.cast:
                    loss = self._loss(self.model, batch.slice(part * rows, (part + 1) * rows)) / self._accumulation
                self._scaler.scale(loss).backward()
            losses.append(loss.detach())
        if self._clip_norm:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return torch.stack(losses).sum()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer, which kind it is, and the loss scale."""
        state = {"optimizer": self._optimizer.state_dict(), "kind": apex.label(self._optimizer)}
        return state | {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(apex.converted(state["optimizer"], state["kind"], self._optimizer))
        self._scaler.load_state_dict(state["scaler"])
