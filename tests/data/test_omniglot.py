"""A miniature in the official layout: `half/Alphabet/characterNN/NNNN_NN.png`, 1 bit."""

from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from dml.data.omniglot import omniglot
from dml.errors import UserError

BACKGROUND = {"Greek": 2, "Anglo-Saxon_Futhorc": 1, "Anglo": 1}
EVALUATION = {"Angelic": 1, "Tengwar": 2}


def make_half(root: Path, half: str, alphabets: dict[str, int], drawings: int = 2) -> None:
    for alphabet, characters in alphabets.items():
        for c in range(1, characters + 1):
            folder = root / half / alphabet / f"character{c:02d}"
            folder.mkdir(parents=True)
            for d in range(1, drawings + 1):
                image = Image.new("1", (9, 9), 1)
                image.putpixel((c, d), 0)
                image.save(folder / f"{c:04d}_{d:02d}.png")


def pack(root: Path, half: str) -> Path:
    with ZipFile(root / f"{half}.zip", "w") as archive:
        for path in sorted((root / half).rglob("*.png"), reverse=True):
            archive.write(path, path.relative_to(root))
        archive.writestr(f"__MACOSX/{half}/Greek/._x.png", b"not an image")
    return root / f"{half}.zip"


def remove(root: Path, half: str) -> None:
    for path in sorted((root / half).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (root / half).rmdir()


def test_both_halves_split_officially(tmp_path: Path) -> None:
    make_half(tmp_path, "images_background", BACKGROUND)
    make_half(tmp_path, "images_evaluation", EVALUATION)
    records = omniglot(str(tmp_path))
    assert records.class_names == [
        "Anglo/character01",
        "Anglo-Saxon_Futhorc/character01",
        "Greek/character01",
        "Greek/character02",
        "Angelic/character01",
        "Tengwar/character01",
        "Tengwar/character02",
    ]
    assert records.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert records.roles.tolist() == ["train"] * 8 + ["test"] * 6
    image = records.open_image(7)  # character 2, drawing 2
    assert image.mode == "RGB"
    assert np.argwhere(np.asarray(image)[..., 0] == 0).tolist() == [[2, 2]]


def test_zips_and_folders_give_the_same_records(tmp_path: Path) -> None:
    make_half(tmp_path, "images_background", BACKGROUND)
    make_half(tmp_path, "images_evaluation", EVALUATION)
    unpacked = omniglot(str(tmp_path))
    pixels = [np.asarray(unpacked.open_image(i)) for i in range(len(unpacked))]
    for half in ("images_background", "images_evaluation"):  # mixed, then zips alone
        pack(tmp_path, half)
        remove(tmp_path, half)
        zipped = omniglot(str(tmp_path))
        assert zipped.class_names == unpacked.class_names
        assert zipped.labels.tolist() == unpacked.labels.tolist()
        assert zipped.roles.tolist() == unpacked.roles.tolist()
        np.testing.assert_array_equal([np.asarray(zipped.open_image(i)) for i in range(len(zipped))], pixels)
    assert zipped.paths[0].endswith("images_background.zip/images_background/Anglo/character01/0001_01.png")


def test_one_half_is_split_by_alphabets(tmp_path: Path) -> None:
    make_half(tmp_path, "images_evaluation", {"Tengwar": 1, "Angelic": 2, "Keble": 1})
    records = omniglot(str(tmp_path))
    trained = {records.class_names[c] for c in records.labels[records.train_rows]}
    assert trained == {"Angelic/character01", "Angelic/character02"}
    assert len(records.query_rows) == 4


def test_missing_and_damaged_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"put images_background\.zip and images_evaluation\.zip"):
        omniglot(str(tmp_path))
    make_half(tmp_path, "images_background", BACKGROUND)
    path = pack(tmp_path, "images_background")
    remove(tmp_path, "images_background")
    sound = path.read_bytes()
    for damaged in (sound[: len(sound) // 2], sound[:60] + bytes([sound[60] ^ 255]) + sound[61:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"images_background\.zip is not a sound zip"):
            omniglot(str(tmp_path)).open_image(0)
    with ZipFile(path, "w") as archive:
        archive.writestr("somewhere/else.png", b"")
    with pytest.raises(UserError, match=r"has no images_background/Alphabet"):
        omniglot(str(tmp_path))


def test_zips_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_half(tmp_path, "images_background", BACKGROUND)
    path = pack(tmp_path, "images_background")
    remove(tmp_path, "images_background")
    sound = path.read_bytes()
    central, flags, method = b"PK\1\2", 8, 10
    for place, bits, said in ((flags, 1, "is encrypted, password required"), (method, 99, "compression method")):
        head, *entries = (bytearray(part) for part in sound.split(central))
        for entry in entries:
            entry[place - len(central)] ^= bits
        path.write_bytes(central.join([head, *entries]))
        with pytest.raises(UserError, match=rf"images_background\.zip is not a sound zip \(.*{said}"):
            omniglot(str(tmp_path))
    path.write_bytes(sound)
    monkeypatch.setattr("dml.data.omniglot.LARGEST", 100)
    with pytest.raises(UserError, match=r"images_background\.zip unpacks to 0\.0 GB, too much for Omniglot"):
        omniglot(str(tmp_path))


def test_a_character_in_both_halves(tmp_path: Path) -> None:
    make_half(tmp_path, "images_background", BACKGROUND)
    make_half(tmp_path, "images_evaluation", BACKGROUND)
    with pytest.raises(UserError, match=r"lies in both images_background and images_evaluation"):
        omniglot(str(tmp_path))


def test_one_alphabet_cannot_be_split(tmp_path: Path) -> None:
    make_half(tmp_path, "images_background", {"Greek": 3})
    with pytest.raises(UserError, match="only alphabet is Greek"):
        omniglot(str(tmp_path))


@pytest.mark.slow
@pytest.mark.data
def test_the_real_zips(data_dir: Path) -> None:
    records = omniglot(str(data_dir / "omniglot"))
    assert (len(records), len(records.class_names)) == (32460, 1623)
    assert (len(records.train_rows), len(records.query_rows)) == (964 * 20, 659 * 20)
    assert set(np.bincount(records.labels)) == {20}
    assert records.open_image(0).size == (105, 105)
