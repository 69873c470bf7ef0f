"""The smallest workload, to copy: a network with one hidden layer predicts numbers from numbers.

data:
  fields: {x: x, y: y}        # datasets of the file: predict y, (N,) or (N, K), from x, (N, ...)
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows


class Workload(workloads.Workload):
    """Regression by a small network. See the protocol in workloads/__init__.py."""

    class Options(Section):
        """Settings, read from the section `model` of config.yaml."""

        hidden_dim: Count = 64
        """Width of the hidden layer."""

    options: Options
    best: workloads.Best = ("mse", "lower")
    inputs: tuple[str, ...] = ("x",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        for source in (train, val):
            if not {"x", "y"} <= source.fields.keys():
                raise UserError(f"{source.name}: data.fields has {', '.join(source.fields)}; it needs x and y")
        self.options = options
        self.n_inputs = int(torch.Size(train.fields["x"].shape).numel())
        self.n_outputs = int(torch.Size(train.fields["y"].shape).numel())

    def model(self) -> nn.Module:
        hidden_dim = self.options.hidden_dim
        return nn.Sequential(nn.Linear(self.n_inputs, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, self.n_outputs))

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        return batch

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        prediction = self.predict(model, batch)["prediction"]
        return nn.functional.mse_loss(prediction, batch["y"].float().view_as(prediction))

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        return {"mse": self.loss(model, batch) * len(batch)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"mse": float(sums["mse"] / sums["n"])}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        prediction = model(batch["x"].reshape(len(batch), -1).float()).float()
        return {"prediction": prediction.flatten() if self.n_outputs == 1 else prediction}

    def card(self) -> dict[str, int]:
        return {"inputs": self.n_inputs, "outputs": self.n_outputs}
