"""Image classification: a compact residual network for any (C, H, W).

Shapes: B rows of a batch, C H W of an image, K classes.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgpu.launch import UserError
from fastgpu.rows import Dense, Source

SMALLEST_SIDE = 4  # stages halve the image down to this


class Workload:
    """Checks that the rows are images with labels, and holds what training on them takes.

    train, val: stores with `images`, uint8 (N, C, H, W), and `labels`, integers (N,) from 0 on. The attributes
    `class_names`, `mean` and `std` (a channel, 0..255) of the training data are used where they exist.
    Raises UserError for rows of another kind.
    """

    metrics = ("loss", "top1_pct", "top5_pct")
    best = "top1_pct"  # its highest value makes the best checkpoint

    def __init__(self, train: Source, val: Source, *, width: int, blocks: int, flip: bool, crop_pad: int):
        for store in (train, val):
            _check(store)
        if val.fields["images"] != train.fields["images"]:
            raise UserError(f"{val.name}: images are {val.fields['images'].shape}, those of {train.name} are "
                            f"{train.fields['images'].shape}")  # fmt: skip
        names = train.attributes.get("class_names")
        self.classes = len(names) if names else _label_range(train)[1] + 1
        for store in (train, val):
            low, high = _label_range(store) if not store.in_workers else (0, 0)
            if low < 0 or high >= self.classes:
                raise UserError(f"{store.name}: labels run from {low} to {high}; allowed are 0 to {self.classes - 1}")
        self.shape_CHW = train.fields["images"].shape
        self._normalize = Normalize(train.attributes, self.shape_CHW[0])
        self.redraws = flip or crop_pad > 0  # whether `transform` makes a row look different each time
        self._width, self._blocks, self._flip, self._crop_pad = width, blocks, flip, crop_pad

    def model(self) -> nn.Module:
        """uint8 (B, C, H, W) -> logits (B, K)."""
        return nn.Sequential(self._normalize, ResNet(self.shape_CHW, self.classes, self._width, self._blocks))

    def transform(self, batch: Dense, rng: torch.Generator) -> Dense:
        """Augment on the device, still as bytes; drawn anew at each call, so also each time a row is echoed."""
        x_BCHW = batch["images"]
        if self._crop_pad:
            x_BCHW = random_crop(x_BCHW, self._crop_pad, rng)
        if self._flip:
            x_BCHW = random_flip(x_BCHW, rng)
        return Dense({"images": x_BCHW, "labels": batch["labels"]})

    def loss(self, model: nn.Module, batch: Dense) -> Tensor:
        """Mean cross-entropy of the batch."""
        return F.cross_entropy(model(batch["images"]).float(), batch["labels"].long())

    def score(self, model: nn.Module, batch: Dense) -> list[Tensor]:
        """For each of `metrics` its sum over the batch's rows; divided by the number of rows it is the metric."""
        logits_BK, labels_B = model(batch["images"]).float(), batch["labels"].long()
        hits_B5 = logits_BK.topk(min(5, self.classes), dim=1).indices == labels_B[:, None]
        return [F.cross_entropy(logits_BK, labels_B, reduction="sum"), 100 * hits_B5[:, 0].sum(), 100 * hits_B5.sum()]


def _label_range(store: Source) -> tuple[int, int]:
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
    if labels.dtype.kind not in "ui" or labels.shape:
        raise UserError(f"{store.name}: labels are {labels.dtype} {('N', *labels.shape)}; allowed are integers (N,)")


# ---------------------------------------------------------------------------------------------- on the device


def random_crop(x_BCHW: Tensor, pad: int, rng: torch.Generator) -> Tensor:
    """Each image shifted by up to `pad` pixels either way, zeros outside: a crop of the zero-padded image."""
    B, C, H, W = x_BCHW.shape
    padded = F.pad(x_BCHW, (pad, pad, pad, pad))
    top_B, left_B = torch.randint(0, 2 * pad + 1, (2, B), generator=rng, device=x_BCHW.device)
    rows_BH = top_B[:, None] + torch.arange(H, device=x_BCHW.device)
    columns_BW = left_B[:, None] + torch.arange(W, device=x_BCHW.device)
    batch_B = torch.arange(B, device=x_BCHW.device)
    return padded.permute(0, 2, 3, 1)[batch_B[:, None, None], rows_BH[:, :, None], columns_BW[:, None, :]].permute(
        0, 3, 1, 2
    )


def random_flip(x_BCHW: Tensor, rng: torch.Generator) -> Tensor:
    """Each image mirrored left-right with probability 1/2."""
    flip_B = torch.rand(len(x_BCHW), generator=rng, device=x_BCHW.device) < 0.5
    return torch.where(flip_B[:, None, None, None], x_BCHW.flip(3), x_BCHW)


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
