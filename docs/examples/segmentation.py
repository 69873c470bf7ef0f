"""Segmentation: a class for each pixel of an image, by a compact U-Net of residual blocks.

segmentation.yaml says how to use it.

Shapes: B rows of a batch, C H W of an image, K classes.
"""

from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.images import augment
from fastgpu.images.files import IGNORED_CLASS
from fastgpu.process.config import Count, CountOrZero, Section
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Rows
from fastgpu.training.evaluate import Sum
from workloads import Direction, images


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

    lighter = MappingProxyType({"flip": False, "crop_padding": 0})

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
                    f"(N, H, W), and images as those of {train.name}: {image}"
                )
        self.options = options
        self.dtype = image.dtype
        self.shape_CHW = (1, *image.shape)[-3:]
        self.n_classes = int(train.attributes.get("n_classes", 0))
        if self.n_classes < 2:
            raise UserError(
                f"{train.name}: the attribute n_classes is {self.n_classes}; write the number of classes, at least 2, "
                "without 255, which is ignored"
            )
        self.normalize = images.Normalize(train.attributes, self.shape_CHW[0], image.dtype)

    @property
    def summary(self) -> str:
        C, H, W = self.shape_CHW
        return f"images: {C} x {H} x {W} (channels x height x width), {self.dtype}; masks: {self.n_classes} classes"

    @property
    def metrics(self) -> dict[str, Direction]:
        return {"image_miou_pct": "higher", "pixel_accuracy_pct": "higher", "loss": "lower"}

    def model(self) -> nn.Module:
        """Images as they lie in the file -> logits (B, K, H, W)."""
        return nn.Sequential(self.normalize, UNet(self.shape_CHW, self.n_classes, self.options.width))

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

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Sum]:
        """Loss and accuracy are means over pixels, `image_miou_pct` is a mean over images: of each image, the mean IoU
        of the classes that it has in the mask or in the prediction.
        """
        logits_BKHW = model(batch["images"]).float()
        mask_BHW = batch["masks"].long()
        predicted_BHW = logits_BKHW.argmax(1)
        is_valid_BHW = mask_BHW != IGNORED_CLASS
        is_hit_BHW = predicted_BHW == mask_BHW
        hits_BK = self._count_pixels(mask_BHW, is_hit_BHW)
        in_mask_BK = self._count_pixels(mask_BHW, is_valid_BHW)
        in_prediction_BK = self._count_pixels(predicted_BHW, is_valid_BHW)
        union_BK = in_mask_BK + in_prediction_BK - hits_BK
        n_classes_B = (union_BK > 0).sum(1)
        miou_B = (hits_BK / union_BK.clamp(min=1)).sum(1) / n_classes_B.clamp(min=1)
        n_pixels = is_valid_BHW.sum()
        return {
            "image_miou_pct": Sum(100 * miou_B.sum(), (n_classes_B > 0).sum()),
            "pixel_accuracy_pct": Sum(100 * is_hit_BHW.sum(), n_pixels),
            "loss": Sum(F.cross_entropy(logits_BKHW, mask_BHW, ignore_index=IGNORED_CLASS, reduction="sum"), n_pixels),
        }

    def _count_pixels(self, classes_BHW: Tensor, counts_BHW: Tensor) -> Tensor:
        """Number of the pixels that count in each class, (B, K)."""
        classes = torch.where(counts_BHW, classes_BHW, self.n_classes).flatten(1)
        counted = torch.zeros((len(classes), self.n_classes + 1), dtype=torch.int64, device=classes.device)
        return counted.scatter_add_(1, classes, torch.ones_like(classes))[:, : self.n_classes]

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """{"mask": (B, H, W) uint8, the class of each pixel}."""
        return {"mask": model(batch["images"]).argmax(1).to(torch.uint8)}

    def card(self) -> dict[str, Any]:
        return {"image_shape": list(self.shape_CHW), "n_classes": self.n_classes}


class UNet(nn.Module):
    """Blocks that halve the resolution, and blocks that double it again beside those of the same resolution.

    Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv:1505.04597.
    """

    def __init__(self, shape_CHW: tuple[int, ...], n_classes: int, width: int):
        super().__init__()
        n_channels, height, width_px = shape_CHW
        side = min(height, width_px)
        widths = [width]
        while side >= 2 * images.MIN_SIDE and len(widths) < 5:
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
