"""Thumbnails of many images in a few large ones, for a page that holds all of them."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image, ImageOps

from dml.data.images import quiet

BYTES = 15_000_000  # of all sheets; a page holds them as base64, a third more

SIDES = (96, 80, 64, 56, 48)  # pixels of a thumbnail; the largest that fits
PIXEL = 0.5  # bytes that a photograph's takes at the first quality
QUALITIES = (75, 60, 45, 30)  # of JPEG, until it fits

COLUMNS = 16


@dataclass(frozen=True)
class Sprites:
    """Images in rows of `COLUMNS`, `COLUMNS` rows a sheet.

    Attributes:
        side: of a thumbnail, in pixels.
        sheets: JPEG files.
    """

    side: int
    sheets: list[bytes]


def sprites(open_image: Callable[[int], Image.Image], rows: Sequence[int], most: int = BYTES) -> Sprites:
    """Thumbnails of rows of the records, in their order, within `most` bytes.

    Args:
        open_image: row of the records -> RGB image; called by several threads.
        rows: of the records.
        most: bytes. Where even the worst quality takes more, it is taken.
    """
    side = next((side for side in SIDES if len(rows) * side * side * PIXEL <= most), SIDES[-1])

    def small(row: int) -> Image.Image:
        return ImageOps.pad(open_image(row).convert("RGB"), (side, side), color="white")

    sheets = []
    with quiet(), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for some in _parts(rows):
            sheet = Image.new("RGB", (side * COLUMNS, side * -(-len(some) // COLUMNS)), "white")
            for at, picture in enumerate(pool.map(small, some)):
                sheet.paste(picture, (at % COLUMNS * side, at // COLUMNS * side))
            sheets.append(sheet)
    for quality in QUALITIES:
        files = [_jpeg(sheet, quality) for sheet in sheets]
        if sum(map(len, files)) <= most:
            break
    return Sprites(side, files)


def _parts(rows: Sequence[int]) -> list[Sequence[int]]:
    return [rows[at : at + COLUMNS * COLUMNS] for at in range(0, len(rows), COLUMNS * COLUMNS)]


def _jpeg(sheet: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=quality, optimize=True)
    return file.getvalue()
