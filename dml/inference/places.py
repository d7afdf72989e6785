"""Images and other places that a command names: which files they are, and how they are written."""

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from dml.data.images import SUFFIXES
from dml.errors import UserError
from dml.files import walk


def image_files(places: Iterable[Path]) -> list[Path]:
    """Lists files as given, and all images in folders and below them, sorted by path. Each file is listed once.

    In folders, hidden entries and files without an image suffix (`dml.data.images.SUFFIXES`) are passed over.

    Raises:
        UserError: a place does not exist, a folder cannot be read, or a folder has no images.
    """
    found: list[Path] = []
    for place in places:
        if place.is_file():
            found.append(place)
            continue
        if not place.is_dir():
            raise UserError(f"there is no image or folder {shown_path(place)}: name one that exists.")
        images = _below(place)
        if not images:
            raise UserError(f"the folder {shown_path(place)} has no images ({' '.join(SUFFIXES)}): name another.")
        found += images
    once: dict[str, Path] = {}
    for path in found:
        once.setdefault(os.path.abspath(path), path)
    return list(once.values())


def _below(folder: Path) -> list[Path]:
    found = []
    for at, folders, names in walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(at, name) for name in names if name[0] != "." and name.lower().endswith(SUFFIXES)]
    return sorted(found)


def is_folder(path: Path) -> bool:
    """Returns whether a path is a folder; a name that is too long is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def shown_path(path: str | Path) -> str:
    """Returns a path as text that can be printed, whatever bytes its name consists of. Control characters, which a
    terminal would obey, are escaped."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(f"\\x{ord(one):02x}" if unicodedata.category(one) == "Cc" else one for one in text)


def unreadable_sentence(files: dict[Path, str]) -> str:
    """Returns a sentence, without a full stop, that names images that cannot be read."""
    first, reason = next(iter(files.items()))
    if len(files) == 1:
        return f"the image {shown_path(first)} cannot be read ({reason})"
    return f"{len(files)} images cannot be read: {', '.join(shown_path(file) for file in files)}"
