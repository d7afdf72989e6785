"""Views on batches: the draws of torchvision and the bits of Pillow, for every transform."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from dml.data import resampling
from dml.data.on_device import check_views
from dml.data.resampling import views
from dml.data.transforms import Transform
from dml.data.views import View, drawn
from dml.errors import UserError
from tests.components import transform

SIZE = 32
TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "shorter_crop": lambda: transform("shorter_crop", "train", SIZE),
    "pad_crop": lambda: transform("pad_crop", "train", SIZE),
    "resized_crop": lambda: transform("resized_crop", "train", SIZE),
    "resized_crop, enlarged": lambda: transform("resized_crop", "train", SIZE, (32, 32)),
    "resized_crop, diminished": lambda: transform("resized_crop", "train", SIZE, (256, 32)),
    "multires_crop": lambda: transform("multires_crop", "train", SIZE),
    "stretch": lambda: transform("unchanged", "test", SIZE),
    "centre_crop": lambda: transform("shorter_crop", "test", SIZE),
    "pad_centre_crop": lambda: transform("pad_crop", "test", SIZE),
}


def pictures(count: int) -> list[Image.Image]:
    """Noise of all shapes, also narrow ones, and smaller than the crop: nowhere is a wrong pixel like a right one."""
    rng = np.random.default_rng(0)
    shapes = [(40, 40), (33, 90), (120, 37), (20, 25), (301, 17), (9, 70), (64, 32)]
    return [Image.fromarray(rng.integers(0, 256, (*shapes[i % 7], 3), np.uint8)) for i in range(count)]


def batch(transform: Transform, images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """Pixels and numbers, as `views` takes them, each image with a seed of its own."""
    pixels, numbers, start = [], [], 0
    for seed, image in enumerate(images):
        torch.manual_seed(seed)
        view = drawn(transform.moves, image.height, image.width)
        numbers.append([*view, start, image.width])
        pixels.append(torch.tensor(np.asarray(image)).reshape(-1, 3))
        start += len(pixels[-1])
    return torch.cat(pixels), torch.tensor(numbers)


def one_by_one(transform: Transform, images: list[Image.Image]) -> Tensor:
    out = []
    for seed, image in enumerate(images):
        torch.manual_seed(seed)
        out.append(transform.pixels(image))
    return torch.stack(out)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_batch_has_the_bits_of_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = TRANSFORMS[name]()
    images = [made.prepared(image) for image in pictures(60)]
    expected, found = one_by_one(made, images), views(*batch(made, images))
    assert found.shape == (60, 3, SIZE, SIZE)
    assert torch.equal(found, expected)
    monkeypatch.setattr(resampling, "MOST", 7 * SIZE * SIZE)  # some images at a time
    assert torch.equal(views(*batch(made, images)), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_views_take_from_the_generator_what_torchvision_takes(name: str) -> None:
    made = TRANSFORMS[name]()
    for image in map(made.prepared, pictures(14)):
        torch.manual_seed(1)
        made.pixels(image)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        drawn(made.moves, image.height, image.width)
        assert torch.equal(after, torch.get_rng_state())


def test_a_picture_as_it_is() -> None:
    (image,) = pictures(1)
    pixels = torch.tensor(np.asarray(image)).reshape(-1, 3)
    numbers = torch.tensor([[*View.whole(image.height, image.width), 0, image.width]])
    assert torch.equal(views(pixels, numbers)[0], torch.tensor(np.asarray(image)).permute(2, 0, 1))


def test_any_resize_has_the_bits_of_pillow() -> None:
    """Which of the two passes comes first goes by the four sides, and by the version of Pillow."""
    rng = np.random.default_rng(3)
    for height, width, rows, columns in rng.integers(4, 60, (150, 4)).tolist():
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        view = View.whole(height, width)._replace(rows=rows, columns=columns, high=rows, wide=columns)
        pixels = torch.tensor(np.asarray(image)).reshape(-1, 3)
        found = views(pixels, torch.tensor([[*view, 0, width]]))[0].permute(1, 2, 0)
        expected = np.asarray(image.resize((columns, rows), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(found, expected, err_msg=str((height, width, rows, columns)))


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (
            [v2.Resize((SIZE, SIZE)), v2.ColorJitter(0.4)],
            r"cannot do ColorJitter of .*dataset\.cache=disk or",
        ),
        ([v2.Resize((SIZE, SIZE)), v2.Pad(4), v2.CenterCrop(SIZE)], "cannot do Pad of"),
        ([v2.Resize(40), v2.RandomCrop(SIZE), v2.RandomResizedCrop(SIZE)], "cannot do RandomResizedCrop of"),
        ([v2.Resize(24), v2.RandomCrop(SIZE, pad_if_needed=True, fill=9)], "cannot do RandomCrop of"),
        ([v2.Resize(40), v2.RandomCrop(SIZE, padding=2)], "cannot do RandomCrop of"),
        ([v2.Resize(40), v2.RandomCrop(SIZE, padding=2, padding_mode="reflect")], "cannot do RandomCrop of"),
        ([v2.Resize(24), v2.CenterCrop(SIZE)], "would give other pixels"),
        ([v2.RandomResizedCrop(SIZE, interpolation=v2.InterpolationMode.BICUBIC)], "cannot do RandomResizedCrop of"),
    ],
)
def test_what_is_no_view_is_told(steps: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=rf"dataset\.cache=device {sentence}"):
        check_views(Transform(*steps), SIZE)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_one_is_let_pass(name: str) -> None:
    check_views(TRANSFORMS[name](), SIZE)
