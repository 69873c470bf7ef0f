"""The contenders of bench/run.py recsys: sparse rows of users, dense as it is usually done, and sparse as here.

The data are made up and as large as MovieLens-20M: 116,677 training users, 20,108 items. "feed" is without a step.
"step" trains the same network (600-200-600) by the same optimizer. The name of a contender begins with one of them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h5py
import numpy as np
import ours
import torch
import torch.nn.functional as F
from peers import Contender, Task, permutation
from scipy import sparse
from torch import Tensor

from fastgpu.process.config import Tier
from workloads.recsys import AutoEncoder, Workload

MODEL = Workload.Options(hidden_dim=600, latent_dim=200, dropout=0.5, variational=True, kl_weight=0.2)


def read_matrix(task: Task) -> sparse.csr_matrix:
    """(users, items) of ones, float32."""
    with h5py.File(task.h5) as file:
        group = file["items"]
        indices = group["indices"][:]
        parts = np.ones(len(indices), np.float32), indices, group["indptr"][:]
        return sparse.csr_matrix(parts, shape=tuple(group.attrs["shape"]))


def toarray(task: Task, *, dtype: type = np.float32) -> Contender:
    """Dense float32 batches of a matrix of this type, by scipy. Its default is float64, as in published code."""
    matrix = read_matrix(task).astype(dtype)

    def epoch(number: int) -> Iterator[tuple[Tensor]]:
        for rows in permutation(matrix.shape[0], task.batch_size, number):
            yield (torch.from_numpy(matrix[rows].toarray()).float(),)

    return Contender([], epoch)


def feed(task: Task, *, tier: Tier = "disk") -> Contender:
    """This project."""
    pools = ours.open_feed(ours.open_rows(task.h5, ("items",)), task.batch_size, tier=tier)
    return Contender([task.h5], lambda number: ((batch,) for batch in ours.batches(pools, number)))


def dense_loss(model: AutoEncoder, x_BI: Tensor) -> Tensor:
    """The loss of the same network on dense rows, as it is usually written."""
    hidden = F.linear(F.dropout(F.normalize(x_BI), model.options.dropout), model.weight_IH.T, model.bias_H)
    mean_BL, log_var_BL = model.encode(hidden).chunk(2, 1)
    drawn_BL = mean_BL + torch.exp(0.5 * log_var_BL) * torch.randn_like(mean_BL)
    logits_BI = model.output(model.decode(drawn_BL))
    divergence = -0.5 * (1 + log_var_BL - mean_BL.square() - log_var_BL.exp()).sum(1).mean()
    return -(F.log_softmax(logits_BI, 1) * x_BI).sum(1).mean() + model.options.kl_weight * divergence


def step(task: Task, *, rows: Callable[[Task], Contender], loss: Callable[[AutoEncoder, Any], Tensor]) -> Contender:
    """A batch comes when the network has been trained on it."""
    source = rows(task)
    torch.manual_seed(0)
    model = AutoEncoder(read_matrix(task).shape[1], MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True)

    def epoch(number: int) -> Iterator[tuple[Any]]:
        for (batch,) in source.epoch(number):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            yield (batch,)

    return Contender(source.files, epoch)


TOARRAY = "feed: toarray, float32"
OURS = "feed: fastgpu, disk tier"
DENSE_STEP = "step: dense rows by toarray, float32"
SPARSE_STEP = "step: fastgpu, disk tier"
CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    TOARRAY: toarray,
    "feed: toarray, float64 and a cast": partial(toarray, dtype=np.float64),
    OURS: feed,
    "feed: fastgpu, host tier": partial(feed, tier="host"),
    "feed: fastgpu, device tier": partial(feed, tier="device"),
    DENSE_STEP: partial(step, rows=toarray, loss=dense_loss),
    SPARSE_STEP: partial(step, rows=feed, loss=partial(Workload.loss, None)),
}
