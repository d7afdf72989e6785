"""Boxes of the largest parts of masks, against `scipy.ndimage.label`."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from dml.models.parts import largest_parts

pytestmark = pytest.mark.usefixtures("one_thread")

SIDES = [(1, 1), (1, 9), (9, 1), (2, 2), (3, 5), (8, 8), (13, 17), (31, 32), (32, 32)]


def by_scipy(masks: Tensor) -> Tensor:
    """Of equal parts the first: scipy numbers them by their first pixels."""
    boxes = []
    for mask in masks.numpy():
        parts, count = ndimage.label(mask, structure=np.ones((3, 3)))
        boxes.append([0, 0, mask.shape[1], mask.shape[0]])
        if count:
            rows, columns = ndimage.find_objects(parts)[np.bincount(parts.ravel())[1:].argmax()]
            boxes[-1] = [columns.start, rows.start, columns.stop, rows.stop]
    return torch.tensor(boxes)


def spiral(height: int, width: int) -> np.ndarray:
    """One line from a corner inwards, a pixel from itself."""
    picture, (y, x), (down, right) = np.zeros((height + 4, width + 4), bool), (2, 2), (0, 1)
    picture[2, 2] = True
    turns = 0
    while turns < 2:
        ahead = picture[y + down, x + right] or picture[y + 2 * down, x + 2 * right]
        if 2 <= y + down < height + 2 and 2 <= x + right < width + 2 and not ahead:
            y, x, turns = y + down, x + right, 0
            picture[y, x] = True
        else:
            down, right, turns = right, -down, turns + 1
    return picture[2:-2, 2:-2]


def snake(height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width), bool)
    picture[::2] = True
    picture[1::4, -1] = True
    picture[3::4, 0] = True
    return picture


def comb(height: int, width: int) -> np.ndarray:
    picture = np.zeros((height, width), bool)
    picture[:, ::2] = True
    picture[-1] = True
    return picture


def drawn(height: int, width: int) -> Tensor:
    """Shapes, their mirror images, and what is left of them where a tenth is wiped out; noise, and blots."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    shapes = [shape(height, width) for shape in (spiral, snake, comb)]
    shapes += [shape(width, height).T for shape in (spiral, snake, comb)]
    shapes += [(y + x) % 2 == 0, (y % 2 == 0) & (x % 2 == 0), (y // 2 + x // 2) % 2 == 0, (y + x) % 3 == 0]
    shapes += [np.zeros((height, width), bool), np.ones((height, width), bool)]
    shapes += [shape[:, ::-1] for shape in shapes] + [shape[::-1] for shape in shapes]
    shapes += [shape & (random.random(shape.shape) > 0.1) for shape in shapes]
    noise = random.random((40, height, width)) < random.random((40, 1, 1))
    blots = ndimage.gaussian_filter(random.normal(size=(40, height, width)), (0, 2, 2)) > 0
    return torch.from_numpy(np.concatenate([np.stack(shapes), noise, blots]))


@pytest.mark.parametrize("size", SIDES)
def test_boxes_are_those_of_scipy(size: tuple[int, int]) -> None:
    masks = drawn(*size)
    torch.testing.assert_close(largest_parts(masks), by_scipy(masks), rtol=0, atol=0)


@pytest.mark.slow
def test_boxes_of_large_images_are_those_of_scipy() -> None:
    masks = drawn(224, 224)[::9]
    masks = torch.cat([masks, torch.from_numpy(np.stack([spiral(224, 224), snake(224, 224)]))])
    torch.testing.assert_close(largest_parts(masks), by_scipy(masks), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_all_boxes_of_large_images() -> None:
    for size in ((224, 224), (227, 227), (256, 128)):
        masks = drawn(*size)
        torch.testing.assert_close(largest_parts(masks), by_scipy(masks), rtol=0, atol=0)


def test_every_small_mask() -> None:
    masks = (torch.arange(2**12)[:, None] >> torch.arange(12) & 1).bool().view(-1, 3, 4)
    torch.testing.assert_close(largest_parts(masks), by_scipy(masks), rtol=0, atol=0)


def test_the_first_of_equal_parts() -> None:
    """By its first pixel, not by its first block."""
    mask = torch.zeros(1, 6, 8, dtype=torch.bool)
    mask[0, 1, 0] = mask[0, 0, 5] = True
    assert largest_parts(mask).tolist() == [[5, 0, 6, 1]]
