"""RGB picture -> float32 `[3,S,S]` in [0,1]. Mean and deviation belong to the backbone, whose weights expect them.

Each function returns a `Transform` made of torchvision's; randomness comes from torch's generator. A paper that crops
224 from images of 256 says `sides: [256, 224]`; at another crop size S the first side scales along.
"""

from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from dml.configuration.ranges import Pixels
from dml.errors import UserError

# ImageNet's mean colour: 0 after the mean is subtracted, so padding says nothing to the network.
MEAN_COLOUR = (124, 116, 104)


class Transform:
    """What is done to an image: first, the same each time, to the picture; then, perhaps at random, to the end.

    Attributes:
        first: picture -> picture, of which a cache may keep the result (see `dml.data.cache`); None: nothing.
        moves: torchvision's transforms of what `first` gives, in their order; `dml.data.views` reads them too.
    """

    def __init__(self, first: Any, *moves: Any) -> None:
        self.first, self.moves = first, moves
        self._then = v2.Compose([*moves, v2.ToImage(), v2.ToPureTensor()])

    def __call__(self, image: Image.Image) -> Tensor:
        return scaled(self.pixels(self.prepared(image)))

    def prepared(self, image: Image.Image) -> Image.Image:
        """The picture after `first`."""
        return image if self.first is None else self.first(image)

    def pixels(self, picture: Image.Image) -> Tensor:
        """The rest: a picture, prepared -> `[3,S,S]` uint8, a quarter of what workers would hand on as floats."""
        return self._then(picture)


def scaled(pixels: Tensor) -> Tensor:
    """uint8 `[...]` -> float32 in [0,1], the same bits on every device."""
    return F.to_dtype(pixels, torch.float32, scale=True)


class PadSquare:
    """Longer side to `side`, padded to a square with ImageNet's mean colour. Its repr says all that it does."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, image: Image.Image) -> Image.Image:
        size = (self.side, self.side)
        if 2 * self.side * min(image.size) <= max(image.size):  # its other side would round to nothing
            image = image.resize(
                (self.side, 1) if image.width > image.height else (1, self.side), Image.Resampling.BILINEAR
            )
        return ImageOps.pad(image, size, method=Image.Resampling.BILINEAR, color=MEAN_COLOUR)

    def __repr__(self) -> str:
        return f"PadSquare({self.side}, {MEAN_COLOUR})"


def stretch(size: Pixels) -> Transform:
    """Test: the whole image resized to a square, whatever its shape."""
    return Transform(v2.Resize((size, size)))


def jitter(size: Pixels) -> Transform:
    """Train, for characters: as `stretch`, then turned, moved and scaled a little. No flip: it makes other characters.

    What moves in from outside continues the edge pixels; a constant would be a frame that tells the augmentation.
    """
    move = v2.RandomAffine(degrees=10, translate=(0.06, 0.06), scale=(0.85, 1.15), interpolation=_BILINEAR)
    return Transform(v2.Resize((size, size)), v2.Pad(size // 3, padding_mode="edge"), move, v2.CenterCrop(size))


def centre_crop(size: Pixels, sides: tuple[Pixels, Pixels]) -> Transform:
    """Test: shorter side to S * sides[0] / sides[1], then the middle S x S."""
    return Transform(v2.Resize(_before(size, sides)), v2.CenterCrop(size))


def shorter_crop(size: Pixels, sides: tuple[Pixels, Pixels]) -> Transform:
    """Train, DCES sec. 5: shorter side to S * sides[0] / sides[1], a random S x S of it, flip."""
    return Transform(v2.Resize(_before(size, sides)), v2.RandomCrop(size), v2.RandomHorizontalFlip())


def pad_centre_crop(size: Pixels, sides: tuple[Pixels, Pixels]) -> Transform:
    """Test, ABE sec. 4: as `pad_crop`, with the middle S x S."""
    return Transform(PadSquare(_before(size, sides)), v2.CenterCrop(size))


def pad_crop(size: Pixels, sides: tuple[Pixels, Pixels]) -> Transform:
    """Train, ABE sec. 4: longer side to S * sides[0] / sides[1], padded to a square, a random S x S of it, flip.

    The padding has ImageNet's mean colour, hence is 0 where the network sees it.
    """
    return Transform(PadSquare(_before(size, sides)), v2.RandomCrop(size), v2.RandomHorizontalFlip())


def resized_crop(size: Pixels, sides: tuple[Pixels, Pixels]) -> Transform:
    """Train, GSP supplement, after Musgrave et al. 2020 (MLRC): shorter side to S * sides[0] / sides[1], a random crop
    of 16 to 100 % of the area and aspect 3/4 to 4/3, resized to S x S, flip.

    The papers write "a crop between 40 and 256"; MLRC's configuration has `scale: 0.16 1` (40/256 = 0.16), which
    torchvision takes as a share of the area.
    """
    crop = v2.RandomResizedCrop(size, scale=(0.16, 1.0), ratio=(3 / 4, 4 / 3))
    return Transform(v2.Resize(_before(size, sides)), crop, v2.RandomHorizontalFlip())


def multires_crop(size: Pixels) -> Transform:
    """Train, DIABLO sec. 3.5: shorter side to a random 0.8 S to 1.8 S, a random S x S of it, flip.

    Where the resized image is smaller than the crop, it is padded with ImageNet's mean colour.
    """
    resize = v2.RandomResize(round(0.8 * size), round(1.8 * size) + 1)  # the upper end is exclusive
    crop = v2.RandomCrop(size, pad_if_needed=True, fill=list(MEAN_COLOUR))
    return Transform(None, resize, crop, v2.RandomHorizontalFlip())


_BILINEAR = v2.InterpolationMode.BILINEAR


def _before(size: Pixels, sides: tuple[Pixels, Pixels]) -> int:
    """Raises UserError for sides that leave no crop."""
    if len(sides) != 2 or not sides[0] >= sides[1] > 0:
        raise UserError(
            f"transform sides={list(sides)}: a crop of the second is cut from images of the first; give two."
        )
    return round(size * sides[0] / sides[1])
