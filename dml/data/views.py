"""What a transform does to one picture, as numbers: the draws of an image, and all that a device needs to carry it out.

A view takes a box of the picture, resizes it to a plane, and cuts a window out of that, which may be flipped and may
reach over the plane's edge. It is drawn by torchvision's own transforms, so that Pillow, which carries them out one
image at a time, and `dml.data.resampling`, which does so for a batch on any device, see the same draws.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torchvision.transforms import v2

from dml.errors import UserError


class View(NamedTuple):
    """Whole numbers, of pixels.

    Attributes:
        top, left, height, width: the box of the picture.
        rows, columns: of the plane, to which the box is resized.
        down, right: where in the plane the window begins; negative where it begins outside.
        high, wide: of the window, which is the result.
        flipped: 1 where the window is flipped from left to right.
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    down: int
    right: int
    high: int
    wide: int
    flipped: int

    @classmethod
    def whole(cls, height: int, width: int) -> "View":
        """A picture as it is."""
        return cls(0, 0, height, width, height, width, 0, 0, height, width, 0)

    @property
    def untouched(self) -> bool:
        return self == View.whole(self.height, self.width)


def drawn(moves: Sequence[Any], height: int, width: int) -> View:
    """What `moves` do to a picture of this size; takes from torch's generator what they would take.

    Raises:
        UserError: a transform that is no view.
    """
    view = View.whole(height, width)
    for move in moves:
        view = _reader(move)(move, view)
    return view


def _crop(move: Any, view: View) -> View:
    params = _params(move, view.high, view.wide)
    left, top, _, _ = params["padding"]
    down, right = view.down + params["top"] - top, view.right + params["left"] - left
    return view._replace(down=down, right=right, high=params["height"], wide=params["width"])


def _centre_crop(move: Any, view: View) -> View:
    high, wide = move.size
    down, right = round((view.high - high) / 2), round((view.wide - wide) / 2)
    return view._replace(down=view.down + down, right=view.right + right, high=high, wide=wide)


def _resized_crop(move: Any, view: View) -> View:
    _check_untouched(move, view)
    box = _params(move, view.high, view.wide)
    high, wide = move.size
    return View(box["top"], box["left"], box["height"], box["width"], high, wide, 0, 0, high, wide, 0)


def _resize(move: Any, view: View) -> View:
    _check_untouched(move, view)
    (shorter,) = _params(move, view.high, view.wide)["size"]
    longer = int(shorter * max(view.high, view.wide) / min(view.high, view.wide))
    high, wide = (shorter, longer) if view.high <= view.wide else (longer, shorter)
    return view._replace(rows=high, columns=wide, high=high, wide=wide)


def _flip(move: Any, view: View) -> View:
    return view._replace(flipped=int(bool(torch.rand(1) < move.p)))


_READERS: dict[type, Callable[[Any, View], View]] = {
    v2.RandomCrop: _crop,
    v2.CenterCrop: _centre_crop,
    v2.RandomResizedCrop: _resized_crop,
    v2.RandomResize: _resize,
    v2.RandomHorizontalFlip: _flip,
}


def _reader(move: Any) -> Callable[[Any, View], View]:
    reader = _READERS.get(type(move))
    bilinear = v2.InterpolationMode.BILINEAR  # kept as the mode or as its name
    if reader is None or getattr(move, "interpolation", bilinear) not in (bilinear, bilinear.value):
        raise refused(move)
    return reader


def refused(move: Any) -> UserError:
    """The sentence on what no view is, or not in its place."""
    return UserError(
        f"dataset.cache=device cannot do {type(move).__name__} of the transform on batches: set dataset.cache=disk "
        "or memory, or choose another transform, such as transform=resized_crop."
    )


def _check_untouched(move: Any, view: View) -> None:
    """Raises UserError for a second resize, and for one of what was cropped."""
    if not view.untouched:
        raise refused(move)


def _params(move: Any, height: int, width: int) -> dict[str, Any]:
    """What torchvision draws for a picture of this size, which is not needed itself."""
    return move.make_params([torch.empty(()).expand(3, height, width)])
