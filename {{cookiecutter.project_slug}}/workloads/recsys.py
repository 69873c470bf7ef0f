"""What a user likes next, from what they liked before: variational and denoising autoencoders on sparse rows.

Liang et al., "Variational Autoencoders for Collaborative Filtering" (WWW 2018, arXiv:1802.05814). A user u is a row of
ones at n_u items. No dense row is ever built, on the host or on the device, and the numbers are the same:

    first layer   W^T dropout(x_u / |x_u|) = sum over the items i of coin_ui / ((1 - p) sqrt(n_u)) W_i
    loss          -sum_i x_ui log softmax(z_u)_i = n_u logsumexp(z_u) - sum over the items i of z_ui

Shapes: B users of a batch, N items of all of them, I items that there are, H hidden, L latent.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.rows import Ragged, Rows
from fastgpu.training.ranking import rank

RECALL_AT, NDCG_AT = (20, 50), 100


class Workload:
    """Checks that the rows are items of users, and holds what training on them takes.

    train: a store with `items`, a CSR matrix. val: one with `items`, from which those of `held_out` are to be found.
    hidden to kl_anneal_steps: see `recsys` in config.schema.json. Raises UserError for rows of another kind.
    """

    metrics = (f"ndcg_at_{NDCG_AT}", *(f"recall_at_{k}" for k in RECALL_AT))
    best = metrics[0]

    def __init__(
        self,
        train: Source,
        val: Source,
        *,
        hidden: int,
        latent: int,
        dropout: float,
        variational: bool,
        kl_weight: float,
        kl_anneal_steps: int,
    ):
        self.items = _items_of(train, "items", "data.fields")
        for field in ("items", "held_out"):
            if (items := _items_of(val, field, "data.val_fields")) != self.items:
                raise UserError(f"{val.name}: {field} are of {items:,} items, those of {train.name} of {self.items:,}; "
                                "convert them together")  # fmt: skip
        without = int((val.lengths["held_out"] == 0).sum())
        if without == len(val):
            raise UserError(f"{val.name}: no user has anything held out, so nothing can be scored")
        self.note = f"\n{without:,} of {len(val):,} users of {val.name} have nothing held out: no metric counts them"
        self.note = self.note if without else ""
        self.redraws = dropout > 0
        self._make = partial(
            AutoEncoder, self.items, hidden=hidden, latent=latent, dropout=dropout, variational=variational,
            kl_weight=kl_weight, kl_anneal_steps=kl_anneal_steps)  # fmt: skip

    def model(self) -> nn.Module:
        """Items (N,), offsets (B + 1,) -> logits (B, I), penalty."""
        return self._make()

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Nothing: what is dropped is drawn in the first layer, anew each time a row is trained on."""
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean over the users of their negative log-likelihood, and the model's penalty."""
        items: Ragged = batch["items"]
        logits_BI, penalty = model(items.values, items.offsets)
        return multinomial_nll(logits_BI.float() if logits_BI.dtype.itemsize < 4 else logits_BI, items) + penalty

    def score(self, model: nn.Module, batch: Rows) -> tuple[Tensor, list[Tensor]]:
        """How many users count, and of each of `metrics` its sum over them."""
        items: Ragged = batch["items"]
        logits_BI, _ = model(items.values, items.offsets)
        found = rank(logits_BI.float(), items, batch["held_out"], RECALL_AT, NDCG_AT)
        each = (found.ndcg, *(found.recall[k] for k in RECALL_AT))
        return found.counts.sum(), [(metric * found.counts).sum() for metric in each]


def _items_of(rows: Source, name: str, key: str) -> int:
    """How many items the field's are from."""
    field = rows.fields.get(name)
    if field is None:
        raise UserError(f"{key} has {', '.join(rows.fields)}; the recsys workload needs {name} of {rows.name}: "
                        f"add {name}: {name}")  # fmt: skip
    if not field.below:
        raise UserError(f"{rows.name}: {name} is {field}; the recsys workload needs a CSR matrix: `python convert.py`")
    return field.below


# ---------------------------------------------------------------------------------------------- the network


class AutoEncoder(nn.Module):
    """Items -> tanh(hidden) -> latent -> tanh(hidden) -> logits; hidden=0 leaves those layers out.

    variational: the latent vector is drawn around its mean while training (Mult-VAE), else taken as it is (Mult-DAE).
    kl_weight: of the divergence from the prior, reached after `kl_anneal_steps` forward passes of training.
    """

    is_ragged = True  # a batch cannot be cut into equal tensors
    passes: Tensor

    def __init__(
        self,
        items: int,
        *,
        hidden: int,
        latent: int,
        dropout: float,
        variational: bool,
        kl_weight: float,
        kl_anneal_steps: int,
    ):
        super().__init__()
        codes = 2 * latent if variational else latent
        self.weight_IH = nn.Parameter(torch.empty(items, hidden or codes))
        self.bias_H = nn.Parameter(torch.empty(hidden or codes))
        self.encode = nn.Sequential(nn.Tanh(), nn.Linear(hidden, codes)) if hidden else nn.Identity()
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh()) if hidden else nn.Identity()
        self.output = nn.Linear(hidden or latent, items)
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter) if parameter.ndim == 2 else nn.init.normal_(parameter, std=1e-3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.dropout, self.variational = dropout, variational
        self.kl_weight, self.kl_anneal_steps = kl_weight, kl_anneal_steps

    def forward(self, items_N: Tensor, offsets_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, I), and the weighted divergence, which is 0 for what is not variational."""
        code = self.encode(self._first(items_N, offsets_B1))
        if not self.variational:
            return self.output(self.decode(torch.tanh(code))), code.new_zeros(())
        mean_BL, log_var_BL = code.chunk(2, 1)
        drawn_BL = mean_BL
        if self.training:
            self.passes += 1
            drawn_BL = mean_BL + torch.exp(0.5 * log_var_BL) * torch.randn_like(mean_BL)
        divergence = -0.5 * (1 + log_var_BL - mean_BL.square() - log_var_BL.exp()).sum(1).mean()
        weight = self.kl_weight * (self.passes.to(divergence.dtype) / max(1, self.kl_anneal_steps)).clamp(max=1)
        return self.output(self.decode(drawn_BL)), weight * divergence

    def _first(self, items_N: Tensor, offsets_B1: Tensor) -> Tensor:
        """Linear(dropout(normalize(x))) of the 0/1 rows x, as a weighted bag of the weight's rows."""
        counts_B = offsets_B1.diff()
        share_B = counts_B.to(self.weight_IH.dtype).rsqrt()
        share_N = share_B.repeat_interleave(counts_B, output_size=len(items_N))
        if self.training and self.dropout:
            share_N = share_N * (torch.rand_like(share_N) >= self.dropout) / (1 - self.dropout)
        how: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        return self.bias_H + F.embedding_bag(items_N, self.weight_IH, offsets_B1, per_sample_weights=share_N, **how)


def multinomial_nll(logits_BI: Tensor, items: Ragged) -> Tensor:
    """Mean over the rows of -sum over their items of log softmax(logits)."""
    loss: Tensor = _MultinomialNLL.apply(logits_BI, items.rows, items.values, items.offsets.diff())
    return loss


class _MultinomialNLL(torch.autograd.Function):
    """One (B, I) buffer for the gradient, where log_softmax and a gather hold three."""

    @staticmethod
    def forward(ctx: Any, logits_BI: Tensor, rows_N: Tensor, items_N: Tensor, counts_B: Tensor) -> Tensor:
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
