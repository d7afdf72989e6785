"""Reads image files: which formats are accepted, and how their pixels become RGB. No other module opens image files.

Pillow decodes JPEGs: torchvision's decoder gives the same bits no faster. Pillow's draft mode saves time only on
pictures of at least twice the size needed, and gives other bits there (`experiments/bench/decoding.py`).
"""

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image

# PIL recognises a file by its content, not its name, and some of its other formats start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MOST_OBLONG = 100  # longest to shortest side; a narrower picture, resized by its shorter side, would fill the memory
# To be raised when `decode` makes other pixels of a file: the names of cache files contain it.
VERSION = 3

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels; right and lower exclusive

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The inverse of a turn, where it is another one.
_BACK = {
    Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270,
    Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90,
}


def decode(source: str | IO[bytes], box: Box | None = None) -> Image.Image:
    """Decodes a whole image file as RGB, turned upright as its EXIF orientation says.

    Transparency is dropped, and only the first of several frames is read.

    Args:
        source: path, or an open file.
        box: the part to cut out, in pixels as stored (before turning), as annotations count them; at least one pixel
            of the image is kept.

    Raises:
        Exception: of many types; its text says why the image cannot be read: it is no regular file, none of `FORMATS`,
            damaged, larger than PIL's limit, has pixels of unknown range, is more than `MOST_OBLONG` times as long as
            wide, or does not reach to the box.
    """
    with _opened(source) as file, _image(file) as image:
        return pixels(image, box)


def pixels(image: Image.Image, box: Box | None = None) -> Image.Image:
    """Returns an opened picture as `decode` does: RGB, turned upright, and cut out.

    Raises:
        Exception: as `decode`.
    """
    before = _turn(image) if box is not None and image.format == "TIFF" else None
    image.load()
    turn = _turn(image)
    picture = _rgb(image)
    if before is not None:  # PIL has turned it, but boxes are of the pixels as stored
        picture, turn = picture.transpose(_BACK.get(before, before)), before
    if box is not None:
        picture = _cut(picture, box)
    if max(picture.size) > MOST_OBLONG * min(picture.size):
        raise ValueError(f"{picture.width} x {picture.height} pixels are more than {MOST_OBLONG} times as long as wide")
    return picture if turn is None else picture.transpose(turn)


def reason(error: Exception) -> str:
    """Says in one line why an image could not be read, without its path."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses PIL's warnings about odd metadata, which do not concern the pixels. Not for use by several threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


@contextmanager
def _opened(source: str | IO[bytes]) -> Iterator[IO[bytes]]:
    """Opens a regular file only: reading a pipe could wait for ever, and a device may never end."""
    if not isinstance(source, str):
        yield source
        return
    number = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe does not wait for a writer
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError("it is no regular file")
        yield file


def _image(file: IO[bytes]) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"it is damaged, or none of {', '.join(FORMATS)}") from None


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Returns what turns the pixels upright. PIL turns TIFF files itself when it loads them, and then removes their
    orientation."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the metadata is damaged, but the pixels may be sound
        return None


def _rgb(image: Image.Image) -> Image.Image:
    tags: Any = getattr(image, "tag_v2", {})  # of TIFF
    kinds = {1, *tags.get(339, (1,))} - {4}  # SampleFormat: 1 unsigned, 4 unspecified
    if image.mode in ("I", "F") or kinds != {1}:
        raise ValueError("its pixels are signed, of 32 bits or floating-point, and their range is unknown: "
                         "save it with 8 or 16 bits")  # fmt: skip
    if image.mode.startswith("I;16"):  # PIL would clip all levels above 255
        bits = tags.get(258, (16,))[0]
        levels = np.asarray(image).astype(np.uint16) >> (bits - 8)
        black_is_high = tags.get(262) == 0  # PIL respects this only up to 8 bits
        return Image.fromarray((255 - levels if black_is_high else levels).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:  # PIL warns unless a palette with transparency is converted by way of RGBA
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _cut(image: Image.Image, box: Box) -> Image.Image:
    """Cuts the box out of an image; the result has at least one pixel.

    Raises:
        ValueError: the box lies outside the image.
    """
    if box[0] >= image.width or box[1] >= image.height:
        raise ValueError(f"its box, from {box[0]:g} {box[1]:g}, lies outside its {image.width} x {image.height} pixels")
    left, upper = (min(max(0, round(low)), size - 1) for low, size in zip(box[:2], image.size, strict=True))
    right, lower = (round(high) for high in box[2:])
    return image.crop((left, upper, min(max(right, left + 1), image.width), min(max(lower, upper + 1), image.height)))
