"""What happens to a batch on the device: precision, parts of a step, gradients of all ranks, averages, validation."""

from fastgpu.training.parallel import freeze

__all__ = ["freeze"]
