"""Image classification, one class of many or any of many attributes: a compact residual network for any (C, H, W).

Shapes: B rows of a batch, C H W of an image, K classes or attributes.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.rows import Rows
from fastgpu.training import augment

SMALLEST_SIDE = 4  # stages halve the image down to this


class Workload:
    """Checks that the rows are images with labels, and holds what training on them takes.

    train, val: stores with `images`, uint8 (N, C, H, W), and `labels`: integers (N,) from 0 on, or 0 and 1 (N, K). The
    attributes `class_names`, `mean` and `std` (a channel, 0..255) of the training data are used where they exist.
    flip to mixup: see `augment` in config.yaml. Raises UserError for rows of another kind.
    """

    def __init__(
        self,
        train: Source,
        val: Source,
        *,
        width: int,
        blocks: int,
        flip: bool,
        crop_pad: int,
        crop_share: float,
        jitter: float,
        cutout: int,
        mixup: float,
        label_smoothing: float,
    ):
        for store in (train, val):
            _check(store)
        if val.fields["images"] != train.fields["images"]:
            raise UserError(f"{val.name}: images are {val.fields['images'].shape}, those of {train.name} are "
                            f"{train.fields['images'].shape}")  # fmt: skip
        if val.fields["labels"].shape != train.fields["labels"].shape:
            raise UserError(f"{val.name}: labels are {('N', *val.fields['labels'].shape)}, those of {train.name} are "
                            f"{('N', *train.fields['labels'].shape)}")  # fmt: skip
        names = train.attributes.get("class_names")
        self.many = bool(train.fields["labels"].shape)  # attributes, of which any number may be there
        self.classes = train.fields["labels"].shape[0] if self.many else len(names) if names else _range(train)[1] + 1
        highest = 1 if self.many else self.classes - 1
        for store in (train, val):
            low, high = _range(store) if not store.in_workers else (0, 0)
            if low < 0 or high > highest:
                raise UserError(f"{store.name}: labels run from {low} to {high}; allowed are 0 to {highest}")
        self.metrics = ("loss", "accuracy_pct") if self.many else ("loss", "top1_pct", "top5_pct")
        self.best = self.metrics[1]  # its highest value makes the best checkpoint
        self.note = ""
        """What a person should know of the rows."""
        self.shape_CHW = train.fields["images"].shape
        self._normalize = Normalize(train.attributes, self.shape_CHW[0])
        self.redraws = flip or crop_pad > 0 or crop_share < 1 or jitter > 0 or cutout > 0 or mixup > 0
        """Whether `transform` makes a row look different each time."""
        self._width, self._blocks, self._smoothing = width, blocks, label_smoothing
        self._flip, self._crop_pad, self._crop_share = flip, crop_pad, crop_share
        self._jitter, self._cutout, self._mixup = jitter, cutout, mixup

    def model(self) -> nn.Module:
        """uint8 (B, C, H, W) -> logits (B, K)."""
        return nn.Sequential(self._normalize, ResNet(self.shape_CHW, self.classes, self._width, self._blocks))

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Augment on the device, still as bytes; drawn anew at each call, so also each time a row is echoed."""
        x_BCHW, labels = batch["images"], batch["labels"]
        if self._crop_share < 1:
            x_BCHW = augment.random_resized_crop(x_BCHW, self._crop_share, rng)
        if self._crop_pad:
            x_BCHW = augment.random_crop(x_BCHW, self._crop_pad, rng)
        if self._flip:
            x_BCHW = augment.random_flip(x_BCHW, rng)
        if self._jitter:
            x_BCHW = augment.jitter(x_BCHW, self._jitter, rng)
        if self._cutout:
            x_BCHW = augment.cutout(x_BCHW, self._cutout, self._normalize.mean_bytes, rng)
        if self._mixup:
            target_BK = labels.float() if self.many else F.one_hot(labels.long(), self.classes).float()
            x_BCHW, labels = augment.mixup(x_BCHW, target_BK, self._mixup, rng)
        return Rows({"images": x_BCHW, "labels": labels})

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy of the batch; of attributes, the mean over them too. Labels may be shares (B, K)."""
        logits_BK, labels = model(batch["images"]).float(), batch["labels"]
        if self.many:
            target_BK = labels.float() * (1 - self._smoothing) + self._smoothing / 2
            return F.binary_cross_entropy_with_logits(logits_BK, target_BK)
        target = labels if labels.is_floating_point() else labels.long()
        return F.cross_entropy(logits_BK, target, label_smoothing=self._smoothing)

    def score(self, model: nn.Module, batch: Rows) -> tuple[int, list[Tensor]]:
        """The number of rows, and of each of `metrics` its sum over them."""
        logits_BK, labels = model(batch["images"]).float(), batch["labels"]
        if self.many:
            loss = F.binary_cross_entropy_with_logits(logits_BK, labels.float(), reduction="sum") / self.classes
            return len(batch), [loss, 100 * ((logits_BK > 0) == (labels > 0)).sum() / self.classes]
        labels_B = labels.long()
        hits_B5 = logits_BK.topk(min(5, self.classes), dim=1).indices == labels_B[:, None]
        loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
        return len(batch), [loss, 100 * hits_B5[:, 0].sum(), 100 * hits_B5.sum()]


def _range(store: Source) -> tuple[int, int]:
    try:
        labels = store.column("labels")
    except KeyError:
        raise UserError(f"{store.name}: give the Dataset `class_names`, or its `labels` as an array") from None
    return int(labels.min()), int(labels.max())


def _check(store: Source) -> None:
    images, labels = store.fields.get("images"), store.fields.get("labels")
    if images is None or labels is None:
        raise UserError(f"data.fields has {', '.join(store.fields)}; the images workload needs images and labels")
    if images.dtype != "uint8" or len(images.shape) != 3:
        raise UserError(
            f"{store.name}: images are {images.dtype} {('N', *images.shape)}; allowed is uint8 (N, C, H, W)"
        )
    if labels.dtype.kind not in "ui" or len(labels.shape) > 1:
        raise UserError(
            f"{store.name}: labels are {labels.dtype} {('N', *labels.shape)}; allowed are integers (N,), or (N, K)"
        )


class Normalize(nn.Module):
    """uint8 -> float, (x - mean) / std a channel. In the model, so that a checkpoint takes raw images."""

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
        """(C,) uint8: what becomes 0."""
        return (-self.shift / self.scale).round().to(torch.uint8).flatten()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return x_BCHW * self.scale + self.shift


# ---------------------------------------------------------------------------------------------- the network


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., arXiv:1512.03385); the second norm starts at zero."""

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
    """Stem, up to four stages, mean over pixels, linear. The stem quarters images of over 64 pixels."""

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
            if halve and side < 2 * SMALLEST_SIDE:
                break
            side //= 2 if halve else 1
            for block in range(blocks):
                layers.append(Block(features, width << stage, 2 if halve and block == 0 else 1))
                features = width << stage
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))
