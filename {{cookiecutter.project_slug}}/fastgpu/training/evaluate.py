"""Validation: the metrics over all rows of all ranks."""

from collections.abc import Iterable, Mapping
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from fastgpu.process.launch import warn
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.training.parallel import average_statistics


@torch.no_grad()
def evaluate(
    model: nn.Module, workload: Any, pools: Iterable[Pool], world: World, *, batch_size: int, autocast: torch.autocast
) -> dict[str, float]:
    """{"val/<metric>": value} over the rows of all ranks. Each row counts once: padding is left out.

    model: the module itself, not the DDP wrapper, so that ranks may make different numbers of calls. Afterwards each of
    its modules trains or does not, as before. workload: its `score` and `metrics` are called.
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
