"""A small GPT: predicts each token of a text from those before it, as nanoGPT does.

gpt.yaml says how to use it. Shapes: B rows of a batch, T tokens, D width, H heads, C channels of a head, V kinds of
tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows


class Workload(workloads.Workload):
    """Trains on `tokens`, whole numbers (N, T + 1): T tokens to read, each with the next one to predict."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        vocab_size: Count = 256
        """Kinds of tokens: 0 to vocab_size - 1."""
        dim: Count = 64
        """Width of the network."""
        heads: Count = 4
        """Heads of each attention. They divide dim."""
        layers: Count = 2
        """Blocks of the network."""

    options: Options
    best = ("nats_per_token", "lower")
    inputs = ("tokens",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        for source in (train, val):
            tokens = source.fields.get("tokens")
            if tokens is None or tokens.dtype.kind not in "ui" or len(tokens.shape) != 1 or tokens.shape[0] < 2:
                allowed = "whole numbers (N, T), as data.window: T cuts them from an array (steps,)"
                raise UserError(f"{source.name}: the field tokens is {tokens}; allowed are {allowed}")
            seen = source[:: len(source) // 64 + 1]["tokens"].long() if len(source) else torch.zeros(1)
            if not 0 <= seen.min() <= seen.max() < options.vocab_size:
                found = f"{source.name}: tokens are {seen.min()} to {seen.max()}"
                raise UserError(
                    f"{found}, and model.vocab_size is {options.vocab_size}; give the number of their kinds"
                )
        if options.dim % options.heads:
            raise UserError(f"model.dim is {options.dim}; it should be a multiple of model.heads, {options.heads}")
        self.options = options
        self.context = train.fields["tokens"].shape[0] - 1

    def model(self) -> nn.Module:
        return GPT(self.options, self.context)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        return self.nats(model, batch).mean()

    def nats(self, model: nn.Module, batch: Rows) -> Tensor:
        """(B, T): -log of the probability that the model gave to each token after the tokens before it."""
        tokens = batch["tokens"].long()
        logits_BVT = model(tokens[:, :-1]).float().transpose(1, 2)
        return F.cross_entropy(logits_BVT, tokens[:, 1:], reduction="none")

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        targets = batch["tokens"][:, 1:].long().flatten()
        counts_V = torch.bincount(targets, minlength=self.options.vocab_size)
        return {"nats": self.nats(model, batch).mean(1).sum(), "counts": counts_V}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """The score, and the entropy of single tokens: the score of a model that knows only their frequencies."""
        p_V = sums["counts"] / sums["counts"].sum()
        return {
            "nats_per_token": float(sums["nats"] / sums["n"]),
            "baseline_nats_per_token": float(torch.special.entr(p_V).sum()),
        }

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The score of each row. For text, see `GPT.generate`."""
        return {"nats_per_token": self.nats(model, batch).mean(1)}

    def card(self) -> dict[str, Any]:
        return {}


class Block(nn.Module):
    """Attention to the tokens before, and a network for each token: x + f(norm(x)), twice."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(2, (3, self.heads, -1))
        q_BHTC, k_BHTC, v_BHTC = qkv.transpose(1, 3).unbind(2)
        y_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTC.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class GPT(nn.Module):
    """Tokens (B, T) -> logits of the tokens that follow (B, T, V). The embedding is also the last layer."""

    def __init__(self, options: Workload.Options, context: int):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(options.vocab_size, options.dim)
        self.position = nn.Embedding(context, options.dim)
        self.blocks = nn.Sequential(*(Block(options.dim, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.dim)
        # As GPT-2: small weights, and smaller ones where a block adds to its input.
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * options.layers) ** 0.5 if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        return F.linear(self.norm(self.blocks(x_BTD)), self.token.weight)

    @torch.no_grad()
    def generate(self, tokens_BT: Tensor, n_new: int, temperature: float = 0.8) -> Tensor:
        """The tokens and `n_new` more, each drawn by its probability. temperature: the lower, the more likely ones."""
        for _ in range(n_new):
            logits_BV = self(tokens_BT[:, -self.context :])[:, -1] / temperature
            tokens_BT = torch.cat([tokens_BT, torch.multinomial(logits_BV.softmax(1), 1)], 1)
        return tokens_BT
