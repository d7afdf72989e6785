from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from dml.data.transforms import MEAN_COLOUR, PadSquare, Transform, check_transform, scaled, transform_of
from dml.errors import UserError
from tests.components import transform

SIZE, SIDES = 32, (256, 224)
TRAIN: dict[str, Callable[[], Transform]] = {
    "jitter": lambda: transform("plain", "train", SIZE),
    "shorter_crop": lambda: transform("shorter_crop", "train", SIZE),
    "pad_crop": lambda: transform("pad_crop", "train", SIZE),
    "resized_crop": lambda: transform("resized_crop", "train", SIZE),
    "multires_crop": lambda: transform("multires_crop", "train", SIZE),
    "strong": lambda: transform("strong", "train", SIZE),
}
TEST: dict[str, Callable[[], Transform]] = {
    "stretch": lambda: transform("plain", "test", SIZE),
    "centre_crop": lambda: transform("shorter_crop", "test", SIZE),
    "pad_centre_crop": lambda: transform("pad_crop", "test", SIZE),
}
MEAN = torch.tensor(MEAN_COLOUR) / 255


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def plain(width: int, height: int, colour: tuple[int, int, int] = (255, 255, 255)) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def seeded(made: Transform, image: Image.Image, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return made(image)


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
    made, image = TRAIN[name](), noise(50, 40)
    assert torch.equal(seeded(made, image, 1), seeded(made, image, 1))
    assert not torch.equal(seeded(made, image, 1), seeded(made, image, 2))


def test_stretch_and_centre_crop_against_pil() -> None:
    image = noise(80, 40)
    by_hand = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR), np.float32) / 255
    np.testing.assert_allclose(TEST["stretch"]()(image).permute(1, 2, 0), by_hand, atol=1e-6)
    # shorter side 32 * 256 / 224 = 36.6 -> 37, the longer 74; the middle 32 of each
    resized = np.asarray(image.resize((74, 37), Image.Resampling.BILINEAR), np.float32) / 255
    np.testing.assert_allclose(TEST["centre_crop"]()(image).permute(1, 2, 0), resized[2:34, 21:53], atol=1e-6)


def test_pad_crop_keeps_the_aspect_and_pads_with_the_mean_colour() -> None:
    out = TEST["pad_centre_crop"]()(plain(80, 40))
    # longer side 37, the shorter 18 in rows 9..27 of 37; the crop starts at 2
    white = (out == 1).all(0)
    assert white[8:24].all()
    assert torch.allclose(out[:, :6], MEAN[:, None, None].expand(3, 6, SIZE))
    assert torch.allclose(out[:, 27:], MEAN[:, None, None].expand(3, 5, SIZE))


def test_crops_move_and_flip() -> None:
    """A ramp from left to right tells where a crop was taken and whether it was flipped."""
    ramp = Image.fromarray(np.tile(np.arange(74, dtype=np.uint8)[None, :, None], (37, 1, 3)))
    crop = TRAIN["shorter_crop"]()
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
    crop = transform("resized_crop", "train", 112, SIDES)  # shorter side 128: the crop sees the image as it is
    outs = [seeded(crop, ramps, seed) * 255 for seed in range(200)]
    spans = torch.stack([torch.stack([o[0].amax() - o[0].amin() + 1, o[1].amax() - o[1].amin() + 1]) for o in outs])
    area, aspect = spans.prod(1) / 128**2, spans[:, 0] / spans[:, 1]
    assert 0.14 < area.min() < 0.22
    assert 0.9 < area.max() <= 1
    assert 0.72 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.37


@pytest.mark.slow
def test_multires_crop_scales_as_stated_and_pads_what_lacks() -> None:
    """On a square whose right half is white, the resized side is told by the steepness of a ramp."""
    ramp = Image.fromarray(np.tile(np.arange(0, 200, 2, dtype=np.uint8)[None, :, None], (100, 1, 3)))
    crop = transform("multires_crop", "train", 100)
    middles = [seeded(crop, ramp, seed)[0, 50, 40:60] * 255 for seed in range(200)]
    sides = torch.tensor([200 / abs(float(m[-1] - m[0]) / 19) for m in middles if (m != MEAN_COLOUR[0]).all()])
    assert 78 < sides.min() < 92
    assert 168 < sides.max() < 183
    whites = [seeded(transform("multires_crop", "train", 100), plain(60, 60), seed) for seed in range(40)]
    padded = [out for out in whites if (out != 1).any()]
    assert 0 < len(padded) < len(whites)
    for out in padded:
        other = out[:, (out != 1).any(0)]
        assert torch.allclose(other, MEAN[:, None].expand_as(other))


@pytest.mark.slow
def test_jitter_brings_in_edge_pixels_and_no_frame() -> None:
    """A white picture stays white wherever it is moved; a constant fill would show."""
    assert all((seeded(TRAIN["jitter"](), plain(40, 40), seed) > 0.99).all() for seed in range(300))


@pytest.mark.slow
def test_jitter_never_flips() -> None:
    half = np.zeros((SIZE, SIZE, 3), np.uint8)
    half[:, SIZE // 2 :] = 255
    outs = [seeded(TRAIN["jitter"](), Image.fromarray(half), seed) for seed in range(100)]
    assert all(out[..., -8:].mean() > out[..., :8].mean() + 0.5 for out in outs)


def written_out(name: str, size: int) -> list[Any]:
    """What each file of conf/transform is for training, without its helpers."""
    before, flip = round(size * 256 / 224), v2.RandomHorizontalFlip()
    stretch, bilinear = v2.Resize((size, size)), v2.InterpolationMode.BILINEAR
    move = v2.RandomAffine(degrees=10, translate=(0.06, 0.06), scale=(0.85, 1.15), interpolation=bilinear)
    resize = v2.RandomResize(round(0.8 * size), round(1.8 * size) + 1)
    padded = v2.RandomCrop(size, pad_if_needed=True, fill=list(MEAN_COLOUR))
    area = v2.RandomResizedCrop(size, scale=(0.16, 1.0), ratio=(3 / 4, 4 / 3))
    return {
        "plain": [stretch, v2.Pad(size // 3, padding_mode="edge"), move, v2.CenterCrop(size)],
        "unchanged": [stretch],
        "shorter_crop": [v2.Resize(before), v2.RandomCrop(size), flip],
        "pad_crop": [PadSquare(before), v2.RandomCrop(size), flip],
        "resized_crop": [v2.Resize(round(size * 256 / 227)), area, flip],
        "multires_crop": [resize, padded, flip],
    }[name]


@pytest.mark.parametrize("name", ["plain", "unchanged", "shorter_crop", "pad_crop", "resized_crop", "multires_crop"])
@pytest.mark.parametrize("size", [28, 64, 227])
def test_the_operations_in_the_files_have_the_pixels_of_those_written_out(name: str, size: int) -> None:
    made = transform(name, "train", size)
    for seed, shape in enumerate([(90, 20), (17, 120), (301, 299), (64, 64)]):
        image = noise(*shape)
        torch.manual_seed(seed)
        expected = scaled(v2.functional.pil_to_tensor(v2.Compose(written_out(name, size))(image)))
        assert torch.equal(seeded(made, image, seed), expected)


def test_a_step_is_changed_added_and_left_out_by_name() -> None:
    steps = OmegaConf.create({"resize": {"_target_": f"{v2.__name__}.Resize", "size": [8, 8]}, "flip": None})
    steps.erase = {"_target_": f"{v2.__name__}.RandomErasing", "p": 1.0, "value": [124, 116, 104]}
    made = transform_of(steps)
    assert [type(step) for step in (made.first, *made.moves)] == [v2.Resize, v2.RandomErasing]
    erased = made.pixels(plain(8, 8)) == torch.tensor(MEAN_COLOUR)[:, None, None]
    assert erased.all(0).any()


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([v2.RandomCrop(64)], r"transform\.train cannot be applied to a picture of .*: Required crop size"),
        ([v2.Resize((32, 31))], r"transform\.train makes torch\.uint8 of shape \[3, 32, 31\]"),
        ([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32)], r"makes torch\.float32 .* leave conversion"),
        ([v2.Resize((32, 32)), v2.Normalize([0.5], [0.5])], r"transform\.train cannot be applied to"),
        ([v2.RandomResizedCrop(32)], r"transform\.train is random"),
    ],
)
def test_what_makes_no_images_is_told(steps: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_transform(Transform(*steps), 32, "transform.train", draws=False)


def test_interpolations_are_given_as_modes() -> None:
    """Some versions of torchvision refuse their names when an operation is made, others an unknown name in its use."""
    step = {"_target_": "torchvision.transforms.v2.RandomAffine", "degrees": 1.0, "interpolation": "bilinear"}
    (made,) = transform_of(OmegaConf.create({"move": step})).moves
    assert made.interpolation is v2.InterpolationMode.BILINEAR
