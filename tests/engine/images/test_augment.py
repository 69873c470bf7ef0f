import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import needs_gpu, no_host_sync

from fastgpu.images.augment import (
    cutout,
    mixup,
    random_crop,
    random_flip,
    random_resized_crop,
)


def rng(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng(0))


def boxes_of(n_images: int, height: int, width: int, min_scale: float) -> list[list[int]]:
    """(top, left, bottom, right) of the part of each image that `random_resized_crop` enlarges, as its pixels tell."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    images = torch.stack([y, x]).float().expand(n_images, 2, height, width)
    places = random_resized_crop(images, min_scale, rng()).round().int()
    return torch.cat([places[:, :, 0, 0], places[:, :, -1, -1] + 1], 1).tolist()


def test_crop_against_a_plain_loop():
    x = images(16, 3, 6, 9)
    padding = 2
    out = random_crop(x, padding, rng())
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, 16), generator=rng()).tolist()
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        np.testing.assert_array_equal(out[i].numpy(), padded[i, :, top : top + 6, left : left + 9])
    assert len(set(zip(tops, lefts, strict=True))) > 5


def test_flip_against_a_plain_loop():
    x = images(32, 3, 6, 9)
    out = random_flip(x, rng())
    flips = (torch.rand(32, generator=rng()) < 0.5).tolist()
    for i, is_flipped in enumerate(flips):
        expected = x[i].numpy()
        if is_flipped:
            expected = expected[..., ::-1]
        np.testing.assert_array_equal(out[i].numpy(), expected)
    assert 5 < sum(flips) < 27


@pytest.mark.parametrize("shape", [(40, 3, 12, 17), (40, 1, 8, 8), (5, 3, 1, 1)])
def test_resized_crop_against_a_plain_loop(shape):
    x = images(*shape)
    out = random_resized_crop(x, 0.2, rng())
    for i, (top, left, bottom, right) in enumerate(boxes_of(shape[0], *shape[2:], 0.2)):
        part = x[i : i + 1, :, top:bottom, left:right]
        expected = F.interpolate(part.float(), shape[2:], mode="bilinear", align_corners=False)[0]
        assert (out[i].float() - expected).abs().max() <= 0.51  # half a step of rounding


def test_boxes_have_the_areas_and_aspect_ratios_that_they_should_have():
    top, left, bottom, right = torch.tensor(boxes_of(4000, 100, 100, 0.1)).T
    height, width = bottom - top, right - left
    scale = height * width / 1e4
    ratio = width / height
    assert 0.09 < scale.min() < 0.12
    assert 0.45 < scale.mean() < 0.6
    assert 0.7 < ratio.min() < 0.8 < 1.25 < ratio.max() < 1.4
    assert top.min() == left.min() == 0
    assert bottom.max() == right.max() == 100


def test_cutout_against_a_plain_loop():
    x = images(32, 3, 9, 7)
    size = 4
    out = cutout(x, size, torch.tensor([1, 2, 3], dtype=torch.uint8), rng())
    ys, xs = torch.rand((2, 32), generator=rng()).tolist()
    for i in range(32):
        expected = x[i].numpy().copy()
        top = int(ys[i] * 9) - 2
        left = int(xs[i] * 7) - 2
        square = expected[:, max(0, top) : top + size, max(0, left) : left + size]
        square[:] = np.array([1, 2, 3])[:, None, None]
        np.testing.assert_array_equal(out[i].numpy(), expected)


def test_mixup_blends_images_and_targets_alike():
    x = torch.arange(64, dtype=torch.uint8)[:, None, None, None].expand(64, 1, 2, 2) * 4
    out, target = mixup(x, torch.eye(64), 1.0, rng())
    torch.testing.assert_close(target.sum(1), torch.ones(64))
    expected = target @ torch.arange(64).float() * 4  # the same blend of the numbers
    assert (out[:, 0, 0, 0] - expected).abs().max() <= 0.51
    largest = target.max(1).values
    assert 0.6 < largest.mean() < 0.9  # Beta(1, 1) is uniform: the larger share is 3/4 in the mean
    largest = mixup(x, torch.eye(64), 0.05, rng())[1].max(1).values
    assert (largest > 0.9).float().mean() > 0.7


# ---------------------------------------------------------------------------------------------- other dtypes, masks


def images_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Images of any dtype: integers over their whole range, floats from a normal distribution."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=rng(0)).to(dtype)
    return torch.randint(0, torch.iinfo(dtype).max + 1, shape, generator=rng(0)).to(dtype)


DTYPES = [torch.uint8, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_of_every_dtype_are_moved_as_they_are(dtype):
    x = images_of(dtype, 16, 3, 6, 9)
    fill = x[0, :, 0, 0]
    moves = {
        "crop": lambda x: random_crop(x, 2, rng()),
        "flip": lambda x: random_flip(x, rng()),
        "cutout": lambda x: cutout(x, 4, fill.to(x.dtype), rng()),
    }
    for name, move in moves.items():
        out = move(x)
        assert out.dtype == dtype, name
        assert not torch.equal(out, x), name
        assert torch.equal(out.double(), move(x.double())), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_blended_pixels_of_every_dtype_are_those_of_floats(dtype):
    x = images_of(dtype, 16, 3, 6, 9)
    half_step = 1e-3 if dtype.is_floating_point else 0.52
    blends = {
        "resized": lambda x: random_resized_crop(x, 0.3, rng()),
        "mixup": lambda x: mixup(x, torch.eye(16), 0.4, rng())[0],
    }
    for name, blend in blends.items():
        out = blend(x)
        assert out.dtype == dtype, name
        torch.testing.assert_close(out.float(), blend(x.float()), rtol=1e-3 * dtype.is_floating_point, atol=half_step)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_moves_pixels_of_every_dtype_and_nothing_waits_for_it(dtype):
    x = images_of(dtype, 16, 3, 32, 32).cuda()
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
