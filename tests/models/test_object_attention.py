"""The walk, the boxes and the crop of DeML's object attention, against numpy, loops and torch's own resize."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dml.models.attention import ChannelAttention, ObjectAttention, crop_and_zoom, object_attention, object_boxes

pytestmark = pytest.mark.usefixtures("one_thread")


def transitions(maps: torch.Tensor, locality: float | None = None) -> np.ndarray:
    """D of eq. 2, row by row, with the weights that leave a node normalised; with locality, Harel et al.'s weights."""
    features = maps.flatten(1).T.double().numpy()
    weights = np.array([[np.linalg.norm(a - b) for b in features] for a in features])
    if locality is not None:
        height, width = maps.shape[1:]
        sigma = locality * max(height, width)
        cells = [(row, column) for row in range(height) for column in range(width)]
        weights *= [[np.exp(-((a - c) ** 2 + (b - d) ** 2) / (2 * sigma**2)) for c, d in cells] for a, b in cells]
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("shape", [(3, 7, 7), (64, 5, 8), (2, 14, 14)])
def test_the_walk_ends_in_the_leading_left_eigenvector(shape: tuple[int, ...]) -> None:
    maps = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    found = object_attention(maps, steps=200)
    for one, image in zip(found, maps, strict=True):
        values, vectors = np.linalg.eig(transitions(image).T)
        leading = vectors[:, values.real.argmax()].real
        stationary = (leading / leading.sum()).reshape(shape[1:])
        np.testing.assert_allclose(one.numpy(), stationary, atol=1e-4 / stationary.size)
    ten = object_attention(maps)
    np.testing.assert_allclose(ten.numpy(), found.numpy(), atol=1e-4)
    assert (ten.numpy() > 0).all()
    np.testing.assert_allclose(ten.sum((1, 2)).numpy(), 1, rtol=1e-5)


@pytest.mark.parametrize("locality", [None, 0.15, 0.4])
def test_a_walk_is_the_literal_product(locality: float | None) -> None:
    """The mean of the states after nine and ten steps of `M_b <- sum_a M_a D_ab`."""
    maps = torch.rand(1, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    walk, states = transitions(maps[0], locality), [np.full(15, 1 / 15)]
    for _ in range(10):
        states.append(np.array([sum(states[-1][a] * walk[a, b] for a in range(15)) for b in range(15)]))
    found = object_attention(maps, locality=locality)[0].flatten().numpy()
    np.testing.assert_allclose(found, (states[9] + states[10]) / 2, rtol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("steps", [9, 10])
def test_mass_moves_to_what_is_unlike_the_rest(noise: float, steps: int) -> None:
    """A bright square on flat ground; with the product transposed an even start would never move."""
    generator = torch.Generator().manual_seed(2)
    maps = torch.rand(1, 8, 1, 1, generator=generator) + noise * torch.rand(1, 8, 14, 14, generator=generator)
    maps[:, :, 3:7, 5:9] += 1
    found = object_attention(maps, steps)
    inside = found[0, 3:7, 5:9]
    assert inside.min() > 3 * (found.sum() - inside.sum()) / 180
    proposal = F.interpolate(found[None], (56, 56), mode="bilinear")[0]
    (left, top, right, bottom) = object_boxes(proposal)[0].tolist()
    assert abs(left - 20) <= 4
    assert abs(top - 12) <= 4
    assert abs(right - 36) <= 4
    assert abs(bottom - 28) <= 4


def test_an_object_that_fills_more_than_half_is_marked_with_locality_alone() -> None:
    """Eq. 2 marks the smaller part, be it object or background; Harel et al.'s weights the part with many edges."""
    maps = 0.2 * torch.rand(1, 8, 14, 14, generator=torch.Generator().manual_seed(4))
    maps[:, :, 2:13, 2:13] += 1 + 0.7 * torch.rand(8, 11, 11, generator=torch.Generator().manual_seed(5))
    ratios = []
    for locality in (None, 0.15):
        found = object_attention(maps, locality=locality)[0]
        inside = found[2:13, 2:13]
        ratios.append(float(inside.mean() / ((found.sum() - inside.sum()) / 75)))
    assert ratios[0] < 1 < ratios[1]


@pytest.mark.parametrize("value", [0.0, 1e-6, 0.37, 1e4])
def test_constant_maps_give_the_whole_image(value: float) -> None:
    maps = torch.full((2, 300, 9, 9), value)
    maps[1] += torch.rand(300, 1, 1, generator=torch.Generator().manual_seed(0))  # of each channel another constant
    found = object_attention(maps)
    np.testing.assert_allclose(found.numpy(), 1 / 81, rtol=1e-5)
    proposal = F.interpolate(found[None], (37, 37), mode="bilinear")[0]
    assert object_boxes(proposal).tolist() == [[0, 0, 37, 37]] * 2


def test_small_differences_on_a_large_offset_count() -> None:
    maps = torch.full((1, 3, 6, 6), 100.0)
    maps[:, :, 2, 2] += 1.0
    found = object_attention(maps)[0]
    assert found[2, 2] == pytest.approx(0.5, abs=1e-3)


def test_half_precision_is_walked_and_cut_in_float32() -> None:
    maps = torch.rand(2, 8, 5, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = object_attention(maps)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, object_attention(maps.float()))
    images, boxes = torch.rand(2, 3, 64, 64), torch.tensor([[8, 4, 29, 25], [0, 0, 64, 64]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(object_attention(maps.float()), found)
        zoomed = crop_and_zoom(images, boxes)
    torch.testing.assert_close(zoomed.float(), crop_and_zoom(images, boxes))
    large, box = torch.rand(1, 3, 224, 224), torch.tensor([[30, 40, 130, 140]])
    for half in (torch.bfloat16, torch.float16):
        expected = crop_and_zoom(large.to(half).float(), box)
        torch.testing.assert_close(crop_and_zoom(large.to(half), box).float(), expected, rtol=0.01, atol=0.01)


def test_maps_of_many_cells_are_averaged_first() -> None:
    maps = torch.rand(2, 3, 64, 20, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(ObjectAttention()(maps), object_attention(F.avg_pool2d(maps, (2, 1))))
    torch.testing.assert_close(ObjectAttention()(maps[:, :, :32]), object_attention(maps[:, :, :32]))


def literal_box(proposal: np.ndarray) -> list[int]:
    """Flood fill from every pixel above the mean; the square around the largest part."""
    height, width = proposal.shape
    above = proposal > proposal.mean() * (1 + 1e-4)
    seen, largest = np.zeros_like(above), []
    for y in range(height):
        for x in range(width):
            part, border = [], [(y, x)]
            while border:
                i, j = border.pop()
                if 0 <= i < height and 0 <= j < width and above[i, j] and not seen[i, j]:
                    seen[i, j] = True
                    part.append((i, j))
                    border += [(i + a, j + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
            if len(part) > len(largest):
                largest = part
    if not largest:
        rows, columns = [0, height - 1], [0, width - 1]
    else:
        rows, columns = [i for i, _ in largest], [j for _, j in largest]
    side = min(max(max(rows) - min(rows), max(columns) - min(columns)) + 1, height, width)
    left = (min(columns) + max(columns) + 1 - side) // 2
    top = (min(rows) + max(rows) + 1 - side) // 2
    left, top = min(max(left, 0), width - side), min(max(top, 0), height - side)
    return [left, top, left + side, top + side]


@pytest.mark.parametrize("size", [(16, 16), (15, 15), (9, 14), (21, 8)])
def test_boxes_are_those_of_a_flood_fill(size: tuple[int, int]) -> None:
    noise = torch.rand(12, 1, *size, generator=torch.Generator().manual_seed(4))
    proposals = F.avg_pool2d(noise, 3, stride=1, padding=1)[:, 0]
    proposals[3] = 0.5  # nothing stands out
    boxes = object_boxes(proposals)
    assert boxes.tolist() == [literal_box(one) for one in proposals.numpy()]
    sides = boxes[:, 2:] - boxes[:, :2]
    assert (sides[:, 0] == sides[:, 1]).all()
    assert (boxes >= 0).all()
    assert (boxes[:, 2] <= size[1]).all()
    assert (boxes[:, 3] <= size[0]).all()


def test_the_largest_part_counts_not_the_brightest() -> None:
    proposal = torch.zeros(1, 12, 12)
    proposal[0, 1, 1] = 9
    proposal[0, 6:9, 5:10] = 1
    assert object_boxes(proposal).tolist() == [[5, 5, 10, 10]]


def test_crop_and_zoom_is_torchs_resize_of_the_crop() -> None:
    images = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(5))
    boxes = torch.tensor([[8, 4, 28, 24], [0, 0, 40, 40]])
    found = crop_and_zoom(images, boxes)
    torch.testing.assert_close(found[1], images[1])
    expected = F.interpolate(images[:1, :, 4:24, 8:28], (40, 40), mode="bilinear", align_corners=False)
    # At the crop's border the resize of the crop alone knows nothing of the pixels outside it.
    torch.testing.assert_close(found[:1, :, 2:-2, 2:-2], expected[:, :, 2:-2, 2:-2], rtol=1e-5, atol=1e-5)


def test_nothing_is_differentiated() -> None:
    maps = torch.rand(1, 2, 4, 4, requires_grad=True)
    assert not object_attention(maps).requires_grad
    images = torch.rand(1, 3, 8, 8, requires_grad=True)
    assert not crop_and_zoom(images, torch.tensor([[0, 0, 4, 4]])).requires_grad


def test_channel_attention_is_the_formula() -> None:
    torch.manual_seed(0)
    cam, maps = ChannelAttention(6, hidden=4), torch.rand(2, 6, 3, 3)
    first, second = cam.W1.weight, cam.W2.weight
    for b in range(2):
        weights = torch.sigmoid(second @ torch.relu(first @ maps[b].mean((1, 2))))
        torch.testing.assert_close(cam(maps)[b], maps[b] * weights[:, None, None])


def test_channel_attention_is_as_wide_as_section_3_2_says() -> None:
    assert [tuple(weight.shape) for weight in ChannelAttention(480).parameters()] == [(64, 480), (480, 64)]
