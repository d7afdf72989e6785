"""Files of embeddings, with a digest of the weights that made them and a checksum."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from dml.errors import UserError
from dml.files import atomic_path
from dml.runs.reading import reading, require

UNIT = 1e-3  # how far from 1 a norm may be
OF_SEARCH = "of_search"  # an array that only the files of searches have
ARRAYS = ("embeddings", "paths", "weights", "checksum")  # of every file


@dataclass(frozen=True)
class Vectors:
    """The content of a file that `dml.embed` writes.

    Attributes:
        embeddings: `[N,D]` float32; in a gallery file float32 or float16.
        paths: `[N]`, of the images.
        weights: the digest of the weights that embedded them.
        stored: the checksum that a gallery file has; None: it is computed.
    """

    embeddings: np.ndarray
    paths: Any
    weights: str
    stored: str | None = None

    def checksum(self) -> str:
        """Returns the checksum of the content."""
        if self.stored is not None:
            return self.stored
        found = hashlib.sha256(json.dumps([self.weights, self.paths.tolist()]).encode())
        found.update(np.ascontiguousarray(self.embeddings, np.float32).tobytes())
        return found.hexdigest()[:32]


@dataclass
class Embedded:
    """Images that were embedded.

    Attributes:
        learners: `[N,L,d]` float32, each row of unit norm.
        files: the N images, in the same order.
        unreadable: the images that could not be read, with the reason. They are not among `files`.
    """

    learners: np.ndarray
    files: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)

    @property
    def embeddings(self) -> np.ndarray:
        """The learners side by side, `[N,D]`, of unit norm as a whole."""
        return side_by_side(self.learners)

    def vectors(self, weights: str) -> Vectors:
        """Returns the content of a file of these embeddings, with absolute paths. `weights` is the digest of the
        weights."""
        return Vectors(self.embeddings, np.array([str(file.absolute()) for file in self.files], np.str_), weights)


def side_by_side(learners: np.ndarray) -> np.ndarray:
    """Returns learners `[N,L,d]`, each of unit norm, as embeddings `[N,D]` of unit norm."""
    return learners.reshape(len(learners), -1) / np.float32(learners.shape[1] ** 0.5)


def write_vectors(path: Path, vectors: Vectors, learners: np.ndarray | None = None) -> None:
    """Writes a file that `read_vectors` reads, and `learners [N,L,d]` into it if they are given.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as new:
            save_vectors(new, vectors, learners)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another with -o.") from error


def save_vectors(path: Path, vectors: Vectors, learners: np.ndarray | None = None, *, of_search: bool = False) -> None:
    """Writes the same file straight to its place. Raises OSError if it cannot be written.

    Args:
        of_search: it belongs to a search, which may replace it.
    """
    content = {"embeddings": vectors.embeddings, "paths": vectors.paths}
    content |= {"weights": np.array(vectors.weights, np.str_), "checksum": np.array(vectors.checksum(), np.str_)}
    if learners is not None:
        content["learners"] = learners
    if of_search:
        content[OF_SEARCH] = np.array(True)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **content)


def belongs_to_search(path: Path) -> bool:
    """Returns whether a search wrote a file of vectors. Its content is not looked at."""
    return OF_SEARCH in _arrays(path)


def check_vectors_place(path: Path) -> None:
    """Checks that a file of vectors may be written, before the work on it begins.

    Raises:
        UserError: the path is a folder, or a file of something else that would be replaced.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file with -o.")
    if path.exists() and not _arrays(path).issuperset(ARRAYS):
        raise UserError(
            f"{path} was not written by dml.embed, which would replace it: move it away, or name another with -o."
        )


def _arrays(path: Path) -> set[str]:
    """Returns the names of the arrays in a file of NumPy's; none if it is no such file."""
    try:
        with ZipFile(path) as parts:
            return {name.removesuffix(".npy") for name in parts.namelist()}
    except (OSError, BadZipFile, ValueError, NotImplementedError):
        return set()


def read_vectors(path: Path) -> Vectors:
    """Reads a file of `write_vectors`. Raises UserError if it is no such file, or was changed since."""
    remedy = "write it with python -m dml.embed"
    with reading(path, remedy):
        with np.load(path, allow_pickle=False) as content:
            embeddings, paths = content["embeddings"], content["paths"]
            weights, checksum = (str(content[name]) for name in ("weights", "checksum"))
        found = Vectors(embeddings, paths, weights)
        require(embeddings.ndim == 2 and embeddings.dtype == np.float32, "it does not hold embeddings [N,D]")
        require(paths.shape == embeddings.shape[:1] and len(paths) > 0 and paths.dtype.kind == "U", "it lacks a path")
        require(found.checksum() == checksum, "it was changed since it was written: its checksum is another")
        apart = np.abs(np.linalg.norm(embeddings, axis=1) - 1)
        require(bool((apart < UNIT).all()), "it holds embeddings that are not of unit norm")
    return found


def writable(folder: Path) -> None:
    """Checks that a folder can be made and written, before the work on its content begins. What was not there is not
    there afterwards.

    Raises:
        UserError: it cannot be made or written.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.exists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{folder} cannot be written: name another with -o.")
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): name another with -o.") from error
    finally:
        for one in missing:
            with suppress(OSError):  # it could not be made, or another process has put something there
                one.rmdir()
