"""The default dataset: characters on cluttered backgrounds, rendered from the typefaces that matplotlib ships.

A class is a character (one Unicode code point in any typeface). Retrieval has to recognise its shape whatever the
typeface, weight, slant, size, rotation, colour and clutter, and training on one half of the characters has to carry
over to the other half. Nothing is downloaded or stored. The typefaces are free (DejaVu: Bitstream Vera licence; STIX:
OFL; Computer Modern as BaKoMa: free to use; matplotlib's `LICENSE` folder has the texts).
"""

import string
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from dml.configuration.ranges import Few, Seed
from dml.data.paths import Paths
from dml.data.records import Records
from dml.errors import UserError

# No two look alike in any typeface, even after scaling to a common box and turning by 15 degrees: C but not c, 0 but
# not O, Latin A but neither Greek nor Cyrillic A. `tests/data/test_glyphs.py` checks this for any addition.
CHARACTERS = (
    "0123457ABCFHKLQRTUVWXZbdfkmpqtyΞΦΨαεζλςωДЖЦЧЩЪЫЮЯ&@#$%*+=<>§"
    "¶©®±¿∂∃∈∑∓∞∠∩∸∹≃≐≑≒≤≥⊃⊆⊇⊏⊘⊞⊠←↖↗↯↰↱↲↳↴ÆÞæøŊŒƁƈƔƕƝƣƧƺƾȤȵȸȹȻȿɀɁ"
    "ɕɚɠɦɮɹɻʁʍʎʑʞʣʤʦʩʫʬʭʮϗϟϠϺϿЂЉЊЋѣѪҐҖҘҚҤҲӃӈӋӶ"
)

# Computer Modern's typefaces follow Unicode for these code points only.
_ASCII = frozenset(string.ascii_letters + string.digits)
_UNICODE_FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
_ASCII_FACES = ("cmr10", "cmss10", "cmtt10", "cmb10", "cmti10")
_LUMA = np.array([0.299, 0.587, 0.114])


def glyphs(classes: int = 160, images_per_class: Few = 24, size: Few = 48, seed: Seed = 0) -> Records:
    """Renders the dataset: the first half of the shuffled characters is for training, the second for the test.

    Every image depends on (seed, character, number in its class) alone. Another FreeType release may change
    anti-aliased pixels a little.

    Args:
        classes: characters, 4 to `len(CHARACTERS)`.
        images_per_class: at least 2, since a query needs a positive.
        size: side in pixels.
        seed: fixes the choice of characters, the split and every image.

    Raises:
        UserError: `classes` or `images_per_class` is out of range.
    """
    if not 4 <= classes <= len(CHARACTERS):
        raise UserError(f"dataset.classes is {classes}: use 4 to {len(CHARACTERS)}, the number of available characters")
    if images_per_class < 2:
        raise UserError(
            f"dataset.images_per_class is {images_per_class}: use 2 or more, so that each image has a positive"
        )
    characters = np.random.default_rng(seed).permutation(list(CHARACTERS))[:classes].tolist()
    labels = np.repeat(np.arange(classes), images_per_class)
    pictures = [(character, n) for character in characters for n in range(images_per_class)]
    pixels = np.stack([draw_glyph(character, size, [seed, ord(character), n]) for character, n in pictures])
    return Records(
        name="glyphs",
        paths=Paths.of(f"U+{ord(c):04X} {c} {n:03d}" for c, n in pictures),
        labels=labels.astype(np.int64),
        roles=np.where(labels < classes // 2, "train", "test"),
        class_names=characters,
        open_image=lambda row: Image.fromarray(pixels[row]),
    )


def typefaces(character: str) -> list[str]:
    """Returns the names of the typefaces that have the character."""
    faces = [face for face in _UNICODE_FACES if ord(character) in _code_points(face)]
    return faces + (list(_ASCII_FACES) if character in _ASCII else [])


def font_file(face: str) -> str:
    return str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf"))


@cache
def _code_points(face: str) -> frozenset[int]:
    return frozenset(FT2Font(font_file(face)).get_charmap())


@cache
def _ink(face: str, character: str, size: int) -> Image.Image:
    """Renders the character alone, cropped to its ink, in mode `L`."""
    font = ImageFont.truetype(font_file(face), size, layout_engine=ImageFont.Layout.BASIC)
    mask = font.getmask(character, mode="L")
    image = Image.frombytes("L", mask.size, bytes(mask))
    return image.crop(image.getbbox())


def draw_glyph(character: str, size: int, seed: list[int]) -> np.ndarray:
    """Draws one picture of a character, `[size,size,3]` uint8."""
    rng = np.random.default_rng(seed)
    luma, ink_luma = _contrast(rng)
    canvas = Image.fromarray(_gradient(rng, size, luma))
    _scribble(rng, canvas, luma, ink_luma)
    canvas.paste(_colour(rng, ink_luma), mask=_placed(rng, character, size))
    pixels = np.asarray(canvas) + rng.normal(0, rng.uniform(2, 8), (size, size, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def _contrast(rng: np.random.Generator) -> tuple[float, float]:
    """Draws the luma (0..255) of background and ink, 100 to 150 apart; either may be the darker one."""
    dark, gap = rng.uniform(25, 90), rng.uniform(100, 150)
    return (dark, dark + gap) if rng.random() < 0.5 else (dark + gap, dark)


def _colour(rng: np.random.Generator, luma: float) -> tuple[int, int, int]:
    """Draws a random colour of about this luma."""
    chroma = rng.normal(0, 40, 3)
    r, g, b = (luma + chroma - chroma @ _LUMA).clip(0, 255).astype(int).tolist()
    return r, g, b


def _gradient(rng: np.random.Generator, size: int, luma: float) -> np.ndarray:
    """Draws a gradient `[size,size,3]` uint8 from one colour to another in a random direction."""
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[-0.5 : 0.5 : size * 1j, -0.5 : 0.5 : size * 1j]
    t = (x * np.cos(angle) + y * np.sin(angle))[..., None] / np.sqrt(2) + 0.5
    ends = [np.array(_colour(rng, luma + shift)) for shift in (rng.uniform(-25, 25), rng.uniform(-25, 25))]
    return ((1 - t) * ends[0] + t * ends[1]).astype(np.uint8)


def _scribble(rng: np.random.Generator, canvas: Image.Image, luma: float, ink_luma: float) -> None:
    """Draws blobs and long strokes near the background's luma, and short strokes near the ink's."""
    draw, size = ImageDraw.Draw(canvas), canvas.width
    for _ in range(rng.integers(2, 6)):
        (x, y), (w, h) = rng.uniform(0, size, 2), rng.uniform(size / 10, size / 3, 2)
        draw.ellipse((x - w, y - h, x + w, y + h), fill=_colour(rng, luma + rng.uniform(-40, 40)))
    for _ in range(rng.integers(2, 6)):
        ends = rng.uniform(0, size, 4).tolist()
        width = int(rng.integers(1, max(2, size // 12) + 1))
        draw.line(ends, fill=_colour(rng, luma + rng.uniform(-50, 50)), width=width)
    for _ in range(rng.integers(0, 3)):
        start, step = rng.uniform(0, size, 2), rng.uniform(-size / 5, size / 5, 2)
        draw.line([*start, *(start + step)], fill=_colour(rng, ink_luma), width=max(1, size // 24))


def _placed(rng: np.random.Generator, character: str, size: int) -> Image.Image:
    """Draws the character's mask, mode `L`, (size, size): typeface, turn, shear, size and position are random."""
    faces = typefaces(character)
    ink = _ink(faces[rng.integers(len(faces))], character, size)
    turn, shear, stretch = rng.uniform(-0.2, 0.2), rng.uniform(-0.15, 0.15), rng.uniform(0.87, 1.15)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    shape = rotation @ np.array([[stretch, shear], [0, 1 / stretch]])
    box = np.abs(shape) @ ink.size  # width and height after turning
    shape *= size * rng.uniform(0.6, 0.9) / box.max()
    box = np.abs(shape) @ ink.size
    centre = size / 2 + rng.uniform(-0.5, 0.5, 2) * (size - box)
    back = np.linalg.inv(shape)  # PIL asks for output -> input
    offset = np.array(ink.size) / 2 - back @ centre
    matrix = (*back[0], offset[0], *back[1], offset[1])
    return ink.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
