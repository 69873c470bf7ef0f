"""The next item of a user, from the last ones in their order: a transformer that looks back.

Kang and McAuley, "Self-Attentive Sequential Recommendation" (arXiv:1808.09781), with the loss of later work: a softmax
over all items at each place, where the paper tells the next item from one drawn at random. It learns faster and ranks
better (Klenitskiy and Vasilev, arXiv:2309.07602), and costs B x L x I logits: 0.4 GB for 128 users, 50 places and
16,000 items. With many more items, compare the next item with a sample of items, as two_towers.py does.

sasrec.yaml says how to use it. Shapes: B rows of a batch, L places of a sequence, D channels, H heads, I items.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field as Limits
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError, warn
from fastgpu.rows import Dataset, Ragged, Rows
from workloads.recsys import check_items, ranking_means, ranking_sums, unseen

K = 10
"""Recall@K and NDCG@K are measured."""


class Workload(workloads.Workload):
    """Trains on `items`, the items of each user in the order of time. Validation rows also have `held_out`."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        dim: Count = 64
        """Channels."""
        heads: Count = 2
        """Heads of the attention. They share the channels."""
        blocks: Count = 2
        """Blocks of attention and a small network."""
        length: Count = 50
        """Items of a user that the model sees: the last ones."""
        dropout: Annotated[float, Limits(ge=0, lt=1)] = 0.2
        """Share of the channels that are hidden while training."""

    options: Options
    best = (f"ndcg_at_{K}", "higher")
    inputs = ("items",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not items of users in the order of time, or if heads do not divide dim."""
        if options.dim % options.heads:
            raise UserError(f"model.dim is {options.dim}; it should be a multiple of model.heads, {options.heads}")
        self.options = options
        self.n_items = check_items(train, val, in_order=True)
        if n_short := int((train.lengths["items"] < 2).sum()):
            warn(f"{n_short:,} of {len(train):,} users of {train.name} have fewer than 2 items, and train nothing")

    def model(self) -> nn.Module:
        return SASRec(self.n_items, self.options)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy of the next item, over all places that have one."""
        items_BL = last_items(batch["items"], self.options.length + 1, padding=self.n_items)
        logits_BLI = model(items_BL[:, :-1]).float()
        next_BL = items_BL[:, 1:]
        total = F.cross_entropy(logits_BLI.flatten(0, 1), next_BL.flatten(), ignore_index=self.n_items, reduction="sum")
        return total / (next_BL != self.n_items).sum().clamp(min=1)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        scores_BI = self._scores(model, batch["items"])
        return ranking_sums(scores_BI, batch["items"], batch["held_out"], recall_at=(K,), ndcg_at=K)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return ranking_means(sums)

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The `scores` of all items as the next one, (B, I), and -inf for items that the user has."""
        return {"scores": unseen(self._scores(model, batch["items"]), batch["items"])}

    def card(self) -> dict[str, Any]:
        return {"n_items": self.n_items}

    def _scores(self, model: nn.Module, items: Ragged) -> Tensor:
        items_BL = last_items(items, self.options.length, padding=self.n_items)
        last_B = (items.offsets.diff().clamp(1, self.options.length) - 1).long()
        scores_BI: Tensor = model(items_BL, last_B).float()
        return scores_BI


def last_items(items: Ragged, length: int, *, padding: int) -> Tensor:
    """The last `length` items of each row, (B, length) int64, with the padding behind them."""
    ends_B1 = items.offsets[1:, None].long()
    starts_B1 = torch.maximum(items.offsets[:-1, None].long(), ends_B1 - length)
    places_BL = starts_B1 + torch.arange(length, device=items.device)
    padded_N = F.pad(items.values.long(), (0, 1), value=padding)
    return padded_N[torch.where(places_BL < ends_B1, places_BL, len(items.values))]


# ------------------------------------------------------------------------------ the network


class SASRec(nn.Module):
    """Items (B, L) -> logits of the item that follows each, (B, L, I), or that at one place of each row, (B, I)."""

    def __init__(self, n_items: int, options: Workload.Options):
        super().__init__()
        self.n_items = n_items
        # The last row is the padding. The other rows are the weights of the logits, too.
        self.items = nn.Embedding(n_items + 1, options.dim, padding_idx=n_items)
        self.places = nn.Embedding(options.length, options.dim)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.blocks))
        self.norm = nn.LayerNorm(options.dim)
        # An item is a vector of length 1, so the logits begin small. A place is little beside it.
        nn.init.normal_(self.items.weight, std=options.dim**-0.5)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, items_BL: Tensor, last_B: Tensor | None = None) -> Tensor:
        x_BLD = self.dropout(self.items(items_BL) + self.places.weight[: items_BL.shape[1]])
        for block in self.blocks:
            x_BLD = block(x_BLD)
        if last_B is not None:  # the logits of one place are enough to recommend
            x_BLD = x_BLD[torch.arange(x_BLD.shape[0], device=x_BLD.device), last_B]
        logits: Tensor = self.norm(x_BLD) @ self.items.weight[: self.n_items].T
        return logits


class Block(nn.Module):
    """Attention to the places before, and a small network for each place. Both add to their input."""

    def __init__(self, options: Workload.Options):
        super().__init__()
        dim = options.dim
        self.heads, self.drop = options.heads, options.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.mix = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.network = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        # The padding is behind the items, so the causal mask hides it from each of them.
        parts = self.query_key_value(self.norm_1(x_BLD)).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)  # (B, H, L, D / H)
        drop = self.drop if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        x_BLD = x_BLD + self.dropout(self.mix(seen.transpose(1, 2).flatten(2)))
        x_BLD = x_BLD + self.dropout(self.network(self.norm_2(x_BLD)))
        return x_BLD
