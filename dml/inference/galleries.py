"""Gallery files: embeddings that need not fit into memory, with the paths of the images and a digest of the weights.

N images, D width. `gallery.npy` is `[N,D]` float32 or float16, which NumPy and other programs map into memory.
`gallery.parquet` has a column `path` in the same order. `gallery.json` is written last; it has the digest of the
weights and the checksums of the other two. zarr and HDF5 were passed over: they are for arrays that grow, and the size
of this one is known.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from dml.errors import UserError
from dml.files import alone, atomic_path, write_atomically
from dml.inference.vectors import UNIT, Vectors
from dml.runs.reading import reading, require

SUFFIX = ".npy"

ROWS = 65_536  # rows that are read at a time, which take 32 MiB with 128 dimensions

TYPES = ("float32", "float16")


def need_pyarrow() -> Any:
    """Imports pyarrow.parquet and returns the module. Raises UserError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "a gallery in a .npy file needs pyarrow for its paths, which is not installed: pip install '.[parquet]', "
            "or write a .npz file."
        ) from error
    return pyarrow.parquet


class StoredPaths(Sequence[str]):
    """The paths of a gallery, held by Arrow, which takes a tenth of the memory of Python's strings."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        found: str | list[str] = self._column[at].to_pylist() if isinstance(at, slice) else self._column[at].as_py()
        return found


def read_gallery(path: Path) -> Vectors:
    """Opens a gallery file that `Draft.finish` wrote. Its embeddings are mapped into memory, and read once for the
    checksum.

    Raises:
        UserError: it is no gallery file, was changed since it was written, or pyarrow is missing.
    """
    parquet = need_pyarrow()
    remedy = "write it with python -m dml.embed"
    with reading(path, remedy):
        described = json.loads(path.with_suffix(".json").read_text())
        embeddings = np.load(path, mmap_mode="r", allow_pickle=False)
        require(isinstance(described, dict) and isinstance(described.get("weights"), str), "it names no weights")
        for name, file in (("embeddings", path), ("paths", path.with_suffix(".parquet"))):
            same = described.get(name) == checksum_of(file)
            require(same, f"{file.name} was changed since it was written: its checksum is another")
        paths = StoredPaths(parquet.read_table(path.with_suffix(".parquet"), columns=["path"])["path"])
        require(embeddings.ndim == 2 and str(embeddings.dtype) in TYPES, "it does not hold embeddings [N,D]")
        require(len(paths) == len(embeddings) > 0, "it lacks a path")
        for rows in blocks(len(embeddings)):
            apart = np.abs(np.linalg.norm(embeddings[rows].astype(np.float32), axis=1) - 1)
            require(bool((apart < UNIT).all()), "it holds embeddings that are not of unit norm")
    return Vectors(embeddings, paths, described["weights"], described["embeddings"])


def checksum_of(file: Path) -> str:
    """Returns the checksum of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def blocks(count: int, size: int = ROWS) -> Iterator[slice]:
    """Yields slices of `size` that cover 0..count; the last one may be shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


WRITTEN, UNREADABLE = 1, 2  # the state of an image in a draft


@dataclass
class Draft:
    """A gallery that is being written, perhaps by several processes. After a kill, what `mark` has noted is kept.

    Attributes:
        path: of the finished gallery.
        rows: `[N,D]`, mapped into memory and shared by all processes.
        state: `[N]` uint8, shared too: `WRITTEN`, `UNREADABLE`, or 0 for an image that is still to do.
        found: how many images an earlier attempt has written.
    """

    path: Path
    rows: np.memmap
    state: np.memmap
    found: int

    @staticmethod
    def places(path: Path) -> tuple[Path, Path, Path]:
        """Returns the paths of the draft's three files: rows, state, and the description of what is being written."""
        return tuple(path.with_name(f".{path.name}.{end}") for end in ("rows", "state", "json"))  # type: ignore[return-value]

    @classmethod
    def begin(cls, path: Path, what: dict[str, Any]) -> None:
        """Makes the files of a draft; only one process may call it. Files of an earlier attempt at the same are kept.

        Args:
            path: of the gallery.
            what: `shape`, `dtype`, and everything else on which the content depends.
        """
        rows, state, header = cls.places(path)
        if header.is_file() and header.read_text() == json.dumps(what) and rows.is_file() and state.is_file():
            return
        for file in (header, rows, state):
            file.unlink(missing_ok=True)
        shape = tuple(what["shape"])
        np.lib.format.open_memmap(rows, mode="w+", dtype=what["dtype"], shape=shape).flush()
        np.lib.format.open_memmap(state, mode="w+", dtype=np.uint8, shape=shape[:1]).flush()
        write_atomically(header, json.dumps(what))

    @classmethod
    def open(cls, path: Path) -> "Draft":
        """Opens the draft of a gallery, which `begin` has made."""
        rows, state, _ = cls.places(path)
        opened = [np.lib.format.open_memmap(file, mode="r+") for file in (rows, state)]
        return cls(path, opened[0], opened[1], int((opened[1] == WRITTEN).sum()))

    def mark(self, rows: Sequence[int], how: int) -> None:
        """Notes that some rows are done, as `WRITTEN` or `UNREADABLE`. The rows are flushed to the disk first."""
        if len(rows):
            self.rows.flush()
            self.state[list(rows)] = how
            self.state.flush()

    def finish(self, paths: Sequence[str], weights: str) -> int:
        """Writes the finished gallery, without images that could not be read, and removes the draft.

        Args:
            paths: of all N images.
            weights: the digest of the weights.

        Returns:
            How many images the gallery has.

        Raises:
            UserError: a path is not UTF-8, so Parquet cannot hold it.
        """
        import pyarrow

        parquet = need_pyarrow()
        kept = np.flatnonzero(self.state == WRITTEN)
        try:
            table = pyarrow.table({"path": pyarrow.array([paths[row] for row in kept.tolist()], pyarrow.string())})
        except UnicodeEncodeError as error:
            name = os.fsencode(error.object).decode("utf-8", "replace")
            raise UserError(f"the name of {name} is not UTF-8, which Parquet needs: rename the file.") from None
        own, state, header = self.places(self.path)
        self.path.with_suffix(".json").unlink(missing_ok=True)  # it belongs to an older gallery
        if len(kept) < len(self.state):
            with atomic_path(own) as new:
                whole = np.lib.format.open_memmap(
                    new, mode="w+", dtype=self.rows.dtype, shape=(len(kept), *self.rows.shape[1:])
                )
                for part in blocks(len(kept)):
                    whole[part] = self.rows[kept[part]]
                whole.flush()
        with atomic_path(self.path.with_suffix(".parquet")) as new:
            parquet.write_table(table, new)
        sums = {"embeddings": checksum_of(own), "paths": checksum_of(self.path.with_suffix(".parquet"))}
        os.replace(own, self.path)
        about = {"weights": weights, "shape": [len(kept), *self.rows.shape[1:]], "dtype": str(self.rows.dtype)}
        write_atomically(self.path.with_suffix(".json"), json.dumps(about | sums, indent=1) + "\n")
        for file in (state, header):
            file.unlink()
        return len(kept)


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Locks a gallery while it is written; only the first of the writing processes does so.

    Raises:
        UserError: another command is writing the same gallery.
    """

    def taken() -> None:
        raise UserError(f"{path} is being written by another process: wait for it, or name another file with -o.")

    with alone(path.with_name(f".{path.name}.lock"), taken):
        yield
