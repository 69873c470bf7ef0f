"""Parts of a step: precision, parameter groups, optimizers of Apex. The step itself is in train.py."""

from collections.abc import Iterable
from math import inf
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgpu.process.config import Auto, Optim, Precision
from fastgpu.process.launch import SharedError, UserError
from fastgpu.rows.rows import Rows

APEX_OPTIMIZERS = {"fused_adam": "FusedAdam", "fused_lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}: AdamW, and LAMB (You et al., arXiv:1904.00962)."""
DENSE_OPTIMIZERS = ("Adam", "AdamW", *APEX_OPTIMIZERS.values())
"""Optimizer classes that do not take sparse gradients. Fused optimizers of any class do not, either."""


class MixedPrecision(NamedTuple):
    """The numerics of a step."""

    name: Precision
    autocast: torch.autocast
    scaler: torch.amp.GradScaler
    """Scales the loss in fp16, and skips steps with gradients that are not finite. Otherwise it does nothing."""


def mixed_precision(
    precision: Precision | Auto, device: torch.device, *optimizers: torch.optim.Optimizer
) -> MixedPrecision:
    """Autocast and scaler of a precision. auto: see `Train.precision`. optimizers: prepared for skipped fp16 steps."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    is_fp16 = precision == "fp16"
    fused_sgd = [each for each in optimizers if is_fp16 and isinstance(each, torch.optim.SGD)]
    for optimizer in fused_sgd:  # the fused SGD of torch 2.13 leaves momentum undefined if step 1 is skipped
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
    return MixedPrecision(precision, autocast, torch.amp.GradScaler(device.type, enabled=is_fp16))


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device. Weights of 2-D convolutions get the NHWC memory format, which tensor cores prefer.

    `Module.to(memory_format=...)` would refuse a model with 3-D convolutions, because their weights have 5 axes.
    """
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def from_apex(setting: str, name: str, *arguments: Any, **options: Any) -> Any:
    """An object of a class such as apex.optimizers:FusedAdam. Raises UserError if Apex is missing or fails.

    setting: the config setting that needs the class, for the message.
    """
    try:
        return resolve_name(name)(*arguments, **options)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None


def apex_optimizer(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    """FusedAdam or FusedLAMB, with betas (momentum, 0.999). Raises UserError if Apex is missing."""
    name, betas = f"apex.optimizers:{APEX_OPTIMIZERS[optim.name]}", (optim.momentum, 0.999)
    # FusedLAMB would also clip gradients at a norm of 1. train.py clips them at optim.clip_grad_norm.
    options = {"max_grad_norm": inf} if optim.name == "fused_lamb" else {}
    return from_apex(f"optim.name is {optim.name}", name, groups, lr=optim.lr, betas=betas, **options)


def prepare_optimizer(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Note in each parameter group its options, which a resumed run compares (checkpoint.py), and its learning rate as
    `initial_lr`, as torch's schedulers do: the schedule is a factor of it. Raises UserError like `check_groups`.

    Call this once, before a torch scheduler is made.
    """
    for optimizer in optimizers:
        _check_sparse(model, optimizer)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # a scheduler may have set it already, and changed `lr`
            group["made_with"] = {name: value for name, value in group.items() if name != "params"}
    check_groups(model, optimizers)


def _check_sparse(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise SharedError if the optimizer has a weight with sparse gradients, but does not take sparse gradients."""
    kind = type(optimizer).__name__
    refusing = [group for group in optimizer.param_groups if kind in DENSE_OPTIMIZERS or group.get("fused")]
    refused = {id(each) for group in refusing for each in group["params"]}
    for name, weight in sparse_weights(model).items():
        if id(weight) in refused:
            raise SharedError(
                f"{name} is of an embedding with sparse=True, and {kind} of make_optimizer takes no sparse gradients: "
                "use sparse=False, or the optimizer of docs/code.md, Large embedding tables"
            )


def sparse_weights(model: nn.Module) -> dict[str, Tensor]:
    """{name: weight} of the embeddings with sparse gradients, which contain only the rows used in a step."""
    return {
        f"{name}.weight".lstrip("."): module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad
    }


def check_groups(model: nn.Module, state: Iterable[object]) -> None:
    """Raise SharedError if a parameter needs gradients but is in no group of an optimizer: it would never change.

    This happens after `requires_grad_(True)` on a part that was frozen when the groups were made. state: the objects of
    a checkpoint, with the optimizers.
    """
    optimizers = [each for each in state if isinstance(each, torch.optim.Optimizer)]
    grouped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    named = model.named_parameters()
    if missing := [name for name, each in named if each.requires_grad and id(each) not in grouped]:
        raise SharedError(
            f"no group of the optimizer has {', '.join(missing)}, so training would not change them: add them in "
            "make_optimizer, or freeze them; docs/code.md has a recipe for parts that are set free later"
        )


def cut_batch(batch: Rows, n_parts: int) -> Iterable[Rows]:
    """Micro-batches of equal size. Raises SharedError if the rows do not divide: the mean loss would be another."""
    n_rows = len(batch)
    if n_rows % n_parts or not n_rows:
        raise SharedError(
            f"optim.accumulation_steps is {n_parts}, and a batch has {n_rows} rows; use a divisor of that"
        )
    return batch.batches(n_rows // n_parts)
