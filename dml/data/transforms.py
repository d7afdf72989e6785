"""Transforms turn an RGB image into float32 `[3,S,S]` in [0,1]. The backbone normalises with the mean of its weights.

A transform is a list of named torchvision operations in a file of `conf/transform`; randomness comes from torch's
generator. If a paper crops 224 pixels from images of 256, the file says `sides: [256, 224]`; for another crop size S
the first side is scaled in proportion.
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

# ImageNet's mean colour becomes 0 when the mean is subtracted, so padding tells the network nothing.
MEAN_COLOUR = (124, 116, 104)


class Transform:
    """The steps from an image to a tensor: a fixed first step, whose result may be cached, and possibly random others.

    Args:
        steps: torchvision's transforms, in their order.

    Attributes:
        first: image -> picture, a resize or padding at the beginning, whose result a cache may keep (see
            `dml.data.cache`); None: there is no such step.
        moves: the steps after it; `dml.data.views` reads them too.
    """

    def __init__(self, *steps: Any) -> None:
        begins = bool(steps) and isinstance(steps[0], v2.Resize | PadSquare)
        self.first, self.moves = steps[0] if begins else None, steps[int(begins) :]
        self._then = v2.Compose([*self.moves, v2.ToImage(), v2.ToPureTensor()])

    def __call__(self, image: Image.Image) -> Tensor:
        return scaled(self.pixels(self.prepared(image)))

    def prepared(self, image: Image.Image) -> Image.Image:
        """Returns the picture: the image after the step `first`."""
        return image if self.first is None else self.first(image)

    def pixels(self, picture: Image.Image) -> Tensor:
        """Applies the remaining steps to a picture: `[3,S,S]` uint8, a quarter of the bytes of floats to hand on."""
        return self._then(picture)


def scaled(pixels: Tensor) -> Tensor:
    """Converts uint8 `[...]` to float32 in [0,1], with the same bits on every device."""
    return F.to_dtype(pixels, torch.float32, scale=True)


class PadSquare:
    """Resizes the longer side to `side` and pads to a square with ImageNet's mean colour.

    Its repr identifies its result, since the names of caches are made from it.
    """

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, image: Image.Image) -> Image.Image:
        size = (self.side, self.side)
        if 2 * self.side * min(image.size) <= max(image.size):  # the other side would round to 0
            image = image.resize(
                (self.side, 1) if image.width > image.height else (1, self.side), Image.Resampling.BILINEAR
            )
        return ImageOps.pad(image, size, method=Image.Resampling.BILINEAR, color=MEAN_COLOUR)

    def __repr__(self) -> str:
        return f"PadSquare({self.side}, {MEAN_COLOUR})"


# Operations whose numbers depend on the crop size S. All other operations of a transform are torchvision's own.


def shorter_side(size: Pixels, sides: tuple[Pixels, Pixels]) -> v2.Resize:
    """Resizes the shorter side to S * sides[0] / sides[1]."""
    return v2.Resize(_before(size, sides))


def pad_square(size: Pixels, sides: tuple[Pixels, Pixels]) -> PadSquare:
    """Resizes the longer side to S * sides[0] / sides[1] and pads to a square with ImageNet's mean colour."""
    return PadSquare(_before(size, sides))


def random_side(size: Pixels, scale: tuple[Positive, Positive]) -> v2.RandomResize:
    """Resizes the shorter side to a random length between S * scale[0] and S * scale[1]."""
    low, high = (round(one * size) for one in scale)
    return v2.RandomResize(low, high + 1)  # the upper end is exclusive


def continue_edges(size: Pixels, parts: Count) -> v2.Pad:
    """Pads each edge by S // parts pixels that repeat it, so that a later shift shows no frame."""
    return v2.Pad(size // parts, padding_mode="edge")


def _before(size: Pixels, sides: tuple[Pixels, Pixels]) -> int:
    """Returns the side before the crop. Raises UserError for sides that leave no crop."""
    if len(sides) != 2 or not sides[0] >= sides[1] > 0:
        raise UserError(
            f"transform sides={list(sides)} have to be two sides [image, crop], as [256, 224], and the crop must not "
            "be larger than the image."
        )
    return round(size * sides[0] / sides[1])


def transform_of(steps: DictConfig) -> Transform:
    """Makes the transform of `transform.train` or `transform.test`.

    Args:
        steps: name -> operation, in their order; null leaves an operation out.

    Raises:
        UserError: `steps` is no such mapping, or an operation refuses its options.
    """
    if not isinstance(steps, DictConfig) or "_target_" in steps:
        raise UserError(
            "transform.train and transform.test have to be operations, each under a name: see the files in "
            "conf/transform."
        )
    return Transform(*(_operation(step) for step in steps.values() if step is not None))


def _operation(step: DictConfig) -> Any:
    """Makes an operation. Not every torchvision takes the name of an interpolation; an unknown name is left to it."""
    modes = [mode for mode in v2.InterpolationMode if mode.value == step.get("interpolation")]
    named = {"interpolation": modes[0]} if modes else {}
    return instantiate(step, _convert_="all", **named)


def pictures(size: int) -> list[Image.Image]:
    """Makes noise pictures of several shapes, to try out a transform to squares of `size` pixels."""
    shapes = (2 * size, size + 7), (size // 2 + 1, size), (40, 30), (3 * size, 20)
    return [Image.effect_noise(shape, 64).convert("RGB") for shape in shapes]


def check_transform(transform: Transform, size: int, option: str, draws: bool = True) -> bool:
    """Checks a transform by applying it to some pictures.

    Args:
        transform: to be checked.
        size: S, side of the images that the network is given.
        option: name of the transform's option, for messages.
        draws: whether the transform may be random.

    Returns:
        Whether the transform is random.

    Raises:
        UserError: the transform fails, makes anything else than `[3,S,S]` uint8, or is random although `draws` is
            False.
    """
    random = False
    for picture in pictures(size):
        of = f"a picture of {picture.width}x{picture.height}"
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                made = transform.pixels(transform.prepared(picture))
            except Exception as error:  # torchvision's operations raise many types
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UserError(f"{option} cannot be applied to {of}: {reason}") from error
            drawn = not torch.equal(before, torch.get_rng_state())
        if (made.dtype, made.shape) != (torch.uint8, (3, size, size)):
            raise UserError(
                f"{option} makes {made.dtype} of shape {list(made.shape)} of {of}, not uint8 of [3, {size}, {size}]: "
                "crop or resize to image_size, and leave conversion to float and normalising to the network."
            )
        if drawn and not draws:
            raise UserError(
                f"{option} is random, but every evaluation has to see the same images: leave random operations out."
            )
        random = random or drawn
    return random
