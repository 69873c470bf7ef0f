"""Next token: a recurrent network predicts the next letter from the letters before it.

letters.yaml says how to use it. Shapes: B rows of a batch, T letters of a row, V kinds of letters.
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

N_LETTERS = 256


class Workload(workloads.Workload):
    """Trains on `text`, uint8 (N, T)."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        dim: Count = 64
        """Width of the network."""

    options: Options
    best = ("loss", "lower")
    inputs = ("text",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        for source in (train, val):
            text = source.fields.get("text")
            if text is None or text.dtype != "uint8" or len(text.shape) != 1:
                raise UserError(f"{source.name}: the field text is {text}; allowed is uint8 (N, T)")
        self.options = options

    def model(self) -> nn.Module:
        return Letters(self.options.dim)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        text_BT = batch["text"].long()
        logits_BTV = model(text_BT[:, :-1]).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), text_BT[:, 1:].flatten())

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch) * len(batch)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(sums["loss"] / sums["n"])}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        return {"next": model(batch["text"].long())[:, -1].argmax(1)}

    def card(self) -> dict[str, Any]:
        return {}


class Letters(nn.Module):
    """Letters (B, T) -> logits of the letters that follow (B, T, V)."""

    def __init__(self, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(N_LETTERS, dim)
        self.memory = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, N_LETTERS)

    def forward(self, text_BT: Tensor) -> Tensor:
        logits: Tensor = self.head(self.memory(self.embedding(text_BT))[0])
        return logits
