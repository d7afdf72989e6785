"""Many paths in little memory, with the size and time of each file.

The paths are one array of bytes and one of offsets: ten million paths take little more memory than their characters.
The alternatives are worse: NumPy's fixed-width strings take four bytes for each character of the longest path, its
StringDType cannot hold file names that are not UTF-8, and every worker that reads a list of str touches and so copies
it.
"""

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple, overload

import numpy as np

CHUNK = 1 << 16  # paths that are held as str at a time

NO_FILE, CLOSED = -1, -2  # stand in place of a size: no such file; its folder may not be read, or it links to nothing


class Files(NamedTuple):
    """Sizes, times and identities of the files at N paths.

    Attributes:
        sizes: `[N]` int64, in bytes; `NO_FILE` if there is no file, `CLOSED` if its folder may not be read or it
            is a link to nothing.
        times: `[N]` int64, of the last change, in nanoseconds; 0 if there is no size.
        places: `[N]` int64; two paths have the same number if they lead to the same file through linked folders.
    """

    sizes: np.ndarray
    times: np.ndarray
    places: np.ndarray


class Paths:
    """A column of N paths or names. Indexing with an int gives a str; indexing with an array gives a column again.

    Args:
        text: `[bytes]` uint8, each path in UTF-8 followed by a zero byte; names that are not UTF-8 keep their bytes.
        ends: `[N]` int64, where each path ends in `text`, its zero byte included.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self._text, self._ends = text, ends

    @classmethod
    def of(cls, paths: Iterable[str]) -> "Paths":
        """Makes a column of these paths in their order; they are read once, so an iterator is enough.

        Raises:
            ValueError: a path holds a zero byte, which no file name can have.
        """
        left, parts, ends, end = iter(paths), [np.empty(0, np.uint8)], [np.empty(0, np.int64)], 0
        while chunk := list(islice(left, CHUNK)):
            part = np.frombuffer(("\0".join(chunk) + "\0").encode("utf-8", "surrogateescape"), np.uint8)
            zeros = np.flatnonzero(part == 0)
            if len(zeros) != len(chunk):
                raise ValueError("a path holds a zero byte, which no file name can have")
            parts.append(part)
            ends.append(zeros + (1 + end))
            end += len(part)
        return cls(np.concatenate(parts), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: np.ndarray) -> "Paths": ...
    def __getitem__(self, at: int | np.ndarray) -> "str | Paths":
        """Returns one row as str, or rows `[n]` as a column in this order."""
        if isinstance(at, np.ndarray):
            return self._take(np.arange(len(self))[at])
        row = range(len(self))[at]
        return self._read(row, row + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for chunk in self.chunks():
            yield from chunk

    def chunks(self) -> Iterator[list[str]]:
        """Yields all rows as lists of str, `CHUNK` at a time."""
        return (self._read(first, min(first + CHUNK, len(self))) for first in range(0, len(self), CHUNK))

    def tolist(self) -> list[str]:
        return list(self)

    @cached_property
    def files(self) -> Files:
        """Sizes, times and places of the files, looked up at the first access and remembered."""
        sizes, times = np.full(len(self), NO_FILE, np.int64), np.zeros(len(self), np.int64)
        keys, folders, end = np.empty(len(self), np.int64), _Folders(), 0
        inodes = np.full(len(self), NO_FILE, np.int64)
        for chunk in self.chunks():
            there, keys[end : end + len(chunk)] = _places(chunk, folders)
            rows = end + np.array(there, np.int64)
            found = np.array([_status(chunk[i]) for i in there], np.int64).reshape(-1, 3).T
            sizes[rows], times[rows], inodes[rows] = found
            end += len(chunk)
        _follow_links(self, keys, inodes)
        return Files(sizes, times, self._numbered(keys))

    def stamps(self, rows: np.ndarray) -> Iterator[str]:
        """Yields path, size and time of each file of these rows `[n]`, in this order; skips rows without a file."""
        for at in range(0, len(rows), CHUNK):
            some = rows[at : at + CHUNK]
            columns = (self.files.sizes[some].tolist(), self.files.times[some].tolist())
            for path, size, time in zip(self[some], *columns, strict=True):
                if size != NO_FILE:
                    yield f"{path}\0?" if size == CLOSED else f"{path}\0{size}\0{time}"

    def _numbered(self, keys: np.ndarray) -> np.ndarray:
        """Numbers the files by their hashes; paths with equal hashes are compared themselves."""
        _, number, times = np.unique(keys, return_inverse=True, return_counts=True)
        rows = np.flatnonzero(times[number] > 1)
        exact: dict[str, int] = {}
        folder = _Folders()
        for row in rows.tolist():
            at, name = os.path.split(path := self[row])
            real = os.path.realpath(path) if os.path.islink(path) else os.path.join(folder.real(at), name)
            number[row] = len(times) + exact.setdefault(real, len(exact))
        return number

    def _read(self, first: int, end: int) -> list[str]:
        start = int(self._ends[first - 1]) if first else 0
        text = self._text[start : int(self._ends[end - 1])].tobytes()
        return text.decode("utf-8", "surrogateescape").split("\0")[:-1]

    def _take(self, rows: np.ndarray) -> "Paths":
        starts = np.concatenate([[0], self._ends[:-1]])[rows]
        lengths = self._ends[rows] - starts
        ends = np.cumsum(lengths)
        text = np.empty(ends[-1] if len(ends) else 0, np.uint8)
        for at in range(0, len(rows), CHUNK):  # in parts: an index of the bytes takes eight times their memory
            some = slice(at, at + CHUNK)
            first = ends[at] - lengths[at]
            shift = starts[some] - (ends[some] - lengths[some])
            text[first : ends[some][-1]] = self._text[
                np.repeat(shift, lengths[some]) + np.arange(first, ends[some][-1])
            ]
        taken = Paths(text, ends)
        if "files" in self.__dict__:
            taken.files = Files(*(column[rows] for column in self.files))
        return taken


class _Folders:
    """Real paths of folders, remembered. A folder inside a missing folder is known to be missing without a look."""

    def __init__(self) -> None:
        self._real: dict[str, str] = {}
        self._gone: set[str] = set()

    def real(self, path: str) -> str:
        """Returns the path of a folder with all links resolved."""
        if path not in self._real:
            self._look_at(path)
        return self._real[path]

    def may_exist(self, path: str) -> bool:
        """Says whether a folder exists, or lies where that may not be read. Call `real` first."""
        return path not in self._gone

    def _look_at(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        plain = parent and name not in ("", ".", "..")
        above = self.real(parent) if plain else ""
        gone = (plain and parent in self._gone) or not _may_exist(path)
        if not plain or (not gone and os.path.islink(path)):
            self._real[path] = os.path.realpath(path)
        else:
            self._real[path] = path if above == parent else os.path.join(above, name)
        if gone:
            self._gone.add(path)


def _may_exist(folder: str) -> bool:
    try:
        os.stat(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # the error is reported later, for each file in it
        return True
    return True


def _places(paths: list[str], folders: _Folders) -> tuple[list[int], list[int]]:
    """Returns which of the paths lie in a folder that exists, and for each path a hash of its real path."""
    there, keys, last, exists, moved = [], list(map(hash, paths)), None, False, False
    for i, path in enumerate(paths):
        at, slash, name = path.rpartition("/")
        if at != last:  # looked up once for neighbours in the same folder
            real, last = folders.real(at or slash), at
            exists, moved = folders.may_exist(at or slash), real != at
        if moved:
            keys[i] = hash(os.path.join(real, name))
        if exists:
            there.append(i)
    return there, keys


def _follow_links(paths: Paths, keys: np.ndarray, inodes: np.ndarray) -> None:
    """Gives links to a file the key of that file.

    Args:
        paths: N paths.
        keys: `[N]`, hashes of real paths but for links to files; changed in place.
        inodes: `[N]`, the file system's numbers of the files that paths lead to; `NO_FILE` for others.
    """
    rows = np.flatnonzero(inodes != NO_FILE)
    _, first, number = np.unique(inodes[rows], return_index=True, return_inverse=True)
    other = np.zeros(len(first), bool)
    other[number[keys[rows] != keys[rows][first[number]]]] = True  # one number, but several paths
    for row in rows[other[number]].tolist():
        keys[row] = hash(os.path.realpath(paths[row]))


def _status(path: str) -> tuple[int, int, int]:
    """Returns size and time of a file, and its number in the file system, as far as an int64 holds it."""
    try:
        status = os.stat(path)
    except PermissionError:
        return CLOSED, 0, NO_FILE
    except (OSError, ValueError):
        return (CLOSED if os.path.islink(path) else NO_FILE), 0, NO_FILE
    return status.st_size, status.st_mtime_ns, status.st_ino & (2**63 - 1)
