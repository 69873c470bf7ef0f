"""Training on the device: precision, parts of a step, gradients of all ranks, averaged weights, validation."""

from fastgpu.training.average import AveragedModel
from fastgpu.training.evaluate import evaluate
from fastgpu.training.parallel import compile_module, freeze, mean_over_ranks, wrap_in_ddp
from fastgpu.training.step import (
    MixedPrecision,
    apex_optimizer,
    check_groups,
    cut_batch,
    mixed_precision,
    move_model,
    prepare_optimizer,
)

__all__ = [
    "AveragedModel",
    "MixedPrecision",
    "apex_optimizer",
    "check_groups",
    "compile_module",
    "cut_batch",
    "evaluate",
    "freeze",
    "mean_over_ranks",
    "mixed_precision",
    "move_model",
    "prepare_optimizer",
    "wrap_in_ddp",
]
