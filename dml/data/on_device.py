"""Images of a cache held on the training device, where batches are cut out of them (`dataset.cache=device`).

A loader then only hands on labels and a few numbers per image. Each rank holds all the images on its own device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dml.data.cache import ImageCache
from dml.data.resampling import views
from dml.data.room import check_room, free_memory
from dml.data.transforms import Transform, pictures
from dml.data.views import drawn
from dml.errors import UserError


class OnDevice:
    """All pictures of some rows, as one tensor.

    Args:
        cache: holds the pictures of the rows.
        rows: `[n]`, each once.
        device: of the tensor.
    """

    def __init__(self, cache: ImageCache, rows: np.ndarray, device: torch.device) -> None:
        self._places: dict[int, tuple[int, int, int]] = {}
        self._pixels = torch.empty(cache.size(rows) // 3, 3, dtype=torch.uint8, device=device)
        start = 0
        for row in rows.tolist():
            picture = np.array(cache.image(row))  # a copy: the mapped file is read-only
            height, width = picture.shape[:2]
            self._pixels[start : start + height * width].copy_(torch.from_numpy(picture).view(-1, 3))
            self._places[row] = (start, height, width)
            start += height * width

    def numbers(self, row: int, moves: Sequence[object]) -> Tensor:
        """Draws a view of a picture, and adds where the picture lies: `[13]` int64.

        It takes the same random numbers as `moves` would, and works in any process.
        """
        start, height, width = self._places[row]
        return torch.tensor([*drawn(moves, height, width), start, width])

    def images(self, numbers: Tensor) -> Tensor:
        """Cuts views `[B,13]`, given on the CPU, out of the pictures: `[B,3,S,S]` uint8 on the device."""
        return views(self._pixels, numbers)


def check_views(transform: Transform, size: int) -> None:
    """Raises UserError if views of the transform have other pixels than Pillow's; tries pictures of several shapes."""
    for seed, picture in enumerate([*pictures(size), *pictures(size)]):
        prepared = transform.prepared(picture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = transform.pixels(prepared)
            torch.manual_seed(seed)
            view = drawn(transform.moves, prepared.height, prepared.width)
        pixels = torch.from_numpy(np.array(prepared)).view(-1, 3)
        found = views(pixels, torch.tensor([[*view, 0, prepared.width]]))[0]
        if not torch.equal(found, expected):
            raise UserError(
                "dataset.cache=device would give other pixels than Pillow for this transform with these options: set "
                "dataset.cache=disk or memory."
            )


def check_fit(cache: ImageCache, rows: np.ndarray, device: torch.device) -> None:
    """Raises UserError if the pictures of the training rows `[n]` do not fit on the device."""
    check_room(f"the {len(rows)} training images", cache.size(rows), device, "device", "memory or disk")


def on_device(
    train: ImageCache, test: ImageCache, train_rows: np.ndarray, images: int, device: torch.device
) -> tuple[OnDevice, OnDevice | None]:
    """Copies the images of training and evaluation to the device, once if both begin with the same pictures.

    Args:
        train, test: caches; the second one holds all images.
        train_rows: rows `[n]` to train on.
        images: number of images in the data set.
        device: to copy to.

    Returns:
        The images for training, and those for evaluation. The second is None if all images would take more than half
        of the free memory; evaluation then reads the same pixels from the cache.

    Raises:
        UserError: there is no room for the training images.
    """
    check_fit(train, train_rows, device)
    everything = np.arange(images)
    needed = test.size(everything) + (train.size(train_rows) if train is not test else 0)
    if 2 * needed > free_memory(device):  # the training needs room, too
        return OnDevice(train, train_rows, device), None
    whole = OnDevice(test, everything, device)
    return (whole if train is test else OnDevice(train, train_rows, device)), whole
