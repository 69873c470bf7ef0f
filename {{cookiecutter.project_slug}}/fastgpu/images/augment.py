"""Random augmentation of image batches on the device, with new random numbers for each image.

Images are uint8, float16 or float32 and keep their dtype; uint8 is rounded. `rng` is a generator on the device of the
images. Nothing here makes the host wait for the device. Shapes: B rows of a batch, C H W of an image, K classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cutout", "mixup", "random_crop", "random_flip", "random_resized_crop", "to_dtype"]


def random_crop(x_BCHW: Tensor, padding: int, rng: torch.Generator) -> Tensor:
    """Pad each image with zeros on every side, then crop it to its original size at a random place."""
    B, C, H, W = x_BCHW.shape
    device = x_BCHW.device
    padded_BCHW = F.pad(x_BCHW, (padding, padding, padding, padding))
    top_B, left_B = torch.randint(0, 2 * padding + 1, (2, B), generator=rng, device=device)
    rows_BH = top_B[:, None] + torch.arange(H, device=device)
    columns_BW = left_B[:, None] + torch.arange(W, device=device)
    batch_B = torch.arange(B, device=device)
    padded_BHWC = padded_BCHW.permute(0, 2, 3, 1)
    cropped_BHWC = padded_BHWC[batch_B[:, None, None], rows_BH[:, :, None], columns_BW[:, None, :]]
    return cropped_BHWC.permute(0, 3, 1, 2)


def random_flip(x_BCHW: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image left-right with probability 1/2."""
    is_flipped_B = torch.rand(len(x_BCHW), generator=rng, device=x_BCHW.device) < 0.5
    return torch.where(is_flipped_B[:, None, None, None], x_BCHW.flip(3), x_BCHW)


def random_resized_crop(x_BCHW: Tensor, min_scale: float, rng: torch.Generator) -> Tensor:
    """Take a random crop of each image and resize it to the size of the image.

    The crop has `min_scale` to 1 of the area and an aspect ratio of 3:4 to 4:3, but is never longer than the image
    (Szegedy et al., arXiv:1409.4842). The pixels equal torch's bilinear `interpolate` with align_corners=False.
    """
    B, C, H, W = x_BCHW.shape
    u_4B = torch.rand((4, B), generator=rng, device=x_BCHW.device)
    area_B = min_scale + (1 - min_scale) * u_4B[0]
    ratio_B = torch.exp((2 * u_4B[1] - 1) * math.log(4 / 3))
    y_BH = _sample_positions((H * (area_B / ratio_B).sqrt()).round().clamp(1, H), u_4B[2], H)
    x_BW = _sample_positions((W * (area_B * ratio_B).sqrt()).round().clamp(1, W), u_4B[3], W)
    # grid_sample takes positions from -1, the first pixel, to 1, the last pixel.
    grid_BHW2 = torch.empty((B, H, W, 2), device=x_BCHW.device)
    grid_BHW2[..., 0] = (2 * x_BW / max(1, W - 1) - 1)[:, None, :]
    grid_BHW2[..., 1] = (2 * y_BH / max(1, H - 1) - 1)[:, :, None]
    resized = F.grid_sample(x_BCHW.float(), grid_BHW2, mode="bilinear", padding_mode="border", align_corners=True)
    return to_dtype(resized, x_BCHW.dtype)


def _sample_positions(length_B: Tensor, u_B: Tensor, count: int) -> Tensor:
    """(B, count) positions of `count` equally wide samples over `length_B` pixels, in pixels. u_B, in [0, 1), chooses
    where they start."""
    start_B = torch.minimum((u_B * (count - length_B + 1)).floor(), count - length_B)
    centers = torch.arange(count, device=length_B.device) + 0.5
    offsets_BN = (centers * (length_B / count)[:, None] - 0.5).clamp(min=0)
    return start_B[:, None] + torch.minimum(offsets_BN, length_B[:, None] - 1)


def cutout(x_BCHW: Tensor, size: int, fill_C: Tensor, rng: torch.Generator) -> Tensor:
    """Fill a square with sides of `size` pixels around a random pixel of each image, cut off at the border.

    fill_C: in the dtype of the images, usually their mean. DeVries and Taylor, arXiv:1708.04552.
    """
    B, C, H, W = x_BCHW.shape
    device = x_BCHW.device
    u_2B = torch.rand((2, B), generator=rng, device=device)
    top_B = (u_2B[0] * H).floor() - size // 2
    left_B = (u_2B[1] * W).floor() - size // 2
    y_H = torch.arange(H, device=device)
    x_W = torch.arange(W, device=device)
    in_rows_BH = (y_H >= top_B[:, None]) & (y_H < top_B[:, None] + size)
    in_columns_BW = (x_W >= left_B[:, None]) & (x_W < left_B[:, None] + size)
    is_filled_BHW = in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
    return torch.where(is_filled_BHW[:, None], fill_C.view(1, C, 1, 1), x_BCHW)


def mixup(x_BCHW: Tensor, target_BK: Tensor, alpha: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blend each image and its target with another image of the batch. The share of the first image is drawn from
    Beta(alpha, alpha). target_BK: floats. Zhang et al., "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412.
    """
    B = len(x_BCHW)
    device = x_BCHW.device
    # A Beta variable is g1 / (g1 + g2) of two Gamma variables. torch.distributions takes no generator.
    gamma_2B = torch._standard_gamma(torch.full((2, B), alpha, device=device), generator=rng)
    share_B = gamma_2B[0] / gamma_2B.sum(0).clamp(min=1e-30)
    partner_B = torch.randperm(B, generator=rng, device=device)
    share_B111 = share_B.view(B, 1, 1, 1)
    mixed = x_BCHW * share_B111 + x_BCHW[partner_B] * (1 - share_B111)
    mixed_target_BK = target_BK * share_B[:, None] + target_BK[partner_B] * (1 - share_B[:, None])
    return to_dtype(mixed, x_BCHW.dtype), mixed_target_BK


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floats to a dtype of images. For an integer dtype, values are rounded and clamped."""
    if dtype.is_floating_point:
        return x.to(dtype)
    return x.round().clamp(0, torch.iinfo(dtype).max).to(dtype)
