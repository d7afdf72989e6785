"""Embeddings in a file, with a digest of the weights that made them and a checksum."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dml.errors import UserError
from dml.files import atomic_path
from dml.runs.reading import reading, require

UNIT = 1e-3  # how far from 1 a norm may be


@dataclass(frozen=True)
class Vectors:
    """What a file of this command holds: `embeddings [N,D]` float32, in a gallery file maybe float16; `paths [N]`; the
    digest of the weights; of a gallery file its checksum."""

    embeddings: np.ndarray
    paths: Any
    weights: str
    stored: str | None = None

    def checksum(self) -> str:
        """Of all of it."""
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
        files: N, in the same order.
        unreadable: those that are not among them, with the reason.
    """

    learners: np.ndarray
    files: list[Path] = field(default_factory=list)
    unreadable: dict[Path, str] = field(default_factory=dict)

    @property
    def embeddings(self) -> np.ndarray:
        """`[N,D]`, the learners side by side, of unit norm as a whole."""
        count, learners, width = self.learners.shape
        return self.learners.reshape(count, learners * width) / np.float32(learners**0.5)

    def vectors(self, weights: str) -> Vectors:
        """What a file of them holds; `weights` is the digest."""
        return Vectors(self.embeddings, np.array([str(file) for file in self.files], np.str_), weights)


def write_vectors(path: Path, vectors: Vectors, learners: np.ndarray | None = None) -> None:
    """What `read_vectors` reads; and `learners [N,L,d]`, where they are given.

    Raises:
        UserError: it cannot be written.
    """
    content = {"embeddings": vectors.embeddings, "paths": vectors.paths}
    content |= {"weights": np.array(vectors.weights, np.str_), "checksum": np.array(vectors.checksum(), np.str_)}
    if learners is not None:
        content["learners"] = learners
    try:
        with atomic_path(path) as new, new.open("wb") as file:
            np.savez(file, allow_pickle=False, **content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another with -o.") from error


def read_vectors(path: Path) -> Vectors:
    """A file of `write_vectors`. Raises UserError where it is none, or was changed since."""
    remedy = "write it with python -m dml.embed"
    with reading(path, remedy):
        with np.load(path, allow_pickle=False) as content:
            embeddings, paths = content["embeddings"], content["paths"]
            weights, checksum = (str(content[name]) for name in ("weights", "checksum"))
        found = Vectors(embeddings, paths, weights)
        require(embeddings.ndim == 2 and embeddings.dtype == np.float32, "it does not hold embeddings [N,D]")
        require(paths.shape == embeddings.shape[:1] and len(paths) > 0 and paths.dtype.kind == "U", "no path a row")
        require(found.checksum() == checksum, "it was changed since it was written: its checksum is another")
        apart = np.abs(np.linalg.norm(embeddings, axis=1) - 1)
        require(bool((apart < UNIT).all()), "it holds embeddings that are not of unit norm")
    return found


def writable(folder: Path) -> None:
    """Makes a folder, before anything is computed that is to lie in it. Raises UserError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): name another with -o.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: name another with -o.")
