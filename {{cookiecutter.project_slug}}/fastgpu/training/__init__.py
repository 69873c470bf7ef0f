"""What happens to a batch on the device: step, optimizer, evaluation."""

from fastgpu.training.evaluate import AveragedModel, evaluate
from fastgpu.training.parallel import freeze, make_seed, reseed, settle_buckets, share_gradients
from fastgpu.training.step import (
    MixedPrecision,
    OptimizerState,
    apex_optimizer,
    micro_batches,
    mixed_precision,
    to_device,
)

__all__ = [
    "AveragedModel",
    "MixedPrecision",
    "OptimizerState",
    "apex_optimizer",
    "evaluate",
    "freeze",
    "make_seed",
    "micro_batches",
    "mixed_precision",
    "reseed",
    "settle_buckets",
    "share_gradients",
    "to_device",
]
