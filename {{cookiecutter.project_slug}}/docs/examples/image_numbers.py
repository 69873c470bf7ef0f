"""Regression: numbers that are predicted from an image, by the network and the augmentation of the workload `images`.

image_numbers.yaml says how to use it. Shapes: B rows of a batch, K numbers of a row.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from fastgpu.images.checks import check_images
from fastgpu.process.launch import UserError, warn
from fastgpu.rows import Dataset, Rows
from workloads import images

FAR = 10.0
"""Numbers whose mean or standard deviation is above this train badly as they are."""


class Workload(images.Workload):
    """Trains on `images`, as the workload `images` takes them, and `labels`: floats (N,) or (N, K).

    If the training data has the attribute `target_names`, predictions have these names.
    """

    best = ("mse", "lower")

    def __init__(self, options: images.Workload.Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not images with numbers, or if validation rows are of another kind."""
        check_images(train, val)
        labels = train.fields["labels"]
        if labels.is_ragged or labels.dtype.kind != "f" or len(labels.shape) > 1:
            raise UserError(f"{train.name}: labels are {labels}; allowed are floats, (N,) or (N, K)")
        for source in (train, val):
            values = source.stored_column("labels")
            if values is not None and not np.isfinite(values).all():
                rows = np.unique(np.argwhere(~np.isfinite(values))[:, 0])
                raise UserError(
                    f"{source.name}: labels are NaN or infinite in {len(rows):,} rows, first in row {rows[0]}; leave "
                    "them out"
                )
            if values is not None and max(abs(values.mean(0)).max(), values.std(0).max()) > FAR:
                warn(f"{source.name}: labels are far from 0; they train better as (labels - mean) / std")
        if options.label_smoothing:
            raise UserError(
                f"model.label_smoothing is {options.label_smoothing}, but labels are no classes; allowed is 0"
            )
        self.set_up(options, train)
        self.names = [str(name) for name in train.attributes.get("target_names") or []]
        self.n_outputs = labels.shape[0] if labels.shape else 1

    def transform(self, batch: Rows, rng: Any) -> Rows:
        """Augment on the device; the labels become (B, K), which mixup blends as they are."""
        labels_BK = batch["labels"].view(-1, self.n_outputs)
        return super().transform(Rows({"images": batch["images"], "labels": labels_BK}), rng)

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean squared error of the batch and its numbers."""
        prediction_BK = model(batch["images"]).float()
        return F.mse_loss(prediction_BK, batch["labels"].float().view_as(prediction_BK))

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        prediction_BK = model(batch["images"]).float()
        error_BK = prediction_BK - batch["labels"].float().view_as(prediction_BK)
        return {"mse": error_BK.square().mean(1).sum(), "mae": error_BK.abs().mean(1).sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(sums[name] / sums["n"]) for name in ("mse", "mae")}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """Each number by its name, or the `prediction`, (B,) or (B, K)."""
        prediction_BK = model(batch["images"]).float()
        if len(self.names) == self.n_outputs:
            return dict(zip(self.names, prediction_BK.unbind(1), strict=True))
        return {"prediction": prediction_BK[:, 0] if self.n_outputs == 1 else prediction_BK}

    def card(self) -> dict[str, Any]:
        return {}
