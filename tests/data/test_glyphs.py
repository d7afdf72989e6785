"""The characters are told apart by matplotlib's own renderer, independent of PIL and of how they were chosen."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.ft2font import FT2Font
from torch import Tensor

from dml.data.glyphs import CHARACTERS, draw_glyph, font_file, glyphs, typefaces
from dml.errors import UserError

FACES = sorted({face for character in CHARACTERS for face in typefaces(character)})
TWINS = ["cC", "oO", "0O", "sS", "vV", "xX", "wW", "zZ", "lI", "AΑ", "AА", "OΟ", "pр", "HН", "аa", "I|"]
ALIKE = 0.06


def bitmap(font: FT2Font, character: str) -> Tensor:
    """`[32,32]` bool: the ink stretched to a common box."""
    font.clear()
    font.set_size(48, 72)
    font.set_text(character, 0.0)
    font.draw_glyphs_to_bitmap(antialiased=True)
    image = torch.from_numpy(np.asarray(font.get_image()).astype(np.float32) / 255)
    rows, columns = (image > 0.25).any(1).nonzero().flatten(), (image > 0.25).any(0).nonzero().flatten()
    image = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return F.interpolate(image[None, None], size=(32, 32), mode="bilinear", antialias=True)[0, 0] > 0.5


def difference(bitmaps: Tensor) -> Tensor:
    """`[n,n]`: share of the ink of one that is further than a pixel from the ink of the other, the larger of both."""
    ink = bitmaps.float().flatten(1)
    near = F.max_pool2d(bitmaps.float()[:, None], 3, 1, 1).flatten(1)
    missed = 1 - ink @ near.T / ink.sum(1, keepdim=True)
    return torch.maximum(missed, missed.T)


@pytest.mark.slow
def test_no_two_classes_look_alike_in_any_typeface() -> None:
    for face in FACES:
        font = FT2Font(font_file(face))
        characters = [c for c in CHARACTERS if face in typefaces(c)]
        apart = difference(torch.stack([bitmap(font, c) for c in characters])).fill_diagonal_(1)
        a, b = divmod(int(apart.argmin()), len(characters))
        assert apart.min() > ALIKE, (face, characters[a], characters[b])


@pytest.mark.parametrize("pair", TWINS)
def test_known_twins_are_found_alike_and_not_both_in(pair: str) -> None:
    fonts = [FT2Font(font_file(face)) for face in FACES if not face.startswith("cm")]
    fonts = [font for font in fonts if all(font.get_char_index(ord(c)) for c in pair)]
    assert min(difference(torch.stack([bitmap(font, c) for c in pair]))[0, 1] for font in fonts) < ALIKE
    assert not set(pair) <= set(CHARACTERS)


def test_every_typeface_used_has_the_character_and_each_character_has_many() -> None:
    assert len(set(CHARACTERS)) == len(CHARACTERS) >= 160
    for character in CHARACTERS:
        faces = typefaces(character)
        assert len(faces) >= 12
        assert all(FT2Font(font_file(face)).get_char_index(ord(character)) for face in faces), character


def test_records_are_laid_out_class_by_class_and_split_in_half() -> None:
    records = glyphs(classes=6, images_per_class=3, size=24)
    assert records.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert records.roles.tolist() == ["train"] * 9 + ["test"] * 9
    character = records.class_names[2]
    assert records.paths[7] == f"U+{ord(character):04X} {character} 001"
    image = records.open_image(7)
    assert image.mode == "RGB"
    assert image.size == (24, 24)
    np.testing.assert_array_equal(np.asarray(image), draw_glyph(character, 24, [0, ord(character), 1]))


def test_the_seed_fixes_pixels_and_classes() -> None:
    one, same, other = (glyphs(classes=8, images_per_class=2, size=24, seed=seed) for seed in (1, 1, 2))
    pixels = [np.stack([np.asarray(r.open_image(i)) for i in range(16)]) for r in (one, same, other)]
    np.testing.assert_array_equal(pixels[0], pixels[1])
    assert one.class_names == same.class_names != other.class_names
    assert len({p.tobytes() for stack in (pixels[0], pixels[2]) for p in stack}) == 32  # no picture twice


def test_the_ink_stands_out_from_the_background() -> None:
    """Where the same random stream draws another character, only ink differs: it does, and by a visible amount."""
    solid, cross = (draw_glyph(c, 48, [3, 5, 7]).astype(float) @ [0.299, 0.587, 0.114] for c in "BX")
    changed = np.abs(solid - cross)
    assert 0.02 < (changed > 50).mean() < 0.5


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"classes": 3}, "classes"), ({"classes": 1000}, "1000"), ({"images_per_class": 1}, "images_per_class")],
)
def test_impossible_sizes_are_told(arguments: dict[str, int], word: str) -> None:
    with pytest.raises(UserError, match=word):
        glyphs(**arguments)
