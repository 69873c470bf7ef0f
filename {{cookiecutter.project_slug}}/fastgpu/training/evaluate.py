"""Metrics over validation rows, exact for any number of ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastgpu.process.world import World
from fastgpu.rows.contract import Pool


@torch.no_grad()
def evaluate(
    model: nn.Module, workload: Any, pools: Iterable[Pool], batch_rows: int, cast: torch.autocast, world: World
) -> dict[str, float]:
    """{"val/<metric>": its mean over the rows of all ranks that it counts, each row once: padding is left out}.

    model: the bare module, not the DDP wrapper, so that ranks need not make equally many calls.
    """
    world.average_buffers(model)
    model.eval()
    totals = torch.zeros(1 + len(workload.metrics), dtype=torch.float64, device=world.device)
    for pool in pools:
        for batch in pool.rows.slice(0, pool.plan.real_rows).batches(batch_rows):
            with cast:
                rows, sums = workload.score(model, batch)
            totals[0] += rows
            totals[1:] += torch.stack(sums)
    model.train()
    count, *sums = world.sum(totals).tolist()
    return {f"val/{name}": total / count for name, total in zip(workload.metrics, sums, strict=True)}
