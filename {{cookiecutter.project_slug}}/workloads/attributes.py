"""Predicts any number of yes-or-no labels of an image, such as the 40 attributes of a face in CelebA.

It uses the network and the augmentation of images.py. Shapes: B rows of a batch, K attributes.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.images.checks import check_images, check_labels
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows
from fastgpu.rows.classes import classes_of
from workloads import images


class Workload(images.Workload):
    """Trains on `images`, in the formats of images.py, and `labels`: integers 0 and 1, (N, K).

    The names of the attributes are the `class_names` of the training data, if it has them.
    """

    best: workloads.Best = ("accuracy_pct", "higher")

    def __init__(self, options: images.Workload.Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not images with attributes, or not alike."""
        check_images(train, val)
        labels = train.fields["labels"]
        if labels.is_ragged or labels.dtype.kind not in "ui" or len(labels.shape) != 1:
            raise UserError(
                f"{train.name}: labels are {labels}; allowed are integers 0 and 1 (N, K), a column for each attribute; "
                "workload=images takes the class of each image, integers (N,)"
            )
        for source in (train, val):
            check_labels(source, 1, "attributes")
        self.set_up(options, train)
        self.n_outputs = labels.shape[0]
        numbered = [f"attribute_{number}" for number in range(self.n_outputs)]
        self.names: list[str] = classes_of(train).get("class_names", numbered)
        if len(self.names) != self.n_outputs:
            counts = f"{len(self.names)} class_names for {self.n_outputs} columns of labels"
            raise UserError(f"{train.name} has {counts}; write one name for each column")

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean binary cross-entropy. After mixup, the labels are floats."""
        logits_BK = model(batch["images"]).float()
        smoothing = self.options.label_smoothing
        target_BK = batch["labels"].float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits_BK, target_BK)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        logits_BK = model(batch["images"]).float()
        target_BK = batch["labels"].float()
        loss = F.binary_cross_entropy_with_logits(logits_BK, target_BK, reduction="sum")
        hits = ((logits_BK > 0) == (target_BK > 0)).sum()
        return {"hits": hits / self.n_outputs, "loss": loss / self.n_outputs}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Means over all attributes of all rows."""
        return {"accuracy_pct": float(100 * sums["hits"] / sums["n"]), "loss": float(sums["loss"] / sums["n"])}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """{name of an attribute: its probability, (B,)}."""
        probability_BK = model(batch["images"]).float().sigmoid()
        return dict(zip(self.names, probability_BK.unbind(1), strict=True))

    def card(self) -> dict[str, Any]:
        return {}
