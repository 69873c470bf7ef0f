"""A generative adversarial network: a generator makes images from noise, and a critic tells them from real images.

gan.yaml says how to use it. The two train in turn, each with an optimizer of its own: gan.diff changes train.py for it.

Shapes: B rows of a batch, C H W of an image, L dimensions of the noise.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workloads
from fastgpu.process.config import Count, Section
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows


class Workload(workloads.Workload):
    """Trains on `images`, uint8 (N, C, H, W); H and W are multiples of 4."""

    class Options(Section):
        """Settings of this workload: the section `model` of config.yaml."""

        width: Count = 32
        """Channels of the layers at half of the resolution."""
        noise_dim: Count = 32
        """Dimensions of the noise."""

    options: Options
    best = ("critic_accuracy_pct", "lower")

    def __init__(self, options: Options, train: Dataset, val: Dataset):
        for source in (train, val):
            images = source.fields.get("images")
            if (
                images is None
                or images.dtype != "uint8"
                or len(images.shape) != 3
                or any(n % 4 for n in images.shape[1:])
            ):
                raise UserError(
                    f"{source.name}: images are {images}; allowed is uint8 (N, C, H, W), H and W multiples of 4"
                )
        self.options = options
        self.shape_CHW = train.fields["images"].shape

    def model(self) -> nn.Module:
        return Gan(self.shape_CHW, self.options.width, self.options.noise_dim)

    def transform(self, batch: Rows, rng: torch.Generator) -> Rows:
        """The images, and noise for both steps."""
        noise = torch.randn(len(batch), self.options.noise_dim, generator=rng, device=batch.device)
        return Rows({"images": batch["images"], "noise": noise})

    def loss(self, model: nn.Module, batch: Rows, part: str = "critic") -> Tensor:
        """Of the critic: images count as 1, made ones as 0. Of the generator: the critic should take them for 1."""
        real_B, made_B = model(batch["images"], batch["noise"], part)
        if part == "generator":
            return F.softplus(-made_B).mean()
        return F.softplus(-real_B).mean() + F.softplus(made_B).mean()

    def score(self, model: nn.Module, batch: Rows) -> dict[str, Tensor]:
        rng = torch.Generator(batch.device).manual_seed(0)  # the same noise for each batch
        noise = torch.randn(len(batch), self.options.noise_dim, generator=rng, device=batch.device)
        real_B, made_B = model(batch["images"], noise, "critic")
        return {"hits": (real_B > 0).sum() + (made_B <= 0).sum()}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """50 % is what a critic reaches that cannot tell them apart."""
        return {"critic_accuracy_pct": float(50 * sums["hits"] / sums["n"])}

    def card(self) -> dict[str, Any]:
        return {"image_shape": list(self.shape_CHW)}


class Gan(nn.Module):
    """Both networks in one module, so that DDP and the checkpoint hold both."""

    def __init__(self, shape_CHW: tuple[int, ...], width: int, noise_dim: int):
        super().__init__()
        channels, height, width_px = shape_CHW
        small = (2 * width, height // 4, width_px // 4)
        self.generator = nn.Sequential(
            nn.Linear(noise_dim, small[0] * small[1] * small[2]),
            nn.Unflatten(1, small),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(small[0] * small[1] * small[2], 1),
        )

    def forward(self, images: Tensor, noise_BL: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W) and noise -> logits of the images and of the made ones, (B,). Trains one part."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and part == "generator"):
            made_BCHW = self.generator(noise_BL)
        if part == "generator":
            made_B = self.critic(made_BCHW)[:, 0].float()
            return made_B, made_B
        both = torch.cat([images / 127.5 - 1, made_BCHW])
        real_B, made_B = self.critic(both)[:, 0].float().chunk(2)
        return real_B, made_B
