"""Parts of an optimizer step: precision, memory format, parts of a batch, seeds. The step itself is in train.py."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fastgpu.process.config import Auto, Precision
from fastgpu.rows.rows import Rows


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


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device, with its weights in the NHWC memory format, which tensor cores prefer."""
    moved: nn.Module = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved


def micro_batches(batch: Rows, steps: int, ddp: nn.Module) -> Iterator[tuple[Rows, AbstractContextManager[None]]]:
    """The batch in `steps` equal parts, each with the context to run it in.

    Only the last part averages gradients over the ranks: the others run in the `no_sync` context of the DDP module.
    """
    no_sync = getattr(ddp, "no_sync", nullcontext)
    for number, part in enumerate(batch.batches(len(batch) // steps), 1):
        yield part, nullcontext() if number == steps else no_sync()


def reseed(device: torch.device, seed: int, *key: int) -> torch.Generator:
    """Seed torch's generators with `make_seed(seed, *key)`, and return the one of the device.

    Each step calls it, so that no checkpoint has to keep a random state. `torch.manual_seed` takes 0.13 ms.
    """
    derived = make_seed(seed, *key)
    rng = torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        rng = torch.cuda.default_generators[device.index].manual_seed(derived)
    return rng


def make_seed(seed: int, *key: int) -> int:
    """Derive a seed of 64 bits from the seed of the run. key: what it is for, such as (epoch, step, rank).

    `spawn_key` keeps keys of different lengths apart: to NumPy, the plain seeds (0, 0) and (0, 0, 0, 0) are the same.
    """
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0])
