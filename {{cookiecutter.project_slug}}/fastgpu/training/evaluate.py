"""Validation: the average of the weights over the steps, and the metrics over all rows of all ranks."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from math import isnan
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fastgpu.process.launch import warn
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.rows import Rows
from fastgpu.training.parallel import average_statistics


class AveragedModel(nn.Module):
    """A copy of a model, `module`, whose weights are a moving average: decay x average + (1 - decay) x weights.

    Running statistics (buffers of floats) are averaged like weights, other buffers are copied. After n updates the
    decay is at most n / (n + 9), so that the initial weights do not count. Nothing is communicated: the ranks have the
    same weights after a step, hence the same average. The state has the names that torch.optim.swa_utils.AveragedModel
    gives it; in an update, that class copies its counter to the device, and the host waits for the copy.
    """

    n_averaged: Tensor
    has_average: bool
    """Whether `module` is an average, and not the copy that it was made as. The host knows it without waiting."""

    def __init__(self, model: nn.Module, decay: float):
        """decay: between 0 and 1; an average over about 1 / (1 - decay) steps. `model` is copied with its layout."""
        super().__init__()
        self.module = deepcopy(model).requires_grad_(False)
        self.register_buffer("n_averaged", torch.tensor(0))  # on the CPU, where the host reads it at once
        self._decay = decay
        self.has_average = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module does."""
        keys = super().load_state_dict(state_dict, strict, assign)
        self.has_average = bool(self.n_averaged)
        return keys

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Include the weights of `model`, in one fused kernel for each kind of tensor."""
        self.has_average = True
        averages = []
        weights = []
        for average, weight in zip(_tensors(self.module), _tensors(model), strict=True):
            if average.is_floating_point():
                averages.append(average)
                weights.append(weight)
            else:
                average.copy_(weight)
        n_averaged = int(self.n_averaged)
        update = get_ema_multi_avg_fn(min(self._decay, n_averaged / (n_averaged + 9)))
        update(averages, weights, n_averaged)
        self.n_averaged += 1


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


class Scorer(Protocol):
    """What `evaluate` needs of a workload."""

    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Sums over the rows of a batch, of any shape."""

    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics, from the sums over all rows."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    workload: Scorer,
    pools: Iterable[Pool],
    world: World,
    *,
    batch_size: int,
    autocast: torch.autocast,
) -> dict[str, float]:
    """{"val/<metric>": value} over the rows of all ranks. Each row counts once: padding is left out.

    model: the module itself, not the DDP wrapper, so that ranks may make different numbers of calls. Afterwards each of
    its modules trains or does not, as before.
    """
    average_statistics(model, world)
    were_training = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[str, Tensor] = {}
    n_rows = 0
    for pool in pools:
        for batch in pool.rows.slice(0, pool.plan.n_real_rows).batches(batch_size):
            with autocast:
                scores = workload.score(model, batch)
            for name, value in scores.items():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
            n_rows += len(batch)
    for module, was_training in were_training:
        module.training = was_training
    sums["n"] = torch.tensor(n_rows, dtype=torch.float64)
    metrics = workload.metrics(_over_all_ranks(sums, world))
    for name, metric in metrics.items():
        if isnan(metric):
            warn(f"val/{name} is nan, which no checkpoint can be judged by; look for NaN in the validation rows")
    return {f"val/{name}": float(metric) for name, metric in metrics.items()}


def _over_all_ranks(sums: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The sums over the ranks, on the CPU. A rank without rows has none, and learns from another one what there is."""
    shapes = {name: value.shape for name, value in sums.items()}
    has_rows = world.all_gather(float(len(sums) > 1))
    if not all(has_rows):
        shapes = world.broadcast(shapes, source=has_rows.index(1.0))
    parts = [sums.get(name, torch.zeros(shape)).flatten().to(world.device) for name, shape in shapes.items()]
    totals = world.all_reduce_sum(torch.cat(parts).double()).cpu().split([shape.numel() for shape in shapes.values()])
    return {name: total.view(shape) for (name, shape), total in zip(shapes.items(), totals, strict=True)}
