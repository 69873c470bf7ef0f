"""Parts of an optimizer step: optimizer, precision, parts of a batch, learning rate, losses, state for a checkpoint.

The step itself is in train.py. Nothing here makes the host wait for the device but `Losses.take`.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.process.config import Auto, Optim, Precision
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.training.parallel import explain_apex

APEX_CLASSES = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""


def make_optimizer(model: nn.Module, settings: Optim) -> torch.optim.Optimizer:
    """AdamW with betas (momentum, 0.999), SGD with Nesterov momentum, or one of Apex, all with fused kernels.

    Parameters with fewer than two dimensions (biases and norms) get no weight decay. To add an optimizer, add its name
    to `Optim.name` and a branch here.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = settings.lr
    momentum = settings.momentum
    if settings.name in APEX_CLASSES:
        with explain_apex(f"optim.name is {settings.name}"):
            kind = getattr(import_module("apex.optimizers"), APEX_CLASSES[settings.name])
            optimizer: torch.optim.Optimizer = kind(groups, lr=lr, betas=(momentum, 0.999))
        return optimizer
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(momentum, 0.999), fused=True)
    assert settings.name == "sgd", f"optim.name is {settings.name}: add a branch here"
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)


class MixedPrecision(NamedTuple):
    """The numerics of a step."""

    name: Precision
    autocast: torch.autocast
    scaler: torch.amp.GradScaler
    """Scales the loss in fp16. Enabled, it skips the steps whose gradients are not finite."""


def mixed_precision(precision: Precision | Auto, device: torch.device) -> MixedPrecision:
    """auto: bf16 (no loss scaling) on a GPU that supports it, fp16 on an older GPU, fp32 on a CPU."""
    if precision == "auto":
        precision = _best_precision(device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
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


def lr_factor(progress: float, warmup_share: float) -> float:
    """Factor of the peak learning rate: a linear rise until `warmup_share`, then a cosine to 0 at progress 1.

    progress: fresh rows / planned fresh rows, so that echoing a batch does not change the schedule.
    """
    if progress < warmup_share:
        return progress / warmup_share
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup_share) / max(1e-9, 1 - warmup_share))))


def prepare_to_skip(optimizer: torch.optim.Optimizer, precision: MixedPrecision) -> None:
    """Make the optimizer fit for steps that the scaler skips in fp16.

    torch's fused SGD (2.13) leaves the momentum without a value if its first step is skipped: it begins with zeros.
    """
    if isinstance(optimizer, torch.optim.SGD) and precision.scaler.is_enabled():
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


class Losses:
    """The losses since the last report, and their mean since the beginning of the epoch, or the resume in it."""

    def __init__(self) -> None:
        self.epoch_mean: float | None = None
        """None: no step has been made in this epoch."""
        self._losses: list[Tensor] = []
        self._n_epoch_steps = 0

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: Tensor) -> None:
        """loss: a scalar on the device, not read here."""
        self._losses.append(loss)

    def take(self, world: World) -> float:
        """The mean over the steps since the last report, and over the ranks. These steps are forgotten."""
        mean = torch.stack(self._losses).mean()
        self._losses.clear()
        return world.all_reduce_sum(mean).item() / world.world_size

    def add_to_epoch(self, mean: float, n_steps: int) -> None:
        """mean: of `n_steps` steps, at least one."""
        self._n_epoch_steps += n_steps
        before = self.epoch_mean or 0.0
        self.epoch_mean = before + (mean - before) * n_steps / self._n_epoch_steps

    def begin_epoch(self) -> None:
        """Begin another mean."""
        self.epoch_mean = None
        self._n_epoch_steps = 0
