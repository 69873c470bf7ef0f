"""Contrastive learning: an encoder learns from images without labels to find the other view of the same image.

Two random views of an image should be near to each other, and far from the keys in a queue: the keys of the last steps
(He et al., "Momentum Contrast", arXiv:1911.05722, with one encoder). The queue is a buffer of the model. Every rank
puts the keys of all ranks into it, so it is the same on all of them, and a checkpoint keeps it.

contrastive.yaml says how to use it. Shapes: B rows of a batch, C H W of an image, D dimensions of a key, Q keys.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.images import augment
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows
from workloads import images


class Workload(workloads.Workload):
    """Trains on `images`, uint8 (N, C, H, W)."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        width: Count = 32
        """Channels of the first stage of the network."""
        key_dim: Count = 64
        """Dimensions of a key."""
        queue: Count = 4096
        """Keys that are remembered: a multiple of data.batch_size."""
        temperature: float = 0.1
        """What the similarities are divided by."""

    options: Options
    best = ("contrast", "higher")
    inputs = ("images",)

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        for source in (train, val):
            field = source.fields.get("images")
            if field is None or field.dtype != "uint8" or len(field.shape) != 3:
                raise UserError(f"{source.name}: images are {field}; allowed is uint8 (N, C, H, W)")
        self.options = options
        self.shape_CHW = train.fields["images"].shape
        image = train.fields["images"]
        self.normalize = partial(images.Normalize, train.attributes, image.shape[0], image.dtype)

    def model(self) -> nn.Module:
        o = self.options
        network = images.resnet(self.shape_CHW, o.key_dim, o.width, 1)
        return Encoder(nn.Sequential(self.normalize(), network), o.key_dim, o.queue)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """Two random views of each image."""
        views = [
            augment.random_flip(augment.random_resized_crop(batch["images"], 0.3, rng), rng)
            for _ in ("first", "second")
        ]
        return Rows(dict(zip(("first", "second"), views, strict=True)))

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Cross-entropy of finding the second view among the keys of the queue."""
        similarity_BQ = model(batch["first"], batch["second"])
        target_B = torch.zeros(len(similarity_BQ), dtype=torch.int64, device=similarity_BQ.device)
        return F.cross_entropy(similarity_BQ / self.options.temperature, target_B)

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """How near an image is to its mirror image, and the sum of the keys."""
        key_BD, mirror_BD = model(batch["images"]), model(batch["images"].flip(-1))
        return {"mirror": (key_BD * mirror_BD).sum(), "keys": key_BD.sum(0)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """`contrast`: the mean similarity of an image and its mirror image, minus the mean of any two images."""
        n = sums["n"]
        mirror, any_two = sums["mirror"] / n, (sums["keys"] / n).square().sum()
        return {"contrast": float(mirror - any_two), "mirror_similarity": float(mirror)}

    def predict(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        """The `key` of each image, (B, D), of length 1."""
        return {"key": model(batch["images"])}

    def card(self) -> dict[str, Any]:
        return {}


class Encoder(nn.Module):
    """Images -> keys of length 1; two views -> their similarity, and their similarities with the keys of the queue."""

    queue: Tensor
    """(Q, D)"""
    place: Tensor
    """Where the next keys go."""

    def __init__(self, network: nn.Module, key_dim: int, size: int):
        super().__init__()
        self.network = network
        self.register_buffer("queue", F.normalize(torch.randn(size, key_dim)))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> keys (B, D); with a second view -> similarities (B, 1 + Q), the second view first."""
        if second is None:
            return F.normalize(self.network(first).float())
        query_BD, key_BD = F.normalize(self.network(torch.cat([first, second])).float()).chunk(2)
        key_BD = key_BD.detach()
        similarity_B1 = (query_BD * key_BD).sum(1, keepdim=True)
        similarity_BQ = torch.cat([similarity_B1, query_BD @ self.queue.T.clone()], dim=1)
        self._remember(key_BD)
        return similarity_BQ

    @torch.no_grad()
    def _remember(self, key_BD: Tensor) -> None:
        """Write the keys of all ranks over the oldest ones."""
        keys = [key_BD]
        if dist.is_initialized():
            keys = [torch.empty_like(key_BD) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, key_BD.contiguous())
        new = torch.cat(keys)
        places = (self.place + torch.arange(len(new), device=new.device)) % len(self.queue)
        self.queue[places] = new
        self.place.add_(len(new)).remainder_(len(self.queue))
