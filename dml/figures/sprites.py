"""Sprite sheets: thumbnails of many images in a few large JPEGs, for a page that contains all of them."""

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image, ImageOps

from dml.data.images import quiet
from dml.process import cores

BYTES = 15_000_000  # of all sheets together; as base64 in a page they take a third more

SIDES = (96, 80, 64, 56, 48)  # pixels of a thumbnail; the largest that fits is taken
PIXEL = 0.5  # bytes that a pixel of a photograph takes at the first quality
QUALITIES = (75, 60, 45, 30)  # of JPEG, tried in turn until all sheets fit

COLUMNS = 16


@dataclass(frozen=True)
class Sprites:
    """Sheets of `COLUMNS` by `COLUMNS` thumbnails, filled row by row.

    Attributes:
        side: of a thumbnail, in pixels.
        sheets: contents of JPEG files.
    """

    side: int
    sheets: list[bytes]


def sprites(open_image: Callable[[int], Image.Image], rows: Sequence[int]) -> Sprites:
    """Makes sheets of the thumbnails of images, in the order of `rows`, of at most `BYTES` together. If
    even the smallest side and the worst quality take more, these are used all the same.

    Args:
        open_image: row of the records -> RGB image; called by several threads.
        rows: of the images in the records.
    """
    side = next((side for side in SIDES if len(rows) * side * side * PIXEL <= BYTES), SIDES[-1])

    def small(row: int) -> Image.Image:
        return ImageOps.pad(open_image(row).convert("RGB"), (side, side), color="white")

    sheets = []
    with quiet(), ThreadPoolExecutor(min(16, cores())) as pool:
        for some in _parts(rows):
            sheet = Image.new("RGB", (side * COLUMNS, side * -(-len(some) // COLUMNS)), "white")
            for at, picture in enumerate(pool.map(small, some)):
                sheet.paste(picture, (at % COLUMNS * side, at // COLUMNS * side))
            sheets.append(sheet)
    for quality in QUALITIES:
        files = [_jpeg(sheet, quality) for sheet in sheets]
        if sum(map(len, files)) <= BYTES:
            break
    return Sprites(side, files)


def _parts(rows: Sequence[int]) -> list[Sequence[int]]:
    return [rows[at : at + COLUMNS * COLUMNS] for at in range(0, len(rows), COLUMNS * COLUMNS)]


def _jpeg(sheet: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=quality, optimize=True)
    return file.getvalue()
