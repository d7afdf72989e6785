"""Unpacks archives and folders into one folder: never outside it, over files of the user, or beyond the disk."""

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from dml.errors import UserError

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tbz2", ".txz")
OTHERS = (*ARCHIVES, ".gz", ".bz2", ".xz", ".7z", ".rar")
LITTER = ("__MACOSX", ".DS_Store", "Thumbs.db")
SPARE = 10**9  # bytes that unpacking leaves free on the disk
MOST = 5_000_000  # entries that an archive may have


class DamagedArchive(UserError):
    """An archive is cut short, or the file is no archive."""


def take(path: Path, staging: Path, beside: Sequence[Path] = ()) -> None:
    """Puts a source into the staging folder: an archive's content, a folder's content, or a single file.

    Archives directly inside a folder are unpacked too.

    Args:
        path: of the source.
        staging: folder to fill.
        beside: folders that are left out of a source: those of this work, and those that the source lies in, so that
            links that lead back end.

    Raises:
        DamagedArchive: an archive is cut short, or is no archive.
        UserError: an archive has links or names that lead out of the folder, a file exists already, the source is no
            regular file, or the content is larger than the disk has room for.
    """
    if path.is_dir():
        beside = (*beside, path)
        for inner in sorted(path.iterdir()):
            if _litter(inner.name):
                continue
            if inner.is_dir():
                if any(one.exists() and inner.samefile(one) for one in beside):
                    continue
                (staging / inner.name).mkdir(exist_ok=True)
                take(inner, staging / inner.name, beside)
            elif inner.name.lower().endswith(OTHERS):
                take(inner, staging)
            else:
                _link(inner, staging / inner.name)
        return
    if not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{path} is neither a file nor a folder.")
    with path.open("rb") as file:
        start = file.read(512)
    if b"<html" in start.lower() or b"<!doctype html" in start.lower():
        raise DamagedArchive(f"{path} is a web page and no archive: its address is dead or wants a login.")
    try:
        if start.startswith((b"PK\3\4", b"PK\5\6")):
            with zipfile.ZipFile(path) as archive:
                _unzip(archive, path, staging)
        elif path.name.lower().endswith(OTHERS) or tarfile.is_tarfile(path):
            if not tarfile.is_tarfile(path):
                raise DamagedArchive(f"{path} is neither a zip nor a tar archive, or is cut short: fetch it again.")
            with tarfile.open(path) as archive:
                _untar(archive, path, staging)
        else:
            _link(path, staging / path.name)
    except UserError:
        raise
    except Exception as error:  # of zipfile, tarfile, zlib or lzma, for damaged bytes
        if isinstance(error, OSError) and error.errno:
            raise
        raise DamagedArchive(f"{path} is cut short or damaged: fetch it again ({error}).") from None


def _litter(name: str) -> bool:
    """Says whether an entry is one that operating systems leave behind."""
    parts = PurePosixPath(name).parts
    return any(part in LITTER or part.startswith("._") for part in parts)


def _link(path: Path, to: Path) -> None:
    """Links a user's file into the folder, or copies it if the file system cannot link it."""
    if os.path.lexists(to):
        raise UserError(f"two sources hold {to.name}: give only one of them as source.")
    whole = os.path.realpath(path)
    try:
        os.link(whole, to)
    except OSError:
        shutil.copyfile(whole, to)


def _unzip(archive: zipfile.ZipFile, path: Path, staging: Path) -> None:
    room = _Room(path, staging)
    for entry in tqdm(archive.infolist(), desc=f"unpacking {path.name}", delay=1, leave=False):
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise UserError(f"{path} holds a link ({entry.filename}), which no data set needs: fetch it elsewhere.")
        if entry.flag_bits & 1:
            raise UserError(f"{path} is encrypted: unpack it with its password, and give the folder as source.")
        target = _target(path, entry.filename, staging)
        if _litter(entry.filename):
            continue
        if entry.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        room.take(entry.file_size)
        with archive.open(entry) as content:
            _write(path, entry.filename, content, target)


def _untar(archive: tarfile.TarFile, path: Path, staging: Path) -> None:
    room = _Room(path, staging)
    for entry in tqdm(archive, desc=f"unpacking {path.name}", delay=1, leave=False):
        if not entry.isfile() and not entry.isdir():
            raise UserError(
                f"{path} holds a link or a device ({entry.name}), which no data set needs: fetch it elsewhere."
            )
        target = _target(path, entry.name, staging)
        if _litter(entry.name):
            continue
        if entry.isdir():
            target.mkdir(parents=True, exist_ok=True)
            continue
        room.take(entry.size)
        content = archive.extractfile(entry)
        assert content is not None
        _write(path, entry.name, content, target)


class _Room:
    """Counts what an archive unpacks to, since a small archive may claim any size, and compares it with the disk."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.path, self.place = path, staging.parent
        self.free = shutil.disk_usage(staging).free - SPARE
        self.size = self.entries = 0

    def take(self, size: int) -> None:
        """Counts an entry of this size. Raises UserError if it is too much."""
        self.size += size
        self.entries += 1
        if self.size > self.free:
            raise UserError(
                f"{self.path} unpacks to {self.size / 1e9:.1f} GB and more, and {self.place} has "
                f"{max(0, self.free) / 1e9:.1f} GB to spare: free some disk space."
            )
        if self.entries > MOST:
            raise UserError(
                f"{self.path} holds more than {MOST} files, more than any of these data sets: it is a wrong file."
            )


def _target(path: Path, name: str, staging: Path) -> Path:
    """Returns where an entry is to be written. Raises UserError for a name that leads out of the folder."""
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or (pure.parts and pure.parts[0].endswith(":")):
        raise UserError(f"{path} holds {name!r}, which leads out of its folder: fetch it elsewhere.")
    return staging / pure


def _write(path: Path, name: str, content: IO[bytes], target: Path) -> None:
    if target.exists():
        raise UserError(
            f"{path} holds {name!r}, which exists already, from this or another source: remove one of the two."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        shutil.copyfileobj(content, file, 2**20)
