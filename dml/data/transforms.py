"""RGB picture -> float32 `[3,S,S]` in [0,1]. Mean and deviation belong to the backbone, whose weights expect them.

A transform is a list of torchvision's operations, by name, in a file of `conf/transform`; randomness comes from torch's
generator. A paper that crops 224 from images of 256 says `sides: [256, 224]`; at another crop size S the first side
scales along.
"""

from typing import Any

import torch
from omegaconf import DictConfig
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from dml.configuration.components import instantiate
from dml.configuration.ranges import Count, Pixels, Positive
from dml.errors import UserError

# ImageNet's mean colour: 0 after the mean is subtracted, so padding says nothing to the network.
MEAN_COLOUR = (124, 116, 104)


class Transform:
    """What is done to an image: first, the same each time, to the picture; then, perhaps at random, to the end.

    Args:
        steps: torchvision's transforms, in their order.

    Attributes:
        first: picture -> picture, of which a cache may keep the result (see `dml.data.cache`); None: nothing.
        moves: those after it; `dml.data.views` reads them too.
    """

    def __init__(self, *steps: Any) -> None:
        begins = bool(steps) and isinstance(steps[0], v2.Resize | PadSquare)
        self.first, self.moves = steps[0] if begins else None, steps[int(begins) :]
        self._then = v2.Compose([*self.moves, v2.ToImage(), v2.ToPureTensor()])

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


# Operations whose numbers follow from the size of the crop. All others of a transform are torchvision's own.


def shorter_side(size: Pixels, sides: tuple[Pixels, Pixels]) -> v2.Resize:
    """The shorter side to S * sides[0] / sides[1]."""
    return v2.Resize(_before(size, sides))


def pad_square(size: Pixels, sides: tuple[Pixels, Pixels]) -> PadSquare:
    """The longer side to S * sides[0] / sides[1], padded to a square with ImageNet's mean colour: 0 for the network."""
    return PadSquare(_before(size, sides))


def random_side(size: Pixels, scale: tuple[Positive, Positive]) -> v2.RandomResize:
    """The shorter side to a random length between S times two numbers."""
    low, high = (round(one * size) for one in scale)
    return v2.RandomResize(low, high + 1)  # the upper end is exclusive


def continue_edges(size: Pixels, parts: Count) -> v2.Pad:
    """The pixels at the edges, continued by one of so many parts of S: what is moved in later makes no frame."""
    return v2.Pad(size // parts, padding_mode="edge")


def _before(size: Pixels, sides: tuple[Pixels, Pixels]) -> int:
    """Raises UserError for sides that leave no crop."""
    if len(sides) != 2 or not sides[0] >= sides[1] > 0:
        raise UserError(
            f"transform sides={list(sides)}: a crop of the second is cut from images of the first; give two."
        )
    return round(size * sides[0] / sides[1])


def transform_of(steps: DictConfig) -> Transform:
    """What a part of `conf/transform` describes: operations by names of their own, in their order; null leaves one out.

    Raises:
        UserError: no such operations, or what one says of its options.
    """
    if not isinstance(steps, DictConfig) or "_target_" in steps:
        raise UserError("transform.train and transform.test are operations, each under a name: see conf/transform.")
    return Transform(*(instantiate(step, _convert_="all") for step in steps.values() if step is not None))


def pictures(size: int) -> list[Image.Image]:
    """Nobody's, of several shapes, to try a transform on that makes squares of a size."""
    shapes = (2 * size, size + 7), (size // 2 + 1, size), (40, 30), (3 * size, 20)
    return [Image.effect_noise(shape, 64).convert("RGB") for shape in shapes]


def check_transform(transform: Transform, size: int, option: str, draws: bool = True) -> None:
    """Carries a transform out on some pictures.

    Args:
        size: S, of the images that the network is given.
        option: where it stands in the configuration.
        draws: whether it may take from the random generator.

    Raises:
        UserError: it fails, makes anything else than `[3,S,S]` uint8, or draws where it must not.
    """
    for picture in pictures(size):
        of = f"a picture of {picture.width}x{picture.height}"
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                made = transform.pixels(transform.prepared(picture))
            except Exception as error:  # whatever torchvision's operations say
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(f"{option} cannot be carried out on {of}: {reason}") from error
            drawn = not torch.equal(before, torch.get_rng_state())
        if (made.dtype, made.shape) != (torch.uint8, (3, size, size)):
            raise UserError(
                f"{option} makes {made.dtype} of shape {list(made.shape)} of {of}, not uint8 of [3, {size}, {size}]: "
                "crop or resize to image_size, and leave floats and normalising to the network."
            )
        if drawn and not draws:
            raise UserError(f"{option} is random, and an evaluation has to see the same each time: leave that out.")


def transform_draws(transform: Transform, size: int) -> bool:
    """Whether a transform, checked, takes from the random generator."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        for picture in pictures(size):
            transform.pixels(transform.prepared(picture))
        return not torch.equal(before, torch.get_rng_state())
