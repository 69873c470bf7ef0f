"""Recommends items to users with an autoencoder on sparse rows, variational or denoising.

Liang et al., "Variational Autoencoders for Collaborative Filtering" (WWW 2018, arXiv:1802.05814).
User u is a row x_u of ones at n_u items. Dense rows are never built, on the host or on the device.
Sums over the items i of a user give the same numbers:

    first layer   W^T dropout(x_u / |x_u|) = sum of coin_ui / ((1 - p) sqrt(n_u)) W_i
    loss          -sum_i x_ui log softmax(z_u)_i = n_u logsumexp(z_u) - sum of z_ui

Shapes: B users of a batch, N items of all these users, I items in total, H hidden units, L latent
dimensions, K best-scored items of a user.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field as Limits
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, CountOrZero, Section
from fastgpu.process.launch import UserError, warn
from fastgpu.rows import Dataset, Ragged, Rows

NDCG_AT = 100
RECALL_AT = (20, 50)
MANY_ITEMS = 1_000_000
"""If there are more items, and few of them occur in rows, item numbers are likely ids."""


class Workload(workloads.Workload):
    """Trains on `items`, a CSR matrix of users and items.

    Validation rows also have `held_out`, the items to find.
    """

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        hidden_dim: CountOrZero = 600
        """Width of the hidden layers beside the latent layer. 0: no hidden layers."""
        latent_dim: Count = 200
        """Dimensions of the latent vector of a user."""
        dropout: Annotated[float, Limits(ge=0, lt=1)] = 0.5
        """Share of a user's items that are hidden from the model, drawn again in each step."""
        variational: bool = True
        """true: Mult-VAE. false: Mult-DAE."""
        kl_weight: Annotated[float, Limits(ge=0)] = 0.2
        """Final weight of the divergence from the prior (Mult-VAE)."""
        kl_anneal_steps: CountOrZero = 0
        """Steps (times optim.accumulation_steps) in which kl_weight rises from 0. Paper: 200,000."""

    options: Options
    best: workloads.Best = (f"ndcg_at_{NDCG_AT}", "higher")
    inputs: tuple[str, ...] = ("items",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not items of users, or not of the same items."""
        self.options = options
        self.n_items = check_items(train, val)

    def model(self) -> nn.Module:
        """Items (N,), offsets (B + 1,) -> logits (B, I), penalty."""
        return AutoEncoder(self.n_items, self.options)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Unchanged: dropout is part of the first layer."""
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean negative log-likelihood of the users, plus the penalty of the model."""
        items: Ragged = batch["items"]
        logits_BI, penalty = model(items.values, items.offsets)
        if logits_BI.dtype.itemsize < 4:
            logits_BI = logits_BI.float()
        return multinomial_nll(logits_BI, items) + penalty

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        items: Ragged = batch["items"]
        logits_BI, _ = model(items.values, items.offsets)
        return ranking_sums(logits_BI.float(), items, batch["held_out"], recall_at=RECALL_AT, ndcg_at=NDCG_AT)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return ranking_means(sums)

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The `scores` of all items, (B, I): logits, and -inf for items that the user has."""
        seen: Ragged = batch["items"]
        logits_BI, _ = model(seen.values, seen.offsets)
        return {"scores": unseen(logits_BI.float(), seen)}

    def card(self) -> dict[str, Any]:
        return {"n_items": self.n_items}


# ------------------------------------------------------------------------------ the rows


def check_items(train: Dataset, val: Dataset, *, in_order: bool = False) -> int:
    """The number of items. Raises UserError if the rows are not items of users, or not of the same items.

    in_order: refuse files in which convert.py found no times, because the items of a user are then in no order.
    """
    for source, name in ((train, "items"), (val, "items"), (val, "held_out")):
        field = source.fields.get(name)
        if field is None or not field.n_items:
            has = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
            raise UserError(f"{source.name}: the workload needs {name}, a CSR matrix; data.fields has {has}")
        if field.n_items != train.fields["items"].n_items:
            raise UserError(f"{source.name}: {name} has {field.n_items:,} items; convert it with {train.name}")
    n_items = train.fields["items"].n_items or 0
    if n_items > MANY_ITEMS and 0 < (n_events := int(train.lengths["items"].sum())) < n_items // 10:
        found = f"{train.name}: items are numbers below {n_items:,}, and {n_events:,} of them are in rows"
        raise UserError(f"{found}; number those that occur: np.unique(items, return_inverse=True)[1]")
    if in_order and json.loads(train.attributes.get("events", "{}")).get("columns", [True])[-1] == "":
        cure = "convert it with --columns USER,ITEM,RATING,TIME"
        raise UserError(f"{train.name} has no times, so the items of a user are in no order; {cure}")
    if n_empty := int((val.lengths["held_out"] == 0).sum()):
        warn(f"{n_empty:,} of {len(val):,} users of {val.name} have nothing held out and do not count in metrics")
    return n_items


# ------------------------------------------------------------------------------ the network


class AutoEncoder(nn.Module):
    """Items -> tanh(hidden) -> latent -> tanh(hidden) -> logits.

    hidden_dim=0 leaves out the hidden layers. In training, the variational model (Mult-VAE) samples
    the latent vector; the denoising model (Mult-DAE) has no sampling.
    """

    passes: Tensor
    """Number of training forward passes so far."""

    def __init__(self, n_items: int, options: Workload.Options):
        super().__init__()
        self.options = options
        hidden = options.hidden_dim
        latent = options.latent_dim
        codes = 2 * latent if options.variational else latent
        self.weight_IH = nn.Parameter(torch.empty(n_items, hidden or codes))
        self.bias_H = nn.Parameter(torch.empty(hidden or codes))
        self.encode = nn.Sequential(nn.Tanh(), nn.Linear(hidden, codes)) if hidden else nn.Identity()
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh()) if hidden else nn.Identity()
        self.output = nn.Linear(hidden or latent, n_items)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.normal_(parameter, std=1e-3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, items_N: Tensor, offsets_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, I) and the weighted divergence from the prior, which is 0 for Mult-DAE."""
        code = self.encode(self._first(items_N, offsets_B1))
        if not self.options.variational:
            return self.output(self.decode(torch.tanh(code))), code.new_zeros(())
        mean_BL, log_var_BL = code.chunk(2, 1)
        drawn_BL = mean_BL
        if self.training:
            self.passes += 1
            drawn_BL = mean_BL + torch.exp(0.5 * log_var_BL) * torch.randn_like(mean_BL)
        divergence = -0.5 * (1 + log_var_BL - mean_BL.square() - log_var_BL.exp()).sum(1).mean()
        annealed = (self.passes.to(divergence.dtype) / max(1, self.options.kl_anneal_steps)).clamp(max=1)
        weight = self.options.kl_weight * annealed
        return self.output(self.decode(drawn_BL)), weight * divergence

    def _first(self, items_N: Tensor, offsets_B1: Tensor) -> Tensor:
        """Linear(dropout(normalize(x))) of rows x of 0 and 1, as a weighted sum of rows of W."""
        counts_B = offsets_B1.diff()
        share_B = counts_B.to(self.weight_IH.dtype).rsqrt()
        share_N = share_B.repeat_interleave(counts_B, output_size=items_N.shape[0])
        dropout = self.options.dropout
        if self.training and dropout:
            share_N = share_N * (torch.rand_like(share_N) >= dropout) / (1 - dropout)
        how: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        return self.bias_H + F.embedding_bag(items_N, self.weight_IH, offsets_B1, per_sample_weights=share_N, **how)


def multinomial_nll(logits_BI: Tensor, items: Ragged) -> Tensor:
    """The mean over the rows of -sum of log softmax(logits) over the items of a row."""
    loss: Tensor = _MultinomialNLL.apply(logits_BI, items.rows, items.values, items.offsets.diff())
    return loss


class _MultinomialNLL(torch.autograd.Function):
    """One (B, I) buffer for the gradient is enough; log_softmax and a gather would need three."""

    @staticmethod
    def forward(  # noqa: PLR0917 (torch calls it like this)
        ctx: Any, logits_BI: Tensor, rows_N: Tensor, items_N: Tensor, counts_B: Tensor
    ) -> Tensor:
        at_N = rows_N.long() * logits_BI.shape[1] + items_N
        lse_B = logits_BI.logsumexp(1)
        ctx.save_for_backward(logits_BI, lse_B, at_N, counts_B)
        return ((counts_B * lse_B).sum() - logits_BI.flatten()[at_N].sum()) / len(lse_B)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_BI, lse_B, at_N, counts_B = ctx.saved_tensors
        share = grads[0] / len(lse_B)
        grad_BI = (logits_BI - lse_B[:, None]).exp_().mul_((counts_B * share)[:, None])
        grad_BI.view(-1).index_add_(0, at_N, -share.to(grad_BI.dtype).expand(len(at_N)))
        return grad_BI, None, None, None


# ------------------------------------------------------------------------------ the metrics


class Ranking(NamedTuple):
    """Metrics of each user. They are meaningless for users without held-out items."""

    recall: Mapping[int, Tensor]
    """{k: (B,)}"""
    ndcg: Tensor
    """(B,)"""
    has_held_out: Tensor
    """(B,) bool: whether the user has held-out items."""
    n_lost: Tensor
    """Number of held-out items that are also seen items, or listed twice: they are never found."""


def ranking_sums(
    scores_BI: Tensor, seen: Ragged, held_out: Ragged, *, recall_at: Sequence[int], ndcg_at: int
) -> dict[str, Tensor]:
    """The metrics of `rank` in the form of `score`: sums over the users with held-out items, and their number."""
    ranking = rank(scores_BI, seen, held_out, recall_at=recall_at, ndcg_at=ndcg_at)
    values = {f"ndcg_at_{ndcg_at}": ranking.ndcg}
    values |= {f"recall_at_{k}": ranking.recall[k] for k in recall_at}
    sums = {name: (value_B * ranking.has_held_out).sum() for name, value_B in values.items()}
    return {**sums, "users": ranking.has_held_out.sum(), "lost": ranking.n_lost}


def ranking_means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The means over the users, from `ranking_sums`. Warns of items that can never be found."""
    if sums["lost"]:
        warn(
            f"{sums['lost']:.0f} held-out items are among the items of their user, or twice: these cannot be "
            "found, so the metrics are too low; leave them out"
        )
    return {name: float(value / sums["users"]) for name, value in sums.items() if "_at_" in name}


def unseen(scores_BI: Tensor, seen: Ragged) -> Tensor:
    """The scores, in place, with -inf for the items that a user has."""
    scores_BI[seen.rows, seen.values] = -torch.inf
    return scores_BI


def rank(scores_BI: Tensor, seen: Ragged, held_out: Ragged, *, recall_at: Sequence[int], ndcg_at: int) -> Ranking:
    """Measure how well scores rank the held-out items of each user, without a host sync.

    Only items that the user has not seen are ranked. Hits are held-out items among the k best. For
    a user with h held-out items,

        Recall@k = number of hits / min(k, h)
        NDCG@k   = sum over the hits of 1 / log2(1 + rank) / the same if all h items came first

    seen, held_out: B rows of item numbers, all different within a row. The scores of seen items are
    overwritten.
    """
    # A Python number would be copied to the device, and the host would wait for the copy.
    scores_BI.index_put_((seen.rows, seen.values), scores_BI.new_full((), -torch.inf))
    is_held_out_BI = torch.zeros_like(scores_BI, dtype=torch.bool)
    is_held_out_BI.index_put_((held_out.rows, held_out.values), is_held_out_BI.new_ones(()))
    n_lost = len(held_out.values) - is_held_out_BI.sum() + is_held_out_BI[seen.rows, seen.values].sum()

    n_best = min(scores_BI.shape[1], max((ndcg_at, *recall_at)))
    best_BK = scores_BI.topk(n_best, dim=1).indices
    hits_BK = is_held_out_BI.gather(1, best_BK).to(scores_BI.dtype)
    n_held_out_B = held_out.offsets.diff()
    recall = {k: hits_BK[:, :k].sum(1) / n_held_out_B.clamp(1, k) for k in recall_at}

    ranks = torch.arange(1, ndcg_at + 1, dtype=scores_BI.dtype, device=scores_BI.device)
    gain_K = 1 / (1 + ranks).log2()
    # Sums of the first gains. On a GPU, `cumsum` is an error if run.deterministic=true.
    ideal_K = gain_K.double().expand(ndcg_at, ndcg_at).tril().sum(1).to(gain_K.dtype)
    ideal_B = ideal_K[n_held_out_B.clamp(1, ndcg_at) - 1]
    hits_BK = hits_BK[:, :ndcg_at]
    # A product and a sum, because autocast would round a matrix product.
    ndcg_B = (hits_BK * gain_K[: hits_BK.shape[1]]).sum(1) / ideal_B
    return Ranking(recall, ndcg_B, n_held_out_B > 0, n_lost)
