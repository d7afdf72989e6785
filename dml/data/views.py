"""Views: what a transform does to one picture, as numbers from which any device can make the image.

A view takes a box of the picture, resizes it to a plane, and cuts a window out of the plane; the window may be flipped
and may reach beyond the plane's edge. torchvision's own transforms draw the random numbers. Pillow (one image at a
time) and `dml.data.resampling` (a batch on any device) therefore see the same draws.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torchvision.transforms import v2

from dml.data.transforms import MEAN_COLOUR
from dml.errors import UserError


class View(NamedTuple):
    """A view of one picture, in whole numbers of pixels.

    Attributes:
        top, left, height, width: the box of the picture.
        rows, columns: size of the plane to which the box is resized.
        down, right: where in the plane the window begins; negative if it begins outside.
        high, wide: size of the window, which is the result.
        flipped: 1 if the window is flipped from left to right.
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
        """Returns the view that leaves a picture of this size unchanged."""
        return cls(0, 0, height, width, height, width, 0, 0, height, width, 0)

    @property
    def untouched(self) -> bool:
        return self == View.whole(self.height, self.width)


def drawn(moves: Sequence[Any], height: int, width: int) -> View:
    """Draws the view that `moves` make of a picture of this size, with the same random numbers as they would use.

    Raises:
        UserError: a transform that cannot be written as a view.
    """
    view = View.whole(height, width)
    for move in moves:
        view = _reader(move)(move, view)
    return view


def _crop(move: Any, view: View) -> View:
    if (move.padding or move.pad_if_needed) and (move.padding_mode != "constant" or _colour(move.fill) != MEAN_COLOUR):
        raise refused(move)  # what lies outside of a picture is filled with that colour
    params = _params(move, view.high, view.wide)
    left, top, _, _ = params["padding"]
    down, right = view.down + params["top"] - top, view.right + params["left"] - left
    return view._replace(down=down, right=right, high=params["height"], wide=params["width"])


def _colour(fill: Any) -> tuple[Any, ...]:
    return tuple(fill) if isinstance(fill, Sequence) else (fill,) * 3


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
    """Returns the error for a transform that cannot be written as a view, at all or at its place."""
    return UserError(
        f"dataset.cache=device cannot do {type(move).__name__} of the transform on batches: set dataset.cache=disk "
        "or memory, or choose another transform, such as transform=resized_crop."
    )


def _check_untouched(move: Any, view: View) -> None:
    """Raises UserError for a resize after another resize or a crop."""
    if not view.untouched:
        raise refused(move)


def _params(move: Any, height: int, width: int) -> dict[str, Any]:
    """Lets torchvision draw for a picture of this size; the picture itself is not needed."""
    return move.make_params([torch.empty(()).expand(3, height, width)])
