"""The average of the weights over the steps."""

from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedModel(nn.Module):
    """A copy of a model, `module`. Its weights are a moving average: decay x average + (1 - decay) x weights.

    With a decay of 0, `module` is the model itself. Running statistics (buffers of floats) are averaged like weights,
    other buffers are copied. After n updates the decay is at most n / (n + 9), so that the initial weights do not
    count. The state dict is compatible with torch.optim.swa_utils.AveragedModel, but an update of that class makes the
    host wait for the device.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float):
        """decay: at least 0, below 1; an average over about 1 / (1 - decay) steps."""
        super().__init__()
        self.module = deepcopy(model).requires_grad_(False) if decay else model
        self.register_buffer("n_averaged", torch.tensor(0))  # on the CPU, so that the host never waits for it
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Include the weights of `model`, in one fused kernel for each kind of tensor."""
        if self.module is model:
            return
        averages = []
        weights = []
        old, new = (chain(each.parameters(), each.buffers()) for each in (self.module, model))
        for average, weight in zip(old, new, strict=True):
            if average.is_floating_point():
                averages.append(average)
                weights.append(weight)
            else:
                average.copy_(weight)
        n_averaged = int(self.n_averaged)
        update = get_ema_multi_avg_fn(min(self._decay, n_averaged / (n_averaged + 9)))
        update(averages, weights, n_averaged)
        self.n_averaged += 1
