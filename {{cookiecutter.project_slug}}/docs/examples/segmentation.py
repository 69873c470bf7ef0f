"""Segmentation: a class for each pixel of an image, by a compact U-Net of residual blocks.

segmentation.yaml says how to use it.

Shapes: B rows of a batch, C H W of an image, K classes.
"""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.images import augment
from fastgpu.process.config import Count, CountOrZero, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows
from workloads import images

IGNORED_CLASS = 255
"""Pixels of a mask that have no class, as convert.py writes them."""


class Workload(workloads.Workload):
    """Trains on `images`, as the workload `images` takes them, and `masks`: uint8 (N, H, W), the class of each pixel.

    Mask pixels of 255 count neither in the loss nor in the metrics. The training data has the attribute `n_classes`, as
    convert.py writes it, and if it has `mean` and `std` of each channel, they are used.
    """

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        width: Count = 16
        """Channels of the network at full resolution. Each time the resolution is halved they double."""
        flip: bool = True
        """Mirror images and masks left-right at random."""
        crop_padding: CountOrZero = 4
        """Pad by this many pixels, which are ignored in the mask, then crop at random. 0: off."""

    options: Options
    best = ("miou_pct", "higher")
    inputs = ("images",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not images with masks, or if validation rows are of another kind."""
        if not {"images", "masks"} <= train.fields.keys() & val.fields.keys():
            raise UserError(f"data.fields has {', '.join(train.fields)}; this workload needs images and masks")
        image = train.fields["images"]
        for source in (train, val):
            mask = source.fields["masks"]
            if mask.dtype != "uint8" or mask.shape != image.shape[-2:] or source.fields["images"] != image:
                raise UserError(
                    f"{source.name}: masks are {mask}, images {source.fields['images']}; allowed are masks of uint8 "
                    f"(N, H, W), and images as in {train.name}: {image}"
                )
        self.options = options
        self.shape_CHW = (1, *image.shape)[-3:]
        self.n_classes = int(train.attributes.get("n_classes", 0))
        if self.n_classes < 2:
            raise UserError(
                f"{train.name}: the attribute n_classes is {self.n_classes}; write the number of classes, at least 2, "
                "without 255, which is ignored (masks of 0 and 255 alone: convert.py images --binary-masks)"
            )
        self.normalize = partial(images.Normalize, train.attributes, self.shape_CHW[0], image.dtype)

    def model(self) -> nn.Module:
        """Images as they lie in the file -> logits (B, K, H, W)."""
        return nn.Sequential(self.normalize(), UNet(self.shape_CHW, self.n_classes, self.options.width))

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Move each image and its mask alike."""
        o = self.options
        x_BCHW = batch["images"].view(-1, *self.shape_CHW)
        mask_B1HW = batch["masks"][:, None] + 1  # 255 becomes 0, and crops are padded by 0
        both = torch.cat([x_BCHW, mask_B1HW.to(x_BCHW.dtype)], dim=1)
        if o.crop_padding:
            both = augment.random_crop(both, o.crop_padding, rng)
        if o.flip:
            both = augment.random_flip(both, rng)
        return Rows({"images": both[:, :-1], "masks": both[:, -1].to(torch.uint8) - 1})

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy of the pixels that are not ignored."""
        mask_BHW = batch["masks"].long()
        total = F.cross_entropy(model(batch["images"]).float(), mask_BHW, ignore_index=IGNORED_CLASS, reduction="sum")
        return total / (mask_BHW != IGNORED_CLASS).sum().clamp(min=1)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """Pixels of each class in the mask and in the prediction, a confusion matrix (K, K), and the loss."""
        logits_BKHW = model(batch["images"]).float()
        mask_BHW = batch["masks"].long()
        is_valid_BHW = mask_BHW != IGNORED_CLASS
        cells = torch.where(is_valid_BHW, mask_BHW * self.n_classes + logits_BKHW.argmax(1), self.n_classes**2)
        counts = torch.zeros(self.n_classes**2 + 1, dtype=torch.float64, device=cells.device)
        counts.scatter_add_(0, cells.flatten(), counts.new_ones(cells.numel()))
        loss = F.cross_entropy(logits_BKHW, mask_BHW, ignore_index=IGNORED_CLASS, reduction="sum")
        return {"confusion": counts[:-1].view(self.n_classes, self.n_classes), "loss": loss}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`miou_pct` is the mean IoU of the classes that are in a mask or in a prediction, over all pixels."""
        confusion = sums["confusion"]
        hits_K = confusion.diag()
        union_K = confusion.sum(0) + confusion.sum(1) - hits_K
        n_pixels = confusion.sum()
        return {
            "miou_pct": float(100 * (hits_K / union_K)[union_K > 0].mean()),
            "pixel_accuracy_pct": float(100 * hits_K.sum() / n_pixels),
            "loss": float(sums["loss"] / n_pixels),
        }

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """{"mask": (B, H, W) uint8, the class of each pixel}."""
        return {"mask": model(batch["images"]).argmax(1).to(torch.uint8)}

    def card(self) -> dict[str, Any]:
        return {"image_shape": list(self.shape_CHW), "n_classes": self.n_classes}


class UNet(nn.Module):
    """Blocks that halve the resolution, and blocks that double it again beside the blocks of the same resolution.

    Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv:1505.04597.
    """

    def __init__(self, shape_CHW: tuple[int, ...], n_classes: int, width: int):
        super().__init__()
        n_channels, height, width_px = shape_CHW
        side = min(height, width_px)
        widths = [width]
        while side >= 8 and len(widths) < 5:
            side //= 2
            widths.append(2 * widths[-1])
        pairs = list(pairwise(widths))
        self.stem = images.Block(n_channels, width, 1)
        self.down = nn.ModuleList(images.Block(fine, coarse, 2) for fine, coarse in pairs)
        self.up = nn.ModuleList(images.Block(coarse + fine, fine, 1) for fine, coarse in reversed(pairs))
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Floats (B, C, H, W) -> logits (B, K, H, W)."""
        x = self.stem(x)
        finer = []
        for block in self.down:
            finer.append(x)
            x = block(x)
        for block, skip in zip(self.up, reversed(finer), strict=True):
            x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)
