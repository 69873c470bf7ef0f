"""Classifies images, each into one class of many, with a small ResNet.

attributes.py is for several labels of one image. Shapes: B rows of a batch, C H W of an image, K classes.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field as Limits
from torch import Tensor, nn

import workloads
from fastgpu.images import augment
from fastgpu.images.checks import check_images, check_labels, count_classes
from fastgpu.process.config import CountOrZero, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows


class Workload(workloads.Workload):
    """Trains on `images`, (N, C, H, W) or (N, H, W) of uint8, float16 or float32, and `labels`.

    Labels are the numbers of classes, integers (N,) from 0 on. The training data may have the
    attributes `class_names` or `n_classes`, and `mean` and `std` of each channel, in the units of
    the file.
    """

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        width: Annotated[int, Limits(ge=1, le=4096)] = 32
        """Channels of the first stage. Each later stage doubles them."""
        blocks: Annotated[int, Limits(ge=1, le=1000)] = 1
        """Residual blocks in each stage."""
        timm: str = ""
        """Name of a timm network, such as resnet50, to use instead of the ResNet here."""
        pretrained: bool = False
        """Start with timm's pretrained weights."""
        flip: bool = False
        """Mirror images left-right at random (not for digits or text)."""
        crop_padding: CountOrZero = 1
        """Pad by this many pixels, then crop at random. 0: off."""
        min_crop_scale: Annotated[float, Limits(gt=0, le=1)] = 1.0
        """Resize a random crop of at least this share of the area. Photos: 0.08 to 0.35. 1: off."""
        cutout_size: CountOrZero = 0
        """Side, in pixels, of a random square that is filled with the mean. 0: off."""
        mixup_alpha: Annotated[float, Limits(ge=0)] = 0.0
        """Blend each row with another row, by a share from Beta(mixup_alpha, mixup_alpha). 0: off."""
        label_smoothing: Annotated[float, Limits(ge=0, lt=1)] = 0.0
        """Share of the target that is spread over all classes."""

    options: Options
    best: workloads.Best = ("top1_pct", "higher")
    inputs: tuple[str, ...] = ("images",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        """Raises UserError if the rows are not images with classes, or not alike."""
        check_images(train, val)
        labels = train.fields["labels"]
        if labels.is_ragged or labels.dtype.kind not in "ui" or labels.shape:
            raise UserError(
                f"{train.name}: labels are {labels}; allowed are integers (N,), the class of each image: int(label) in "
                "a Dataset, (N, 1) as labels[:, 0], one-hot rows as labels.argmax(1); 0 and 1 (N, K) are for "
                "workload=attributes, and other numbers for a workload of your own"
            )
        self.set_up(options, train)
        self.n_outputs = count_classes(train)
        for source in (train, val):
            check_labels(source, self.n_outputs - 1, "class_names, n_classes or the labels of data.train")

    def set_up(self, options: Options, train: Dataset) -> None:
        """Set the attributes that depend on options and images. Raises UserError if they do not fit."""
        self.options = options
        images = train.fields["images"]
        self.shape_CHW = (1, *images.shape)[-3:]
        if options.pretrained and not options.timm:
            raise UserError("model.pretrained is true, but only networks of timm have such weights; set model.timm")
        side = min(self.shape_CHW[1:])
        if max(options.crop_padding, options.cutout_size) >= side:
            raise UserError(f"images are {side} pixels high or wide; model.crop_padding and cutout_size should be less")
        # predict.py has no rows, and loads the weights of a checkpoint instead.
        self.is_pretrained = options.pretrained and len(train) > 0
        # normalize() makes a new first layer of a network at each call.
        self.normalize = partial(Normalize, train.attributes, self.shape_CHW[0], images.dtype)
        layer = self.normalize()
        mean_C = (-layer.shift / layer.scale).flatten()
        self.fill_C = augment.to_dtype(mean_C, getattr(torch, images.dtype.name))

    def model(self) -> nn.Module:
        """Unchanged images of the file -> logits (B, K)."""
        o = self.options
        if o.timm:
            network = timm_network(o.timm, self.shape_CHW[0], self.n_outputs, is_pretrained=self.is_pretrained)
        else:
            network = resnet(self.shape_CHW, self.n_outputs, o.width, o.blocks)
        return nn.Sequential(self.normalize(), network)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Augment on the device, in the dtype of the file."""
        o = self.options
        x_BCHW = batch["images"].view(len(batch), -1, *batch["images"].shape[-2:])
        labels = batch["labels"]
        if o.min_crop_scale < 1:
            x_BCHW = augment.random_resized_crop(x_BCHW, o.min_crop_scale, rng)
        if o.crop_padding:
            x_BCHW = augment.random_crop(x_BCHW, o.crop_padding, rng)
        if o.flip:
            x_BCHW = augment.random_flip(x_BCHW, rng)
        if o.cutout_size:
            self.fill_C = self.fill_C.to(x_BCHW.device)  # copied in the first step
            x_BCHW = augment.cutout(x_BCHW, o.cutout_size, self.fill_C, rng)
        if o.mixup_alpha:
            # Labels (B, K), as in attributes.py, are blended directly.
            target_BK = labels if labels.ndim > 1 else F.one_hot(labels.long(), self.n_outputs)
            x_BCHW, labels = augment.mixup(x_BCHW, target_BK.float(), o.mixup_alpha, rng)
        return Rows({"images": x_BCHW, "labels": labels})

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Mean cross-entropy. After mixup, the labels are floats (B, K)."""
        logits_BK = model(batch["images"]).float()
        labels = batch["labels"]
        target = labels if labels.is_floating_point() else labels.long()
        return F.cross_entropy(logits_BK, target, label_smoothing=self.options.label_smoothing)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        logits_BK = model(batch["images"]).float()
        labels_B = batch["labels"].long()
        hits_B5 = logits_BK.topk(min(5, self.n_outputs), dim=1).indices == labels_B[:, None]
        loss = F.cross_entropy(logits_BK, labels_B, reduction="sum")
        return {"top1": hits_B5[:, 0].sum(), "top5": hits_B5.sum(), "loss": loss}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Percentages and the mean loss. top5_pct has a meaning only for more than five classes."""
        mean = {name: float(sums[name] / sums["n"]) for name in ("top1", "top5", "loss")}
        top5 = {"top5_pct": 100 * mean["top5"]} if self.n_outputs > 5 else {}
        return {"top1_pct": 100 * mean["top1"], **top5, "loss": mean["loss"]}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The `probability` of each class, (B, K)."""
        return {"probability": model(batch["images"]).float().softmax(1)}

    def card(self) -> dict[str, Any]:
        return {"n_classes": self.n_outputs}


# ------------------------------------------------------------------------------ the network


class Normalize(nn.Module):
    """(x - mean) / std of each channel, as floats: the first layer of a network for stored images.

    Without the attributes `mean` and `std`, bytes are mapped to -1 to 1 and floats are unchanged.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, attributes: Mapping[str, Any], n_channels: int, dtype: np.dtype):
        """dtype: of the images. Raises UserError if the attributes do not fit the channels."""
        super().__init__()
        defaults = {"mean": 127.5, "std": 127.5} if dtype == np.uint8 else {"mean": 0.0, "std": 1.0}
        values = {}
        for name, default in defaults.items():
            given = attributes.get(name, default)
            value = torch.empty(0)
            with suppress(TypeError, ValueError, RuntimeError):  # for example, it is text
                value = torch.as_tensor(given, dtype=torch.float32).flatten()
            is_finite = bool(value.isfinite().all()) and (name == "mean" or bool((value > 0).all()))
            if len(value) not in (1, n_channels) or not is_finite:
                allowed = f"a number, or one for each of the {n_channels} channels; std is above 0"
                raise UserError(f"the attribute {name} of the images is {given}; allowed is {allowed}")
            values[name] = value.expand(n_channels)
        self.register_buffer("scale", (1 / values["std"]).view(1, -1, 1, 1))
        self.register_buffer("shift", (-values["mean"] / values["std"]).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) or (B, H, W) -> (B, C, H, W)."""
        x_BCHW = x[:, None] if x.ndim == 3 else x
        return x_BCHW * self.scale + self.shift


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., arXiv:1512.03385). The last norm starts at 0."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity(),
                nn.Conv2d(channels_in, channels_out, 1, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(shape_CHW: tuple[int, ...], classes: int, width: int, blocks: int) -> nn.Sequential:
    """Stem, up to four stages of `blocks` blocks, mean over the pixels, linear layer.

    The stem quarters the sides of images of more than 64 pixels. resnet(...)[:-1] gives features.
    """
    channels, *sides = shape_CHW
    side = min(sides)
    is_large = side > 64
    size, stride, padding = (7, 2, 3) if is_large else (3, 1, 1)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, size, stride, padding, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    if is_large:
        layers.append(nn.MaxPool2d(3, 2, 1))
        side //= 4
    features = width
    for stage in range(4):
        if stage and side < 8:  # a half would be less than 4 pixels
            break
        side //= 2 if stage else 1
        for number in range(blocks):
            layers.append(Block(features, width << stage, 2 if stage and number == 0 else 1))
            features = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def timm_network(name: str, channels: int, classes: int, *, is_pretrained: bool) -> nn.Module:
    """A network of timm. Raises UserError if timm is not installed, or has no such network or weights."""
    try:
        create = import_module("timm").create_model
        network: nn.Module = create(name, pretrained=is_pretrained, in_chans=channels, num_classes=classes)
    except (ImportError, RuntimeError, OSError) as error:
        cure = "pip install -c constraints.txt -e '.[timm]', or see timm.list_models()"
        if "torchvision::" in str(error):  # a torchvision for CUDA does not load beside a torch for CPUs
            cure = "torchvision is not from the index of torch: the head of constraints.txt says how to install it"
        raise UserError(f"model.timm is {name}: {error}; {cure}") from None
    return network
