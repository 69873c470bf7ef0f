"""Image classification: one class of many, or any number of attributes. A compact residual network for any (C, H, W).

Shapes: B rows of a batch, C H W of an image, K classes or attributes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field as Limits
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, CountOrZero, Section, Share
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.rows import Rows
from fastgpu.training import augment
from fastgpu.training.evaluate import Sum
from workloads import Direction

MIN_SIDE = 4
"""Stages of the network halve the image until its shorter side has this many pixels."""


class Workload(workloads.Workload):
    """Trains on `images`, uint8 (N, C, H, W), and `labels`: integers (N,) from 0 on, or 0 and 1 (N, K).

    The attributes `class_names`, `mean` and `std` (of each channel, 0 to 255) of the training data are used if they
    exist.
    """

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        width: Count = 32
        """Channels of the first stage. Each later stage doubles them."""
        blocks: Count = 1
        """Residual blocks in each stage."""
        flip: bool = False
        """Mirror images left-right at random (not for digits or text)."""
        crop_padding: CountOrZero = 1
        """Pad by this many pixels, then crop at random. 0: off."""
        min_crop_scale: Annotated[float, Limits(gt=0, le=1)] = 1.0
        """Enlarge a random part of at least this share of the area (0.08 to 0.35 for photographs). 1: off."""
        color_jitter: Share = 0.0
        """Multiply brightness, contrast and saturation by 1 - color_jitter to 1 + color_jitter. 0: off."""
        cutout_size: CountOrZero = 0
        """Side of a random square that is filled with the mean, in pixels. 0: off."""
        mixup_alpha: Annotated[float, Limits(ge=0)] = 0.0
        """Blend each row with another one by a share drawn from Beta(mixup_alpha, mixup_alpha). 0: off."""
        label_smoothing: Annotated[float, Limits(ge=0, lt=1)] = 0.0
        """Share of the target that is spread over all classes."""

    top = 1
    lighter = MappingProxyType(
        {
            "flip": False,
            "crop_padding": 0,
            "min_crop_scale": 1.0,
            "color_jitter": 0.0,
            "cutout_size": 0,
            "mixup_alpha": 0.0,
        }
    )

    def __init__(self, options: Options, train: Source, val: Source):
        """Raises UserError if the rows are not images with labels, or if validation rows are of another kind."""
        for source in (train, val):
            _check_fields(source)
        _check_same(train, val, "images")
        _check_same(train, val, "labels")
        self.options = options
        self.shape_CHW = train.fields["images"].shape
        self.class_names = [str(name) for name in train.attributes.get("class_names") or []]
        self.has_attributes = bool(train.fields["labels"].shape)  # any number of K attributes, instead of one class
        if self.has_attributes:
            self.n_classes = train.fields["labels"].shape[0]
        else:
            n_classes = int(train.attributes.get("n_classes", 0))
            self.n_classes = len(self.class_names) or n_classes or _count_classes(train)
        for source in (train, val):
            _check_labels(source, 1 if self.has_attributes else self.n_classes - 1)
        self._normalize = Normalize(train.attributes, self.shape_CHW[0])

    @property
    def metrics(self) -> dict[str, Direction]:
        if self.has_attributes:
            return {"accuracy_pct": "higher", "loss": "lower"}
        return {"top1_pct": "higher", "top5_pct": "higher", "loss": "lower"}

    @property
    def is_random(self) -> bool:
        o = self.options
        has_crop = o.crop_padding > 0 or o.min_crop_scale < 1
        return o.flip or has_crop or o.color_jitter > 0 or o.cutout_size > 0 or o.mixup_alpha > 0

    def model(self) -> nn.Module:
        """uint8 (B, C, H, W) -> logits (B, K)."""
        network = ResNet(self.shape_CHW, self.n_classes, self.options.width, self.options.blocks)
        return nn.Sequential(self._normalize, network)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Augment on the device, in uint8."""
        o = self.options
        x_BCHW = batch["images"]
        labels = batch["labels"]
        if o.min_crop_scale < 1:
            x_BCHW = augment.random_resized_crop(x_BCHW, o.min_crop_scale, rng)
        if o.crop_padding:
            x_BCHW = augment.random_crop(x_BCHW, o.crop_padding, rng)
        if o.flip:
            x_BCHW = augment.random_flip(x_BCHW, rng)
        if o.color_jitter:
            x_BCHW = augment.color_jitter(x_BCHW, o.color_jitter, rng)
        if o.cutout_size:
            x_BCHW = augment.cutout(x_BCHW, o.cutout_size, self._normalize.mean_bytes, rng)
        if o.mixup_alpha:
            one_hot = labels if self.has_attributes else F.one_hot(labels.long(), self.n_classes)
            x_BCHW, labels = augment.mixup(x_BCHW, one_hot.float(), o.mixup_alpha, rng)
        return Rows({"images": x_BCHW, "labels": labels})

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy of the batch; for attributes, the mean over them, too. Labels may be floats (B, K)."""
        logits_BK = model(batch["images"]).float()
        labels = batch["labels"]
        smoothing = self.options.label_smoothing
        if self.has_attributes:
            target_BK = labels.float() * (1 - smoothing) + smoothing / 2
            return F.binary_cross_entropy_with_logits(logits_BK, target_BK)
        target = labels if labels.is_floating_point() else labels.long()
        return F.cross_entropy(logits_BK, target, label_smoothing=smoothing)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Sum]:
        logits_BK = model(batch["images"]).float()
        labels = batch["labels"]
        n = len(batch)
        if self.has_attributes:
            loss = F.binary_cross_entropy_with_logits(logits_BK, labels.float(), reduction="sum") / self.n_classes
            hits = ((logits_BK > 0) == (labels > 0)).sum() / self.n_classes
            return {"accuracy_pct": Sum(100 * hits, n), "loss": Sum(loss, n)}
        labels_B = labels.long()
        hits_B5 = logits_BK.topk(min(5, self.n_classes), dim=1).indices == labels_B[:, None]
        loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
        return {
            "top1_pct": Sum(100 * hits_B5[:, 0].sum(), n),
            "top5_pct": Sum(100 * hits_B5.sum(), n),
            "loss": Sum(loss, n),
        }

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """`class` and its `probability`, (B,), or (B, top) if `top` is above 1; for attributes the probability of each,
        by its name."""
        logits_BK = model(batch["images"]).float()
        if self.has_attributes:
            names = self.class_names or [f"attribute_{number}" for number in range(self.n_classes)]
            return dict(zip(names, logits_BK.sigmoid().unbind(1), strict=True))
        best = logits_BK.softmax(1).topk(min(self.top, self.n_classes), dim=1)
        if self.top == 1:
            return {"class": best.indices[:, 0], "probability": best.values[:, 0]}
        return {"class": best.indices, "probability": best.values}

    def card(self) -> dict[str, Any]:
        return {
            "image_shape": list(self.shape_CHW),
            "n_classes": self.n_classes,
            "class_names": self.class_names,
            "has_attributes": self.has_attributes,
            "scale": self._normalize.scale.flatten().tolist(),
            "shift": self._normalize.shift.flatten().tolist(),
        }


# ---------------------------------------------------------------------------------------------- checks of the rows


def _check_fields(source: Source) -> None:
    images = source.fields.get("images")
    labels = source.fields.get("labels")
    if images is None or labels is None:
        raise UserError(f"data.fields has {', '.join(source.fields)}; the images workload needs images and labels")
    if images.dtype != "uint8" or len(images.shape) != 3:
        shape = ("N", *images.shape)
        raise UserError(f"{source.name}: images are {images.dtype} {shape}; allowed is uint8 (N, C, H, W)")
    if labels.dtype.kind not in "ui" or len(labels.shape) > 1:
        shape = ("N", *labels.shape)
        raise UserError(f"{source.name}: labels are {labels.dtype} {shape}; allowed are integers (N,), or (N, K)")


def _check_same(train: Source, val: Source, name: str) -> None:
    if val.fields[name].shape != train.fields[name].shape:
        val_shape = ("N", *val.fields[name].shape)
        train_shape = ("N", *train.fields[name].shape)
        raise UserError(f"{val.name}: {name} are {val_shape}, those of {train.name} are {train_shape}")


def _count_classes(source: Source) -> int:
    try:
        return int(source.column("labels").max()) + 1
    except KeyError:
        raise UserError(f"{source.name}: give the Dataset `class_names`, or its `labels` as an array") from None


def _check_labels(source: Source, highest: int) -> None:
    """Check the range of the labels, if they are in memory."""
    try:
        labels = source.column("labels")
    except KeyError:
        return
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high > highest:
        raise UserError(f"{source.name}: labels run from {low} to {high}; allowed are 0 to {highest}")


# ---------------------------------------------------------------------------------------------- the network


class Normalize(nn.Module):
    """uint8 -> float, (x - mean) / std of each channel. It is part of the model, so a checkpoint takes raw images."""

    scale: Tensor
    shift: Tensor

    def __init__(self, attributes: Mapping[str, Any], channels: int):
        super().__init__()
        mean = torch.as_tensor(attributes.get("mean", 127.5), dtype=torch.float32).expand(channels)
        std = torch.as_tensor(attributes.get("std", 127.5), dtype=torch.float32).expand(channels)
        self.register_buffer("scale", (1 / std).view(1, -1, 1, 1))
        self.register_buffer("shift", (-mean / std).view(1, -1, 1, 1))

    @property
    def mean_bytes(self) -> Tensor:
        """(C,) uint8: the color that becomes 0."""
        return (-self.shift / self.scale).round().to(torch.uint8).flatten()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW * self.scale + self.shift


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., arXiv:1512.03385). The second norm is initialised with zeros."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity(),
                nn.Conv2d(channels_in, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Stem, up to four stages, mean over the pixels, linear layer. The stem quarters images of more than 64 pixels."""

    def __init__(self, shape_CHW: tuple[int, ...], classes: int, width: int, blocks: int):
        channels, height, width_px = shape_CHW
        side, stride = min(height, width_px), 1 if min(height, width_px) <= 64 else 2
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3 if stride == 1 else 7, stride, 1 if stride == 1 else 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        if stride == 2:
            layers.append(nn.MaxPool2d(3, 2, 1))
            side //= 4
        features = width
        for stage in range(4):
            halve = stage > 0
            if halve and side < 2 * MIN_SIDE:
                break
            side //= 2 if halve else 1
            for block in range(blocks):
                layers.append(Block(features, width << stage, 2 if halve and block == 0 else 1))
                features = width << stage
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))
