"""Items for a user by two towers: one network for the user, one for an item, and the product of their vectors.

The vectors of all items can be kept in an index of nearest neighbours, so two towers choose candidates among millions.
A step compares each user with the next items of all users of the batch, on all ranks. Popular items are in a batch more
often than others, so they would be pushed away too hard. The cure is to subtract log q from the logit of an item, where
q is its share of all items that were drawn so far (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations", RecSys 2019). For a user i and the items j of the batch:

    loss_i = -log softmax_j(u_i . v_j / temperature - log q_j), at the user's own item

two_towers.yaml says how to use it. Shapes: B users of a batch, R draws of each, N = B x R, G draws of all ranks, L
places of a history, D channels, I items.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field as Limits
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import warn
from fastgpu.rows import Dataset, Ragged, Rows
from workloads.recsys import check_items, ranking_means, ranking_sums, unseen

K = 10
"""Recall@K and NDCG@K are measured."""
NEVER = -1e9
"""A logit of what cannot be the answer. With -inf, a row of nothing else would give NaN."""


class Workload(workloads.Workload):
    """Trains on `items`, the items of each user in the order of time. Validation rows also have `held_out`."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        dim: Count = 64
        """Channels of an embedding and of the two vectors."""
        hidden_dim: Count = 128
        """Width of the hidden layer of each tower."""
        length: Count = 10
        """Items of a user that the model sees: the last ones."""
        draws: Count = 4
        """Items of a user to be found in a step."""
        dropout: Annotated[float, Limits(ge=0, lt=1)] = 0.2
        """Share of the channels of a history that are hidden while training."""
        temperature: Annotated[float, Limits(gt=0)] = 0.05
        """What the products of the vectors, which have length 1, are divided by."""
        correct_bias: bool = True
        """Subtract log q. false: popular items are pushed down."""

    options: Options
    best = (f"ndcg_at_{K}", "higher")
    inputs = ("items",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not items of users in the order of time."""
        self.options = options
        self.n_items = check_items(train, val, in_order=True)
        if n_short := int((train.lengths["items"] < 2).sum()):
            warn(f"{n_short:,} of {len(train):,} users of {train.name} have fewer than 2 items, and train nothing")

    def model(self) -> nn.Module:
        return TwoTowers(self.n_items, self.options)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Draw some items of each user, to be found from those before each. The first item has none before it."""
        items = batch["items"]
        counts_B1 = items.offsets.diff()[:, None]
        size = (len(batch), self.options.draws)
        share_BR = torch.rand(size, generator=rng, device=batch.device, dtype=torch.float64)
        upto_BR = torch.where(counts_B1 > 1, 2 + (share_BR * (counts_B1 - 1)).int(), 0)
        starts_B1 = items.offsets[:-1, None]
        window_BRL1 = items_before(items, starts_B1 + upto_BR, self.options.length + 1, padding=self.n_items)
        return Rows({"history": window_BRL1[..., :-1], "next": window_BRL1[..., -1]})

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy of the item of each draw among the items of all draws."""
        next_N = batch["next"].flatten()
        logits_NG = model(batch["history"].flatten(0, 1), next_N)
        own_N = torch.arange(len(next_N), device=next_N.device).masked_fill(next_N == self.n_items, -1)
        total = F.cross_entropy(logits_NG, own_N, ignore_index=-1, reduction="sum")
        return total / (own_N >= 0).sum().clamp(min=1)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        scores_BI = self._scores(model, batch["items"])
        return ranking_sums(scores_BI, batch["items"], batch["held_out"], recall_at=(K,), ndcg_at=K)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return ranking_means(sums)

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The `scores` of all items, (B, I), and -inf for items that the user has."""
        return {"scores": unseen(self._scores(model, batch["items"]), batch["items"])}

    def card(self) -> dict[str, Any]:
        return {"n_items": self.n_items}

    def _scores(self, model: nn.Module, items: Ragged) -> Tensor:
        history_BL = items_before(items, items.offsets[1:], self.options.length, padding=self.n_items)
        scores_BI: Tensor = model(history_BL).float()
        return scores_BI


def items_before(items: Ragged, ends: Tensor, length: int, *, padding: int) -> Tensor:
    """The last `length` items of each row before places of `items.values`, behind padding: (*ends, length) int64.

    ends: (B,) or (B, R).
    """
    places = ends[..., None] + torch.arange(-length, 0, device=items.device)
    starts = items.offsets[:-1].view(-1, *[1] * ends.ndim)
    padded_N = F.pad(items.values.long(), (0, 1), value=padding)
    return padded_N[torch.where(places >= starts, places, len(items.values))]


# ------------------------------------------------------------------------------ the network


class TwoTowers(nn.Module):
    """Histories (N, L) -> logits of all items, (N, I); with their next items, (N,) -> logits (N, G).

    The first N of the G items are the next ones of these histories.
    """

    drawn: Tensor
    """(I + 1,) How often each item was the next one of a user, over all steps and ranks."""

    def __init__(self, n_items: int, options: Workload.Options):
        super().__init__()
        self.n_items, self.options = n_items, options
        dim, hidden = options.dim, options.hidden_dim
        self.items = nn.Embedding(n_items + 1, dim, padding_idx=n_items)  # the last row is the padding
        nn.init.normal_(self.items.weight, std=dim**-0.5)
        # Features of a user or an item, such as an age or a price, are more inputs of its tower.
        self.user_tower = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.place_weights = nn.Parameter(torch.zeros(options.length))  # before the softmax; the most recent one last
        self.dropout = nn.Dropout(options.dropout)
        self.register_buffer("drawn", torch.zeros(n_items + 1, dtype=torch.int64))

    def forward(self, history_NL: Tensor, next_N: Tensor | None = None) -> Tensor:
        user_ND = self.user(history_NL) / self.options.temperature
        if next_N is None:
            return user_ND @ self.item(self.items.weight[: self.n_items]).T
        next_G = gather(next_N)
        logits_NG = (user_ND @ self.item(self.items(next_G)).T).float()
        if self.options.correct_bias:
            logits_NG = logits_NG - self.log_share(next_G)
        # Another draw may be of the same item, which is no wrong answer.
        is_same_NG = next_N[:, None] == next_G
        is_same_NG.fill_diagonal_(False)
        return logits_NG.masked_fill(is_same_NG | (next_G == self.n_items), NEVER)

    def user(self, history_NL: Tensor) -> Tensor:
        """Vectors of users, (N, D): from a plain mean of their items, and from a mean with weights of places."""
        items_NLD = self.dropout(self.items(history_NL))
        is_item_NL = history_NL != self.n_items
        recent_ND = mean(items_NLD, self.place_weights.softmax(0) * is_item_NL)
        both_ND = torch.cat([recent_ND, mean(items_NLD, is_item_NL)], dim=1)
        return F.normalize(recent_ND + self.user_tower(both_ND), dim=1)

    def item(self, embedding_ID: Tensor) -> Tensor:
        """Vectors of items, (I, D)."""
        return F.normalize(embedding_ID + self.item_tower(embedding_ID), dim=1)

    @torch.no_grad()
    def log_share(self, next_G: Tensor) -> Tensor:
        """log q of these items, which are counted first: their share of all that were drawn, (G,)."""
        self.drawn.index_add_(0, next_G, torch.ones_like(next_G))
        return (self.drawn[next_G] / self.drawn[: self.n_items].sum().clamp(min=1)).log()


def mean(items_NLD: Tensor, weights_NL: Tensor) -> Tensor:
    """The weighted mean of the items of each history, (N, D): 0 if it has none."""
    total_N1 = weights_NL.sum(1, keepdim=True).clamp(min=1e-6)
    return (items_NLD * (weights_NL / total_N1)[..., None]).sum(1)


def gather(next_N: Tensor) -> Tensor:
    """The items of all ranks, (G,), beginning with this rank."""
    if not dist.is_initialized():
        return next_N
    parts = [torch.empty_like(next_N) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, next_N.contiguous())
    del parts[dist.get_rank()]
    return torch.cat([next_N, *parts])
