"""Metrics over validation rows, exact for any number of ranks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.rows import Rows
from fastgpu.training.parallel import average_buffers


class Sum(NamedTuple):
    """A metric of some rows as a total and a number of rows, so that sums over batches and ranks are exact."""

    total: Tensor
    """Scalar: the metric, summed over the rows that count."""
    n: Tensor | int
    """How many rows count."""


class Scorer(Protocol):
    """What `evaluate` needs of a workload."""

    @property
    def metrics(self) -> Mapping[str, str]:
        """Names of the metrics."""

    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Sum]:
        """The sum of each metric over the rows of a batch."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    workload: Scorer,
    pools: Iterable[Pool],
    *,
    batch_size: int,
    autocast: torch.autocast,
    world: World,
) -> dict[str, float]:
    """{"val/<metric>": mean over the rows of all ranks}. Each row counts once: padding is left out.

    model: the module itself, not the DDP wrapper, so that ranks may make different numbers of calls.
    """
    average_buffers(model, world)
    model.eval()
    names = list(workload.metrics)
    sums = torch.zeros((len(names), 2), dtype=torch.float64, device=world.device)  # total and count of each metric
    for pool in pools:
        for batch in pool.rows.slice(0, pool.plan.n_real_rows).batches(batch_size):
            with autocast:
                scores = workload.score(model, batch)
            for row, name in enumerate(names):
                sums[row, 0] += scores[name].total
                sums[row, 1] += scores[name].n
    model.train()
    totals = zip(names, world.all_reduce_sum(sums).tolist(), strict=True)
    return {f"val/{name}": total / count for name, (total, count) in totals}
