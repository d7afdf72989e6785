"""Omniglot (Lake et al., Science 350, 2015): handwritten characters, 105x105, 20 drawings each; MIT licence.

The official files are at https://github.com/brendenlake/omniglot (`python/`): `images_background.zip` (964 characters
of 30 alphabets) and `images_evaluation.zip` (659 characters of 20). A class is `Alphabet/character`.
"""

from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from dml.data.folder import class_folders, images_below
from dml.data.images import decode, reason
from dml.data.paths import Paths
from dml.data.records import Records, Unreadable
from dml.errors import UserError

HALVES = ("images_background", "images_evaluation")
LARGEST = 10**8  # bytes of a half, unpacked: ten times the official ones
Drawings = dict[str, list[tuple[str, bytes | None]]]  # class -> (path, encoded image; None: read it from the path)


def omniglot(root: str, unreadable: Unreadable = "stop") -> Records:
    """Reads the halves of Omniglot in `root`, unpacked or as the official zips; an unpacked half is preferred.

    With both halves, background is for training and evaluation for the test (the official split by alphabet). With one
    half, the first half of its alphabets in order of names is for training and the rest for the test. The images of
    zips are held in memory, still encoded (8 MB for all), and the zips' checksums are verified.

    Args:
        root: the folder of `images_background[.zip]` and `images_evaluation[.zip]`.
        unreadable: `stop` or `skip`, see `dml.data.check`.

    Raises:
        UserError: neither half exists, or a zip is damaged.
    """
    halves = [half for name in HALVES if (half := _read_half(Path(root), name))]
    if not halves:
        raise UserError(
            f"no Omniglot images in {root}: put images_background.zip and images_evaluation.zip (either or both, from "
            "https://github.com/brendenlake/omniglot/tree/master/python) there"
        )
    both = set(halves[0]) & set(halves[-1]) if len(halves) == 2 else ()
    if both:
        raise UserError(
            f"the character {min(both)} lies in both {' and '.join(HALVES)} in {root} ({len(both)} such), but no "
            "character may be in training and in the test: fetch the official files again"
        )
    drawings = {name: images for half in halves for name, images in half.items()}
    train = set(halves[0]) if len(halves) == 2 else _first_alphabets(halves[0])
    return _records(drawings, train, unreadable)


def _records(drawings: Drawings, train: set[str], unreadable: Unreadable) -> Records:
    names = list(drawings)
    labels = np.repeat(np.arange(len(names)), [len(images) for images in drawings.values()])
    paths = Paths.of(path for images in drawings.values() for path, _ in images)
    encoded = [content for images in drawings.values() for _, content in images]
    roles = np.array(["train" if name in train else "test" for name in names])
    return Records(
        name="omniglot",
        paths=paths,
        labels=labels.astype(np.int64),
        roles=roles[labels],
        class_names=names,
        open_image=lambda row: decode(paths[row] if (c := encoded[row]) is None else BytesIO(c)),
        unreadable=unreadable,
    )


def _first_alphabets(half: Drawings) -> set[str]:
    alphabets = sorted({name.split("/")[0] for name in half})
    if len(alphabets) < 2:
        raise UserError(
            f"Omniglot's only alphabet is {alphabets[0]}, but training and testing need at least one each: use an "
            "official half"
        )
    first = alphabets[: len(alphabets) // 2]
    return {name for name in half if name.split("/")[0] in first}


def _read_half(root: Path, name: str) -> Drawings:
    if (root / name).is_dir():
        return {
            f"{alphabet}/{character}": [(path, None) for path in images_below(folder)]
            for alphabet, characters in class_folders(root / name).items()
            for character, folder in class_folders(characters).items()
        }
    if (root / f"{name}.zip").is_file():
        return _read_zip(root / f"{name}.zip")
    return {}


def _read_zip(path: Path) -> Drawings:
    drawings: Drawings = {}
    try:
        with ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > LARGEST:
                raise UserError(f"{path} unpacks to {size / 1e9:.1f} GB, too much for Omniglot: fetch it again")
            names = [name.split("/") for name in archive.namelist() if name.endswith(".png")]
            for half, alphabet, character, file in sorted(p for p in names if p[0] == path.stem and len(p) == 4):
                member = f"{half}/{alphabet}/{character}/{file}"
                content = archive.read(member)
                drawings.setdefault(f"{alphabet}/{character}", []).append((f"{path}/{member}", content))
    except UserError:
        raise
    except Exception as error:  # of zipfile or zlib, for damaged bytes or a password
        raise UserError(f"{path} is not a sound zip ({reason(error)}): fetch it again") from error
    if not drawings:
        raise UserError(f"{path} has no {path.stem}/Alphabet/character/*.png inside: use the official file")
    return drawings
