"""A forecast: the next steps of a series from the steps before them, beside what a repetition of them would score.

forecast.yaml says how to use it. Shapes: B rows of a batch, T steps that are read, H steps of the forecast, F features.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows

N_SAMPLES = 1000
"""Windows that the standard deviation of the training steps is taken from."""


class Workload(workloads.Workload):
    """Trains on `series`, numbers (N, T + H, F), or (N, T + H) of one feature: T steps to read and H to forecast.

    Errors are in standard deviations of the training steps.
    If the training data has the attribute `feature_names`, predictions have these names.
    """

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        horizon: Count = 24
        """Steps of the forecast. The other steps of a row are read."""
        season: Count = 24
        """Steps after which the series is about the same, such as the hours of a day. Of a baseline."""
        hidden_dim: Count = 128
        """Width of the network."""

    options: Options
    best = ("mse", "lower")
    inputs = ("series",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are no windows of steps, or too short."""
        for source in (train, val):
            series = source.fields.get("series")
            if series is None or series.dtype.kind not in "uif" or len(series.shape) not in (1, 2):
                allowed = "numbers (N, T) or (N, T, F), as data.window: T cuts them from an array (steps, F)"
                raise UserError(f"{source.name}: the field series is {series}; allowed are {allowed}")
            if series.shape[0] < options.horizon + options.season:
                needs = f"a forecast of {options.horizon} steps from a season of {options.season} needs their sum"
                raise UserError(f"{source.name}: data.window is {series.shape[0]}; {needs}, or a smaller model.season")
        self.options = options
        self.n_read = train.fields["series"].shape[0] - options.horizon
        # Validation steps have no part in it. A trained model has no rows, and takes the value of `card`.
        self.std_F = torch.tensor(train.attributes.get("series_std", ()))
        if len(train):
            windows = train[:: len(train) // N_SAMPLES + 1]
            self.std_F = self.steps(windows).flatten(0, 1).double().std(0).clamp(min=1e-6).float()
        names = train.attributes.get("feature_names") or ()
        self.names = names if len(names) == len(self.std_F) else range(len(self.std_F))

    def model(self) -> nn.Module:
        return Forecast(self.n_read, self.options.horizon, self.options.hidden_dim, self.std_F)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        return batch

    def steps(self, rows: Rows) -> Tensor:
        """(B, T + H, F)"""
        series = rows["series"].float()
        return series if series.ndim == 3 else series[:, :, None]

    def cut(self, batch: Rows) -> tuple[Tensor, Tensor]:
        """The steps that are read, (B, T, F), and those to forecast, (B, H, F)."""
        steps = self.steps(batch)
        return steps[:, : self.n_read], steps[:, self.n_read :]

    def errors(self, forecast_BHF: Tensor, future_BHF: Tensor) -> Tensor:
        """(B, H, F), in standard deviations."""
        return (forecast_BHF - future_BHF) / self.std_F.to(future_BHF.device)

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        past_BTF, future_BHF = self.cut(batch)
        return self.errors(model(past_BTF), future_BHF).square().mean()

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """Of the model, and of two baselines: the last value, and the last season, repeated."""
        past_BTF, future_BHF = self.cut(batch)
        steps = torch.arange(self.options.horizon, device=batch.device)
        season = self.options.season
        forecasts = {
            "": model(past_BTF),
            "last_value_": past_BTF[:, -1:],
            "last_season_": past_BTF[:, -season:][:, steps % season],
        }
        sums: dict[str, Tensor] = {}
        for name, forecast in forecasts.items():
            errors = self.errors(forecast, future_BHF)
            sums |= {f"{name}mse": errors.square().mean((1, 2)).sum(), f"{name}mae": errors.abs().mean((1, 2)).sum()}
        return sums

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(total / sums["n"]) for name, total in sums.items() if name != "n"}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """{feature: (B, H)}: the steps that follow each window, from its last T steps."""
        forecast_BHF = model(self.steps(batch)[:, -self.n_read :])
        return {f"forecast_{name}": forecast_BHF[:, :, n] for n, name in enumerate(self.names)}

    def card(self) -> dict[str, Any]:
        return {"series_std": self.std_F.tolist()}


class Forecast(nn.Module):
    """Steps (B, T, F) -> the steps that follow (B, H, F): the last step and what a small network adds to it.

    The same network for each feature, as NLinear of Zeng et al. (2023, "Are Transformers Effective for Time Series
    Forecasting?"), with a hidden layer beside the linear one. It begins as the forecast "the last value".
    """

    std_F: Tensor

    def __init__(self, n_read: int, horizon: int, hidden_dim: int, std_F: Tensor):
        super().__init__()
        self.register_buffer("std_F", std_F)
        self.linear = nn.Linear(n_read, horizon)
        last = nn.Linear(hidden_dim, horizon)
        self.hidden = nn.Sequential(nn.Linear(n_read, hidden_dim), nn.GELU(), last)
        for layer in (self.linear, last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, past_BTF: Tensor) -> Tensor:
        last_B1F = past_BTF[:, -1:]
        change_BFT = ((past_BTF - last_B1F) / self.std_F).transpose(1, 2)
        added_BFH = self.linear(change_BFT) + self.hidden(change_BFT)
        return last_B1F + added_BFH.float().transpose(1, 2) * self.std_F
