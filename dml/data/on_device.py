"""Images of a cache held on the training device, where batches of views are cut out of them.

A loader then hands on labels and a few numbers an image. Each rank holds all the images, on its own device.
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
        cache: which has the rows.
        rows: `[n]`, each once.
        device: of the tensor.
    """

    def __init__(self, cache: ImageCache, rows: np.ndarray, device: torch.device) -> None:
        self._places: dict[int, tuple[int, int, int]] = {}
        self._pixels = torch.empty(cache.size(rows) // 3, 3, dtype=torch.uint8, device=device)
        start = 0
        for row in rows.tolist():
            picture = np.array(cache.image(row))  # a copy: the file is mapped to be read
            height, width = picture.shape[:2]
            self._pixels[start : start + height * width].copy_(torch.from_numpy(picture).view(-1, 3))
            self._places[row] = (start, height, width)
            start += height * width

    def numbers(self, row: int, moves: Sequence[object]) -> Tensor:
        """A view of a picture and where that lies, `[13]`; draws as `moves` do. Works in any process."""
        start, height, width = self._places[row]
        return torch.tensor([*drawn(moves, height, width), start, width])

    def images(self, numbers: Tensor) -> Tensor:
        """`[B,13]` on the CPU -> `[B,3,S,S]` uint8 on the device."""
        return views(self._pixels, numbers)


def check_views(transform: Transform, size: int) -> None:
    """Raises UserError for a transform whose pixels would not be Pillow's, tried on pictures of several shapes."""
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
                "dataset.cache=device would make other pixels of the transform with the options that it has: set "
                "dataset.cache=disk or memory."
            )


def check_fit(cache: ImageCache, rows: np.ndarray, device: torch.device) -> None:
    """Raises UserError where the pictures of the rows `[n]` to train on do not fit on the device."""
    check_room(f"the {len(rows)} training images", cache.size(rows), device, "device", "memory or disk")


def on_device(
    train: ImageCache, test: ImageCache, train_rows: np.ndarray, images: int, device: torch.device
) -> tuple[OnDevice, OnDevice | None]:
    """What training and evaluation take their images from, the same object where both begin with the same pictures.

    Args:
        train, test: caches; the second of all images.
        train_rows: rows `[n]` to train on.
        images: of the data set.

    Returns:
        For training; for evaluation, None where there is no room for all images. What evaluation sees is the same.

    Raises:
        UserError: there is no room for those of training.
    """
    check_fit(train, train_rows, device)
    everything = np.arange(images)
    needed = test.size(everything) + (train.size(train_rows) if train is not test else 0)
    if needed > free_memory(device):
        return OnDevice(train, train_rows, device), None
    whole = OnDevice(test, everything, device)
    return (whole if train is test else OnDevice(train, train_rows, device)), whole
