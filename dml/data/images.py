"""Image files: which are read, and how their pixels become RGB. The one place that opens them.

Pillow decodes JPEGs: torchvision's decoder gives the same bits no faster, and Pillow's draft mode gives others where it
saves time, on pictures of twice the size needed (`experiments/bench/decoding.py`).
"""

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image

from dml.errors import UserError

# PIL guesses by content, whatever the name says, and some of its other formats start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MOST_OBLONG = 100  # times: resized by its shorter side, a narrower picture would fill the memory
# Of what `decode` makes of a file: what caches keep is of another file where it changes.
VERSION = 2

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


def decode(source: str | IO[bytes], box: Box | None = None) -> Image.Image:
    """A whole image file as RGB, upright as its EXIF says; transparency is dropped, of several frames the first counts.

    Args:
        source: path, or an open file.
        box: to cut out, in pixels as they are stored, which annotations mean; at least one pixel of it.

    Raises:
        Exception: of many types; its text says why the image cannot be read: no regular file, none of `FORMATS`,
            damaged, larger than PIL's limit, pixels whose range is not known, or more than `MOST_OBLONG` times as long
            as wide.
    """
    with _opened(source) as file, _image(file) as image:
        image.load()
        turn = _turn(image)
        picture = _rgb(image)
    if box is not None:
        picture = _cut(picture, box)
    if max(picture.size) > MOST_OBLONG * min(picture.size):
        raise ValueError(f"{picture.width} x {picture.height} pixels are more than {MOST_OBLONG} times as long as wide")
    return picture if turn is None else picture.transpose(turn)


def reason(error: Exception) -> str:
    """Why an image could not be read, in a line, without its path."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def closed_folder(error: OSError) -> None:
    """For `os.walk`, which passes over folders that it may not read. Raises UserError, but for what is not there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise UserError(f"the folder {error.filename} cannot be read ({error.strerror}): its images would be missing")


@contextmanager
def quiet() -> Iterator[None]:
    """PIL's remarks on odd metadata stay in: they do not concern the pixels. Not to be entered by several threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


@contextmanager
def _opened(source: str | IO[bytes]) -> Iterator[IO[bytes]]:
    """Regular files alone: a pipe would wait for ever, a device may never end."""
    if not isinstance(source, str):
        yield source
        return
    number = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is opened without a writer
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
    """What brings the loaded pixels upright. PIL turns those of TIFF itself, and then says so no more."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged metadata, which says nothing of the pixels
        return None


def _rgb(image: Image.Image) -> Image.Image:
    tags: Any = getattr(image, "tag_v2", {})  # of TIFF
    kinds = {1, *tags.get(339, (1,))} - {4}  # SampleFormat: 1 unsigned, 4 not said
    if image.mode in ("I", "F") or kinds != {1}:
        raise ValueError("its pixels are signed, of 32 bits or floating-point, of a range that it does not tell: "
                         "save it with 8 or 16 bits")  # fmt: skip
    if image.mode.startswith("I;16"):  # PIL would clip all levels to the first 256
        bits = tags.get(258, (16,))[0]
        levels = np.asarray(image).astype(np.uint16) >> (bits - 8)
        black_is_high = tags.get(262) == 0  # which PIL heeds up to 8 bits
        return Image.fromarray((255 - levels if black_is_high else levels).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:  # a palette with transparency goes through RGBA, or PIL warns
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _cut(image: Image.Image, box: Box) -> Image.Image:
    """The box's part of an image, of one pixel at least."""
    left, upper = (min(max(0, round(low)), size - 1) for low, size in zip(box[:2], image.size, strict=True))
    right, lower = (round(high) for high in box[2:])
    return image.crop((left, upper, min(max(right, left + 1), image.width), min(max(lower, upper + 1), image.height)))
