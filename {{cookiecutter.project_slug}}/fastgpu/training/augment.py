"""Augmentation on the device: uint8 batches in, uint8 batches out, each row drawn for itself, anew at every call.

Shapes: B rows of a batch, C H W of an image, K classes. Nothing here makes the host wait for the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601: how bright red, green and blue look


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


def random_resized_crop(x_BCHW: Tensor, least_share: float, rng: torch.Generator) -> Tensor:
    """A part of each image, of `least_share` to all of its area and 3:4 to 4:3 of its shape, enlarged to the whole.

    Szegedy et al., "Going Deeper with Convolutions", arXiv:1409.4842. A part that would be longer than the image is cut
    to it.
    """
    return enlarge(x_BCHW, *random_parts(x_BCHW, least_share, rng))


def random_parts(x_BCHW: Tensor, least_share: float, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top_B, left_B, height_B, width_B) of a part of each image, whole pixels as float."""
    B, C, H, W = x_BCHW.shape
    u_4B = torch.rand((4, B), generator=rng, device=x_BCHW.device)
    area_B = least_share + (1 - least_share) * u_4B[0]
    ratio_B = torch.exp((2 * u_4B[1] - 1) * math.log(4 / 3))
    height_B = (H * (area_B / ratio_B).sqrt()).round().clamp(1, H)
    width_B = (W * (area_B * ratio_B).sqrt()).round().clamp(1, W)
    top_B = torch.minimum((u_4B[2] * (H - height_B + 1)).floor(), H - height_B)
    left_B = torch.minimum((u_4B[3] * (W - width_B + 1)).floor(), W - width_B)
    return top_B, left_B, height_B, width_B


def enlarge(x_BCHW: Tensor, top_B: Tensor, left_B: Tensor, height_B: Tensor, width_B: Tensor) -> Tensor:
    """That part of each image, in the size of the whole: bilinear, as torch's interpolate without align_corners."""
    B, C, H, W = x_BCHW.shape
    y_BH, x_BW = _positions(top_B, height_B, H), _positions(left_B, width_B, W)
    grid_BHW2 = torch.empty((B, H, W, 2), device=x_BCHW.device)
    grid_BHW2[..., 0] = (2 * x_BW / max(1, W - 1) - 1)[:, None, :]
    grid_BHW2[..., 1] = (2 * y_BH / max(1, H - 1) - 1)[:, :, None]
    found = F.grid_sample(x_BCHW.float(), grid_BHW2, mode="bilinear", padding_mode="border", align_corners=True)
    return _to_bytes(found)


def _positions(start_B: Tensor, length_B: Tensor, count: int) -> Tensor:
    """(B, count) centres of `count` equal pieces of each length, in pixels, inside of it."""
    centre = torch.arange(count, device=start_B.device) + 0.5
    inside = (centre * (length_B / count)[:, None] - 0.5).clamp(min=0)
    return start_B[:, None] + torch.minimum(inside, length_B[:, None] - 1)


def color_jitter(x_BCHW: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Brightness, then contrast, then saturation of each image times 1 - strength to 1 + strength.

    Contrast is about the mean grey of the image, saturation about the grey of each pixel (of images with 3 channels).
    """
    B, C, H, W = x_BCHW.shape
    factors_3B111 = 1 + strength * (2 * torch.rand((3, B, 1, 1, 1), generator=rng, device=x_BCHW.device) - 1)
    x = (x_BCHW.float() * factors_3B111[0]).clamp(0, 255)
    mean_B111 = _grey(x).mean(dim=(2, 3), keepdim=True)
    x = (mean_B111 + (x - mean_B111) * factors_3B111[1]).clamp(0, 255)
    if C == 3:
        grey_B1HW = _grey(x)
        x = grey_B1HW + (x - grey_B1HW) * factors_3B111[2]
    return _to_bytes(x)


def _grey(x_BCHW: Tensor) -> Tensor:
    if x_BCHW.shape[1] != 3:
        return x_BCHW.mean(1, keepdim=True)
    red, green, blue = x_BCHW.split(1, 1)
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue


def cutout(x_BCHW: Tensor, side: int, fill_C: Tensor, rng: torch.Generator) -> Tensor:
    """A square of `side` pixels about a random pixel of each image is filled; it may reach over the border.

    DeVries and Taylor, arXiv:1708.04552. fill_C: uint8, the mean of each channel.
    """
    B, C, H, W = x_BCHW.shape
    u_2B = torch.rand((2, B), generator=rng, device=x_BCHW.device)
    top_B, left_B = (u_2B[0] * H).floor() - side // 2, (u_2B[1] * W).floor() - side // 2
    y_H, x_W = torch.arange(H, device=x_BCHW.device), torch.arange(W, device=x_BCHW.device)
    rows_BH = (y_H >= top_B[:, None]) & (y_H < top_B[:, None] + side)
    columns_BW = (x_W >= left_B[:, None]) & (x_W < left_B[:, None] + side)
    return torch.where((rows_BH[:, :, None] & columns_BW[:, None, :])[:, None], fill_C.view(1, C, 1, 1), x_BCHW)


def mixup(x_BCHW: Tensor, target_BK: Tensor, alpha: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each row blended with another one of the batch, targets too, by a share from Beta(alpha, alpha).

    Zhang et al., arXiv:1710.09412. target_BK: float.
    """
    B = len(x_BCHW)
    gamma_2B = torch._standard_gamma(torch.full((2, B), alpha, device=x_BCHW.device), generator=rng)
    share_B = gamma_2B[0] / gamma_2B.sum(0).clamp(min=1e-30)
    other_B = torch.randperm(B, generator=rng, device=x_BCHW.device)
    share_B111 = share_B.view(B, 1, 1, 1)
    mixed = x_BCHW * share_B111 + x_BCHW[other_B] * (1 - share_B111)
    return _to_bytes(mixed), target_BK * share_B[:, None] + target_BK[other_B] * (1 - share_B[:, None])


def _to_bytes(x: Tensor) -> Tensor:
    return x.round().clamp(0, 255).to(torch.uint8)
