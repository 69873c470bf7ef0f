import pytest
import torch
import torch.nn.functional as F

from fastgpu.images.augment import cutout, mixup, random_crop, random_flip, random_resized_crop
from support.ranks import needs_gpu, no_host_sync


@pytest.fixture(params=[torch.uint8, torch.float16, torch.float32], ids=str)
def dtype(request) -> torch.dtype:
    return request.param


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def images(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=rng()).to(dtype)
    return torch.randint(0, torch.iinfo(dtype).max + 1, shape, generator=rng()).to(dtype)


def check_blend(out: torch.Tensor, dtype: torch.dtype, expected: torch.Tensor) -> None:
    """Fails if these are not the expected floats, rounded as the dtype needs it."""
    assert out.dtype == dtype
    rounding = {torch.uint8: (0.0, 0.51), torch.float16: (1e-3, 1e-3), torch.float32: (1e-5, 2e-5)}
    rtol, atol = rounding[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol)


def test_augment_crop_is_a_plain_loop(dtype):
    x = images(dtype, 16, 3, 6, 9)
    tops, lefts = torch.randint(0, 5, (2, 16), generator=rng()).tolist()
    padded = F.pad(x, (2, 2, 2, 2))
    expected = [image[:, top : top + 6, left : left + 9] for image, top, left in zip(padded, tops, lefts, strict=True)]
    assert torch.equal(random_crop(x, 2, rng()), torch.stack(expected))


def test_augment_flip_is_a_plain_loop(dtype):
    x = images(dtype, 32, 3, 6, 9)
    flips = (torch.rand(32, generator=rng()) < 0.5).tolist()
    expected = [image.flip(2) if is_flipped else image for image, is_flipped in zip(x, flips, strict=True)]
    assert torch.equal(random_flip(x, rng()), torch.stack(expected))


def test_augment_cutout_is_a_plain_loop(dtype):
    x = images(dtype, 32, 3, 9, 7)
    fill = torch.tensor([1, 2, 3], dtype=dtype)
    ys, xs = torch.rand((2, 32), generator=rng()).tolist()
    expected = x.clone()
    for image, y, x_ in zip(expected, ys, xs, strict=True):
        top, left = int(y * 9) - 2, int(x_ * 7) - 2
        image[:, max(0, top) : top + 4, max(0, left) : left + 4] = fill[:, None, None]
    assert torch.equal(cutout(x, 4, fill, rng()), expected)


def boxes_of(n_images: int, height: int, width: int, min_scale: float) -> list[list[int]]:
    """(top, left, bottom, right) of the part of each image that `random_resized_crop` enlarges, as its pixels tell."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = random_resized_crop(torch.stack([y, x]).float().expand(n_images, 2, height, width), min_scale, rng())
    places = places.round().int()
    return torch.cat([places[:, :, 0, 0], places[:, :, -1, -1] + 1], 1).tolist()


@pytest.mark.parametrize("shape", [(40, 3, 12, 17), (40, 1, 8, 8), (5, 3, 1, 1)])
def test_augment_resized_crop_is_a_plain_loop(shape, dtype):
    x = images(dtype, *shape)
    out = random_resized_crop(x, 0.2, rng())
    for i, (top, left, bottom, right) in enumerate(boxes_of(shape[0], *shape[2:], 0.2)):
        part = x[i : i + 1, :, top:bottom, left:right]
        check_blend(out[i], dtype, F.interpolate(part.float(), shape[2:], mode="bilinear", align_corners=False)[0])


def test_augment_resized_crop_areas_and_ratios():
    top, left, bottom, right = torch.tensor(boxes_of(1500, 100, 100, 0.1)).T
    height, width = bottom - top, right - left
    scale = height * width / 1e4
    ratio = width / height
    assert 0.09 < scale.min() < 0.12
    assert 0.45 < scale.mean() < 0.6
    assert 0.7 < ratio.min() < 0.8 < 1.25 < ratio.max() < 1.4
    assert top.min() == left.min() == 0
    assert bottom.max() == right.max() == 100


def test_augment_mixup_blends_images_and_targets_alike(dtype):
    x = images(dtype, 64, 1, 2, 2)
    out, target = mixup(x, torch.eye(64), 1.0, rng())
    torch.testing.assert_close(target.sum(1), torch.ones(64))
    check_blend(out.flatten(1), dtype, target @ x.float().flatten(1))  # the same blend
    largest = target.max(1).values
    assert 0.6 < largest.mean() < 0.9  # Beta(1, 1) is uniform: the larger share is 3/4 in the mean
    largest = mixup(x, torch.eye(64), 0.05, rng())[1].max(1).values
    assert (largest > 0.9).float().mean() > 0.7


@pytest.mark.gpu
@needs_gpu
def test_augment_on_a_gpu_never_waits(dtype):
    x = images(dtype, 16, 3, 32, 32).cuda()
    generator = torch.Generator("cuda")
    fill = torch.zeros(3, dtype=dtype, device="cuda")
    target = torch.eye(16, device="cuda")

    def moved() -> list[torch.Tensor]:
        return [
            random_crop(x, 4, generator),
            random_flip(x, generator),
            random_resized_crop(x, 0.2, generator),
            cutout(x, 8, fill, generator),
            mixup(x, target, 0.2, generator)[0],
        ]

    assert {out.dtype for out in moved()} == {dtype}
    with no_host_sync():
        moved()
