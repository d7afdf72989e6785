from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dml.data import transforms as T
from dml.data.transforms import Transform

SIZE, SIDES = 32, (256, 224)
TRAIN: dict[str, Callable[[], Transform]] = {
    "jitter": lambda: T.jitter(SIZE),
    "shorter_crop": lambda: T.shorter_crop(SIZE, SIDES),
    "pad_crop": lambda: T.pad_crop(SIZE, SIDES),
    "resized_crop": lambda: T.resized_crop(SIZE, SIDES),
    "multires_crop": lambda: T.multires_crop(SIZE),
}
TEST: dict[str, Callable[[], Transform]] = {
    "stretch": lambda: T.stretch(SIZE),
    "centre_crop": lambda: T.centre_crop(SIZE, SIDES),
    "pad_centre_crop": lambda: T.pad_centre_crop(SIZE, SIDES),
}
MEAN = torch.tensor(T.MEAN_COLOUR) / 255


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def plain(width: int, height: int, colour: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def seeded(transform: Transform, image: Image.Image, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return transform(image)


@pytest.mark.parametrize("shape", [(32, 32), (90, 20), (17, 120), (5, 3), (301, 299)])
@pytest.mark.parametrize("name", [*TRAIN, *TEST])
def test_any_picture_becomes_a_square_of_floats(name: str, shape: tuple[int, int]) -> None:
    out = (TRAIN | TEST)[name]()(noise(*shape))
    assert type(out) is Tensor
    assert out.shape == (3, SIZE, SIZE)
    assert out.dtype == torch.float32
    assert 0 <= out.min() < out.max() <= 1


@pytest.mark.parametrize("name", TEST)
def test_testing_draws_nothing(name: str) -> None:
    image = noise(50, 40)
    before = torch.get_rng_state()
    first, second = TEST[name]()(image), TEST[name]()(image)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", TRAIN)
def test_training_follows_torchs_generator(name: str) -> None:
    transform, image = TRAIN[name](), noise(50, 40)
    assert torch.equal(seeded(transform, image, 1), seeded(transform, image, 1))
    assert not torch.equal(seeded(transform, image, 1), seeded(transform, image, 2))


def test_stretch_and_centre_crop_against_pil() -> None:
    image = noise(80, 40)
    by_hand = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR), np.float32) / 255
    np.testing.assert_allclose(T.stretch(SIZE)(image).permute(1, 2, 0), by_hand, atol=1e-6)
    # shorter side 32 * 256 / 224 = 36.6 -> 37, the longer 74; the middle 32 of each
    resized = np.asarray(image.resize((74, 37), Image.Resampling.BILINEAR), np.float32) / 255
    np.testing.assert_allclose(T.centre_crop(SIZE, SIDES)(image).permute(1, 2, 0), resized[2:34, 21:53], atol=1e-6)


def test_pad_crop_keeps_the_aspect_and_pads_with_the_mean_colour() -> None:
    out = T.pad_centre_crop(SIZE, SIDES)(plain(80, 40))
    # longer side 37, the shorter 18 in rows 9..27 of 37; the crop starts at 2
    white = (out == 1).all(0)
    assert white[8:24].all()
    assert torch.allclose(out[:, :6], MEAN[:, None, None].expand(3, 6, SIZE))
    assert torch.allclose(out[:, 27:], MEAN[:, None, None].expand(3, 5, SIZE))


def test_crops_move_and_flip() -> None:
    """A ramp from left to right tells where a crop was taken and whether it was flipped."""
    ramp = Image.fromarray(np.tile(np.arange(74, dtype=np.uint8)[None, :, None], (37, 1, 3)))
    crop = T.shorter_crop(SIZE, SIDES)
    rows = [(seeded(crop, ramp, seed)[0, 0] * 255).round().int() for seed in range(200)]
    starts = {int(min(row[0], row[-1])) for row in rows}
    assert all(torch.equal(row.diff().abs(), torch.ones(31, dtype=torch.int32)) for row in rows)
    assert min(starts) <= 1
    assert max(starts) >= 41  # of 0..42
    assert 70 < sum(int(row[0] > row[-1]) for row in rows) < 130


def test_resized_crop_covers_the_stated_areas() -> None:
    """Two orthogonal ramps measure width and height of the crop."""
    y, x = np.mgrid[0:128, 0:128].astype(np.uint8)
    ramps = Image.fromarray(np.stack([x, y, y], 2))
    crop = T.resized_crop(112, (256, 224))  # shorter side 128: the crop sees the image as it is
    outs = [seeded(crop, ramps, seed) * 255 for seed in range(200)]
    spans = torch.stack([torch.stack([o[0].amax() - o[0].amin() + 1, o[1].amax() - o[1].amin() + 1]) for o in outs])
    area, aspect = spans.prod(1) / 128**2, spans[:, 0] / spans[:, 1]
    assert 0.14 < area.min() < 0.22
    assert 0.9 < area.max() <= 1
    assert 0.72 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.37


def test_multires_crop_scales_as_stated_and_pads_what_lacks() -> None:
    """On a square whose right half is white, the resized side is told by the steepness of a ramp."""
    ramp = Image.fromarray(np.tile(np.arange(0, 200, 2, dtype=np.uint8)[None, :, None], (100, 1, 3)))
    crop = T.multires_crop(100)
    middles = [seeded(crop, ramp, seed)[0, 50, 40:60] * 255 for seed in range(200)]
    sides = torch.tensor([200 / abs(float(m[-1] - m[0]) / 19) for m in middles if (m != T.MEAN_COLOUR[0]).all()])
    assert 78 < sides.min() < 92
    assert 168 < sides.max() < 183
    whites = [seeded(T.multires_crop(100), plain(60, 60), seed) for seed in range(40)]
    padded = [out for out in whites if (out != 1).any()]
    assert 0 < len(padded) < len(whites)
    for out in padded:
        other = out[:, (out != 1).any(0)]
        assert torch.allclose(other, MEAN[:, None].expand_as(other))


def test_jitter_brings_in_edge_pixels_and_no_frame() -> None:
    """A white picture stays white wherever it is moved; a constant fill would show."""
    assert all((seeded(T.jitter(SIZE), plain(40, 40), seed) > 0.99).all() for seed in range(300))


def test_jitter_never_flips() -> None:
    half = np.zeros((SIZE, SIZE, 3), np.uint8)
    half[:, SIZE // 2 :] = 255
    outs = [seeded(T.jitter(SIZE), Image.fromarray(half), seed) for seed in range(100)]
    assert all(out[..., -8:].mean() > out[..., :8].mean() + 0.5 for out in outs)
