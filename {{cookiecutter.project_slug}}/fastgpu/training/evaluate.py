"""Validation: the metrics over all rows of all ranks."""

from collections.abc import Iterable
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from fastgpu.process.launch import warn
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.training.parallel import average_statistics
from fastgpu.training.step import MixedPrecision


@torch.no_grad()
def evaluate(
    model: nn.Module, workload: Any, pools: Iterable[Pool], world: World, *, precision: MixedPrecision
) -> dict[str, float]:
    """{"val/<metric>": value} over the rows of all ranks. Each row counts once: padding is left out.

    model: the module itself, not the DDP wrapper. Afterwards each of its modules trains or does not, as before.
    workload: its `score` and `metrics` are called.
    """
    average_statistics(model, world)
    were_training = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[str, Tensor] = {"n": torch.zeros((), dtype=torch.float64, device=world.device)}
    for pool in pools:
        n_rows = pool.plan.n_real_rows
        # A rank whose rows are all padding scores one of them, times 0, and so knows the names and shapes of the sums.
        for batch in pool.rows.slice(0, max(1, n_rows)).batches(pool.plan.order.batch_size):
            with precision.autocast:
                scores = workload.score(model, batch)
            for name, value in scores.items():
                sums[name] = sums.get(name, 0) + value.double() * min(1, n_rows)
        sums["n"] += n_rows
    for module, was_training in were_training:
        module.training = was_training
    totals = {name: world.all_reduce_sum(value.contiguous()).cpu() for name, value in sums.items()}
    metrics = workload.metrics(totals)
    for name, metric in metrics.items():
        if isnan(metric):
            warn(f"val/{name} is nan, which no checkpoint can be judged by; look for NaN in the validation rows")
    return {f"val/{name}": float(metric) for name, metric in metrics.items()}
