"""The losses of the steps, which stay on the device until there is a report."""

import torch
from torch import Tensor

from fastgpu.process.world import World


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
