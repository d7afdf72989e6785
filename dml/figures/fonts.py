"""Fonts for names in any script."""

from functools import cache
from pathlib import Path

import matplotlib
from matplotlib.font_manager import fontManager
from matplotlib.ft2font import FT2Font
from PIL import ImageDraw, ImageFont

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def font_for(text: str, style: str = "") -> Path:
    """Returns the file of a font for the text: DejaVu Sans, which matplotlib brings, or if it lacks a character, the
    first installed font that has them all. If there is none it is DejaVu Sans, which draws boxes.

    Args:
        style: of DejaVu Sans, as the name of its file has it: "" or "-Bold".
    """
    own = FONTS / f"DejaVuSans{style}.ttf"
    needed = frozenset(text) - {" "}
    return own if _has(own, needed) else _installed(needed) or own


@cache
def _installed(needed: frozenset[str]) -> Path | None:
    file = next((file for file in _files() if _has(file, needed)), None)
    if file:  # names of one data set are of one script: the next ones are looked for there first
        _files().remove(file)
        _files().insert(0, file)
    return file


@cache
def _files() -> list[Path]:
    regular = {Path(one.fname) for one in fontManager.ttflist if one.style == "normal" and one.weight == 400}
    return sorted(file for file in regular if file.parent != FONTS)  # one of matplotlib's has a box for everything


def _has(file: Path, needed: frozenset[str]) -> bool:
    try:
        font = FT2Font(file)
    except (OSError, RuntimeError):  # the list of installed fonts is kept by matplotlib: one may be gone
        return False
    return all(font.get_char_index(ord(character)) for character in needed)


def write(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, size: int, style: str = "") -> None:
    """Draws a line of text in black, `at` its left upper corner, `size` pixels high, in the font of `font_for`."""
    draw.text(at, text, fill="black", font=ImageFont.truetype(font_for(text, style), size))


def fitting(text: str, size: int, width: int) -> str:
    """Returns the text in one line, cut and ended by "…" if it is wider than `width` pixels."""
    text = " ".join(text.split())
    font = ImageFont.truetype(font_for(text + "…"), size)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
