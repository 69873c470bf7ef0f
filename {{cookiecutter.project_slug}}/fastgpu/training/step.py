"""The precision and the learning rates of an optimizer step. The step itself is in train.py."""

from typing import NamedTuple

import torch
from torch import nn

from fastgpu.process.config import Auto, Precision
from fastgpu.process.launch import warn


class MixedPrecision(NamedTuple):
    """The numerics of a step."""

    name: Precision
    autocast: torch.autocast
    scaler: torch.amp.GradScaler
    """Scales the loss in fp16, and skips the steps whose gradients are not finite. Otherwise it does nothing."""


def mixed_precision(
    precision: Precision | Auto, device: torch.device, *optimizers: torch.optim.Optimizer
) -> MixedPrecision:
    """auto: see `Train.precision`. optimizers: are made fit for steps that the scaler skips in fp16."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    is_fp16 = precision == "fp16"
    fused_sgd = [each for each in optimizers if is_fp16 and isinstance(each, torch.optim.SGD)]
    for optimizer in fused_sgd:  # that of torch 2.13 leaves momentum undefined if step 1 is skipped
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
    return MixedPrecision(precision, autocast, torch.amp.GradScaler(device.type, enabled=is_fp16))


def note_groups(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Note in each group of parameters how it was made, which a resumed run compares (checkpoint.py), and its rate as
    `initial_lr`, as torch's schedulers do: the schedule is a factor of it. Warns of parameters that no group has.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group.setdefault("initial_lr", group["lr"])  # a scheduler may have set it, and changed the rate
        group["made_with"] = {name: value for name, value in group.items() if name != "params"}
    grouped = {id(parameter) for group in groups for parameter in group["params"]}
    named = model.named_parameters()
    if missing := [name for name, each in named if each.requires_grad and id(each) not in grouped]:
        warn(f"no group of the optimizer has {', '.join(missing)}: training does not change them")
