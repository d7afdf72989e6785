"""Gallery files: embeddings that need not fit into memory, with the paths of the images and a digest of the weights.

N images, D width. `gallery.npy` is `[N,D]` float32 or float16, which NumPy and other programs map into memory.
`gallery.parquet` has a column `path` in the same order. `gallery.json` is written last; it has the digest of the
weights and the checksums of the other two. zarr and HDF5 were passed over: they are for arrays that grow, and the size
of this one is known.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from dml.errors import UserError, no_room
from dml.files import alone, atomic_path, read_json, sha256_of, torn, write_atomically, write_through
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
    return sha256_of(file)[:32]


def blocks(count: int, size: int = ROWS) -> Iterator[slice]:
    """Yields slices of `size` that cover 0..count; the last one may be shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def has_values(path: Path, *names: str) -> bool:
    """Returns whether a file is JSON and has values of these names."""
    try:
        found = read_json(path)
    except UserError:
        return False
    return isinstance(found, dict) and set(names) <= found.keys()


def check_place(path: Path) -> None:
    """Checks that a gallery may be written, before the work on it begins.

    Raises:
        UserError: the path is a folder, or one of the three files that the gallery would replace is of something else.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file with -o.")
    about, table, header = path.with_suffix(".json"), path.with_suffix(".parquet"), Draft.places(path)[-1]
    known = has_values(about, "weights", "shape", "dtype", "embeddings", "paths")
    rows = known and _has_rows(path, read_json(about))
    begun = has_values(header, "shape", "dtype")
    if begun and not rows:  # after a kill rows and paths may be there before the description
        rows = _has_rows(path, read_json(header), left_out=True)
    for file, ours in ((about, known), (table, known or begun), (path, rows)):
        if file.exists() and not ours:
            raise UserError(
                f"{file} does not belong to a gallery, and {path.name} would replace it: move it away, or name another "
                "file with -o."
            )


def _has_rows(path: Path, said: dict[str, Any], *, left_out: bool = False) -> bool:
    """Returns whether a file is an array of the shape and type that a description says. With `left_out` it may have
    fewer rows, since images that cannot be read are left out."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        count, width = said["shape"]
        fits = found.shape == (count, width) or (left_out and found.shape[1:] == (width,) and len(found) < count)
    except Exception:  # NumPy's, for a foreign file of any kind
        return False
    return bool(fits) and str(found.dtype) == said["dtype"]


def check_names(files: Sequence[Path]) -> None:
    """Raises UserError if the name of a file is not UTF-8, so that Parquet cannot hold it."""
    odd = [file for file in files if not _is_text(str(file))]
    if odd:
        name = os.fsencode(odd[0]).decode("utf-8", "replace")
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise UserError(
            f"the name of {name}{more} is not UTF-8, which Parquet needs: rename what is not, or write a .npz file."
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the system into a UserError that names the gallery, since those of `write` name no file."""
    try:
        yield
    except OSError as error:
        remedy = "make room, or " if no_room(error) else ""
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): {remedy}name another file with -o."
        ) from error


def _new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
    """Makes a file of zeros that is mapped into memory. Its room on the disk is taken at once, since the system kills a
    process that writes to mapped memory when the disk is full."""
    array: np.memmap = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    array.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:  # some file systems cannot take it
            if no_room(error):
                raise
    return array


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
    def places(path: Path) -> tuple[Path, Path, Path, Path]:
        """Returns the paths of the draft's files: rows, state, stamps, and the description of what is being written."""
        ends = ("rows", "state", "stamps", "json")
        return tuple(path.with_name(f".{path.name}.{end}") for end in ends)  # type: ignore[return-value]

    @classmethod
    def begin(cls, path: Path, what: dict[str, Any], stamps: np.ndarray) -> None:
        """Makes the files of a draft; only one process may call it, which holds the lock. What an earlier attempt at
        the same has written is kept, but for images that have changed since. Temporary files of a kill are removed.

        Args:
            path: of the gallery.
            what: `shape`, `dtype`, and everything else on which the content depends.
            stamps: `[N,2]` int64, size and time of each image file.

        Raises:
            UserError: they cannot be written.
        """
        rows, state, seen, header = cls.places(path)
        with writing(path):
            _remove_torn(path)
            same = header.is_file() and header.read_text() == json.dumps(what)
            if same and not rows.exists() and _has_rows(path, what):  # killed when `finish` had given them their name
                os.replace(path, rows)
            if same and all(file.is_file() for file in (rows, state, seen)):
                changed = (np.load(seen) != stamps).any(1)
                if changed.any():
                    states = np.lib.format.open_memmap(state, mode="r+")
                    states[changed] = 0
                    states.flush()  # before the stamps, so that a kill in between is made up for
                    _save_stamps(seen, stamps)
                return
            cls.remove(path)
            try:
                shape = tuple(what["shape"])
                _new_array(rows, what["dtype"], shape)
                _new_array(state, np.uint8, shape[:1])
                _save_stamps(seen, stamps)
                write_atomically(header, json.dumps(what))
            except OSError:
                cls.remove(path)  # else they would fill the disk
                raise

    @classmethod
    def remove(cls, path: Path) -> None:
        """Removes the files of a draft, first the one without which the others count for nothing."""
        for file in reversed(cls.places(path)):
            file.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path) -> "Draft":
        """Opens the draft of a gallery, which `begin` has made. Raises UserError if it cannot be opened."""
        with writing(path):
            opened = [np.lib.format.open_memmap(file, mode="r+") for file in cls.places(path)[:2]]
        return cls(path, opened[0], opened[1], int((opened[1] == WRITTEN).sum()))

    def mark(self, rows: Sequence[int], how: int) -> None:
        """Notes that some rows are done, as `WRITTEN` or `UNREADABLE`. The rows are flushed to the disk first.
        Raises UserError if they cannot be written."""
        if len(rows):
            with writing(self.path):
                self.rows.flush()
                self.state[list(rows)] = how
                self.state.flush()

    def finish(self, paths: Sequence[str], weights: str) -> int:
        """Writes the finished gallery, without images that could not be read, and removes the draft. If it cannot be
        written, the draft and an older gallery stay as they are.

        Args:
            paths: of all N images, in UTF-8.
            weights: the digest of the weights.

        Returns:
            How many images the gallery has.

        Raises:
            UserError: it cannot be written.
        """
        import pyarrow

        parquet = need_pyarrow()
        kept = np.flatnonzero(self.state == WRITTEN)
        table = pyarrow.table({"path": pyarrow.array([paths[row] for row in kept.tolist()], pyarrow.string())})
        own = self.places(self.path)[0]
        whole = len(kept) == len(self.state)
        # All are whole before the first gets its name. Names are given in reverse order, so the description is last: an
        # older one has other checksums, with which the new files are not read.
        with writing(self.path), ExitStack() as named:
            about = named.enter_context(atomic_path(self.path.with_suffix(".json")))
            of_paths = named.enter_context(atomic_path(self.path.with_suffix(".parquet")))
            with of_paths.open("wb") as file:  # opened here, since pyarrow's errors are longer
                parquet.write_table(table, file)
            rows = own if whole else named.enter_context(atomic_path(self.path))
            shape = (len(kept), *self.rows.shape[1:])
            if not whole:
                copy = _new_array(rows, self.rows.dtype, shape)
                for part in blocks(len(kept)):
                    copy[part] = self.rows[kept[part]]
                copy.flush()
            content = {"weights": weights, "shape": shape, "dtype": str(self.rows.dtype)}
            sums = {"embeddings": checksum_of(rows), "paths": checksum_of(of_paths)}
            write_through(about, json.dumps(content | sums, indent=1) + "\n")
            if whole:
                os.replace(own, self.path)
        self.remove(self.path)
        return len(kept)


def _remove_torn(path: Path) -> None:
    """Removes the temporary files that a kill has left of a gallery's files."""
    _, _, stamps, header = Draft.places(path)
    for file in (path, path.with_suffix(".json"), path.with_suffix(".parquet"), stamps, header):
        for left in torn(path.parent, file.suffix):
            if left.stem == f".{file.name}":
                left.unlink(missing_ok=True)


def _save_stamps(path: Path, stamps: np.ndarray) -> None:
    with atomic_path(path) as new, new.open("wb") as file:
        np.save(file, stamps)


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Locks a gallery while it is written, and makes its folder; only the first of the writing processes does so.

    Raises:
        UserError: another command is writing the same gallery, or the folder cannot be made.
    """

    def taken() -> None:
        raise UserError(f"{path} is being written by another process: wait for it, or name another file with -o.")

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_name(f".{path.name}.lock"), taken):
        yield
