"""`python -m dml.data.prepare dataset=NAME [source=ARCHIVE,FOLDER,URL...]`: a benchmark into its official layout.

Takes archives that are there already (zip, tar, Parquet; also as Kaggle and Hugging Face pack Cars196 and SOP), or
fetches from the mirrors in conf/dataset/NAME.yaml; unpacks, verifies by the dataset's own reader, and only then puts
the folder where dataset.root says, with a card, dataset.json. A download that broke off goes on with the next start.

    python -m dml.data.prepare dataset=cub200
    python -m dml.data.prepare dataset=cars196 source=archive.zip,car_devkit.tgz
    python -m dml.data.prepare dataset=sop source=https://mirror.example/Stanford_Online_Products.zip
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlparse

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

import dml
from dml.build import open_dataset
from dml.command import CONF, ending, hydra_sentence
from dml.data.fetch import fetch
from dml.data.records import Records
from dml.errors import UserError
from dml.files import replace_file

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tbz2", ".txz")
OTHERS = (*ARCHIVES, ".gz", ".bz2", ".xz", ".7z", ".rar")
LITTER = ("__MACOSX", ".DS_Store", "Thumbs.db")
DEPTH = 5  # folders in folders that a re-packaging may add
SPARE = 10**9  # bytes that unpacking leaves free
MOST = 5_000_000  # entries of an archive


class Damaged(UserError):
    """An archive that is cut short or none."""


def prepare(config: DictConfig, sources: Sequence[str] = ()) -> Path:
    """The folder of the configured data set, made if it is not there.

    Args:
        config: composed, with the `download` of a dataset's YAML.
        sources: archives, folders and URLs; none: the mirrors.

    Raises:
        UserError: a data set that cannot be fetched, sources that do not fit it, or a folder that holds something else.
            Nothing is left where the data set was to be, and downloads are kept.
    """
    if config.download is None or config.dataset.root is None:
        raise UserError("this data set has no layout of its own to prepare: give dataset=NAME, as dataset=cub200.")
    root = Path(config.dataset.root).resolve()
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        if _holds_something(root):
            return _found(config, root)
        if root.is_mount():
            raise UserError(f"{root} is a mount point, which cannot be put in place whole: name a folder below it.")
        with (root.parent / f".{root.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _holds_something(root):  # made meanwhile
                return _found(config, root)
            return _make(config, root, sources)
    except OSError as error:
        raise UserError(f"{error.filename or root} cannot be written or read ({error.strerror}).") from error


def _holds_something(root: Path) -> bool:
    return root.exists() and (not root.is_dir() or any(root.iterdir()))


def _found(config: DictConfig, root: Path) -> Path:
    """Raises UserError where the folder holds something else."""
    try:
        records = open_dataset(config)
    except UserError as error:
        raise UserError(
            f"{root} is there already, but: {error}. Remove it, or name another with dataset.root."
        ) from None
    if not (root / "dataset.json").exists() and os.access(root, os.W_OK):
        _write_card(config, root, records, [])
    print(f"{root} is complete: {_counts(records)}.")
    return root


def _make(config: DictConfig, root: Path, sources: Sequence[str]) -> Path:
    staging, downloads = root.parent / f".{root.name}.unpacking", root.parent / f".{root.name}.downloads"
    shutil.rmtree(staging, ignore_errors=True)
    files = [path for source in sources for path in _given(source, downloads)] or _fetched(config, downloads)
    staging.mkdir()
    try:
        for path in files:
            try:
                _take(path, staging)
            except Damaged:
                if downloads in path.parents:
                    path.unlink()  # so that the next start fetches it anew
                raise
        place = _arranged(config, staging)
        moved = config.copy()
        OmegaConf.update(moved, "dataset.root", str(place))
        try:
            records = open_dataset(moved)
        except UserError as error:
            raise UserError(f"what was unpacked does not hold: {error}".replace(f"{place}", "it")) from None
        _write_card(config, place, records, files)
        if root.is_dir():
            root.rmdir()
        os.replace(place, root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)
    print(f"{root}: {_counts(records)}.")
    return root


def _given(source: str, downloads: Path) -> list[Path]:
    if "://" in source:
        return [_download(source, downloads)]
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"source={source} is neither a file, a folder nor a URL.")
    return [path]


def _download(url: str, downloads: Path, name: str | None = None, md5: str | None = None) -> Path:
    """Each URL has a folder of its own: mirrors give files of one name."""
    try:
        name = name or Path(unquote(urlparse(url).path)).name or "download"
    except ValueError as error:
        raise UserError(f"source={url} is no URL ({error}).") from None
    path = downloads / hashlib.sha256(url.encode()).hexdigest()[:8] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fetch(url, path, md5=md5)
    return path


def _fetched(config: DictConfig, downloads: Path) -> list[Path]:
    """From the first mirror of each file that gives it.

    Raises:
        UserError: with what to do by hand, where there is no mirror or none answers.
    """
    then = f"Then: python -m dml.data.prepare dataset={_choice()} source=FILE,..."
    by_hand = f"{' '.join(config.download.by_hand.split())} {then}"
    if not config.download.files:
        raise UserError(f"no public mirror gives this data set without asking. {by_hand}")
    paths = []
    for file in config.download.files:
        said = []
        for mirror in file.mirrors:
            try:
                paths.append(_download(mirror, downloads, file.name, file.get("md5")))
                break
            except UserError as error:
                said.append(str(error))
        else:
            raise UserError(f"{' '.join(said)} By hand: {by_hand}")
    return paths


def _choice() -> str:
    """The dataset as it was typed."""
    typed = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("dataset=")]
    return typed[-1] if typed else "NAME"


def _take(path: Path, staging: Path) -> None:
    """An archive's content, a folder's with that of archives in it, or the file itself, into the staging folder."""
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if _litter(inner.name):
                continue
            if inner.is_dir():
                (staging / inner.name).mkdir(exist_ok=True)
                _take(inner, staging / inner.name)
            elif inner.name.lower().endswith(OTHERS):
                _take(inner, staging)
            else:
                _link(inner, staging / inner.name)
        return
    with path.open("rb") as file:
        start = file.read(512)
    if b"<html" in start.lower() or b"<!doctype html" in start.lower():
        raise Damaged(f"{path} is a web page and no archive: its address wants a login, or is dead.")
    try:
        if start.startswith((b"PK\3\4", b"PK\5\6")):
            with zipfile.ZipFile(path) as archive:
                _unzip(archive, path, staging)
        elif path.name.lower().endswith(OTHERS) or tarfile.is_tarfile(path):
            if not tarfile.is_tarfile(path):
                raise Damaged(f"{path} is neither a zip nor a tar archive, or is cut short: fetch it again.")
            with tarfile.open(path) as archive:
                _untar(archive, path, staging)
        else:
            _link(path, staging / path.name)
    except UserError:
        raise
    except Exception as error:  # zipfile's, tarfile's, zlib's, lzma's: whatever damaged bytes lead to
        if isinstance(error, OSError) and error.errno:
            raise
        raise Damaged(f"{path} is cut short or damaged: fetch it again ({error}).") from None


def _litter(name: str) -> bool:
    """What operating systems leave."""
    parts = PurePosixPath(name).parts
    return any(part in LITTER or part.startswith("._") for part in parts)


def _link(path: Path, to: Path) -> None:
    """A file of the user's stays where it is; without a copy where the file system can."""
    if os.path.lexists(to):
        raise UserError(f"two sources hold {to.name}: name one of them.")
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
    """What the disk has for an archive, whose few bytes may claim any size."""

    def __init__(self, path: Path, staging: Path) -> None:
        self.path, self.place = path, staging.parent
        self.free = shutil.disk_usage(staging).free - SPARE
        self.size = self.entries = 0

    def take(self, size: int) -> None:
        """Raises UserError where an entry of this size is too much."""
        self.size += size
        self.entries += 1
        if self.size > self.free:
            raise UserError(
                f"{self.path} unpacks to {self.size / 1e9:.1f} GB and more, and {self.place} has "
                f"{max(0, self.free) / 1e9:.1f} GB to spare."
            )
        if self.entries > MOST:
            raise UserError(f"{self.path} holds more than {MOST} files, more than any of these data sets.")


def _target(path: Path, name: str, staging: Path) -> Path:
    """Raises UserError for a name that leads out of the folder."""
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or (pure.parts and pure.parts[0].endswith(":")):
        raise UserError(f"{path} holds {name!r}, which leads out of its folder: fetch it elsewhere.")
    return staging / pure


def _write(path: Path, name: str, content: IO[bytes], target: Path) -> None:
    if target.exists():
        raise UserError(f"{path} holds {name!r}, which is there already, from it or from another source.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        shutil.copyfileobj(content, file, 2**20)


def _arranged(config: DictConfig, staging: Path) -> Path:
    """The folder below `staging` that has the layout, after re-packagings were brought into it.

    Raises:
        UserError: none has.
    """
    if config.download.get("arrange"):
        get_method(config.download.arrange)(staging)
    layouts = [list(layout) for layout in config.download.layouts]
    for folder in _folders(staging):
        if any(all((folder / name).exists() for name in layout) for layout in layouts):
            return folder
    wanted = " or ".join(" with ".join(layout) for layout in layouts)
    seen = ", ".join(sorted(path.name for path in staging.iterdir())[:8]) or "nothing"
    raise UserError(f"the sources hold {seen}, and nowhere {wanted}: {' '.join(config.download.by_hand.split())}")


def _folders(staging: Path) -> Iterator[Path]:
    """The nearest first."""
    level = [staging]
    for _ in range(DEPTH):
        yield from level
        level = [inner for folder in level for inner in sorted(folder.iterdir()) if inner.is_dir()]
        if len(level) > 1000:  # of images
            return


def _write_card(config: DictConfig, root: Path, records: Records, files: Sequence[Path]) -> None:
    parts = {}
    for role in dict.fromkeys(records.roles.tolist()):
        rows = records.rows(role)
        parts[role] = {"classes": len(np.unique(records.labels[rows])), "images": len(rows)}
    card = {
        "dataset": records.name,
        "parts": parts,
        "page": config.download.page,
        "sources": [{"name": path.name, **_fingerprint(path)} for path in files],
        "date": time.strftime("%Y-%m-%d"),
        "dml": dml.__version__,
    }
    replace_file(root / "dataset.json", json.dumps(card, indent=1, ensure_ascii=False) + "\n")


def _fingerprint(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return {}
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _counts(records: Records) -> str:
    roles = dict.fromkeys(records.roles.tolist())
    return f"{records.name}, " + ", ".join(
        f"{role} {len(rows)} images of {len(np.unique(records.labels[rows]))} classes"
        for role in roles
        if len(rows := records.rows(role))
    )


@ending(files=False)
def main() -> None:
    typed = sys.argv[1:]
    if not typed or {"-h", "--help"} & set(typed):
        print(__doc__)
        raise SystemExit(0 if typed else 2)
    sources = [one for a in typed if a.startswith("source=") for one in a.removeprefix("source=").split(",") if one]
    overrides = [a for a in typed if not a.startswith("source=")]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides=overrides)
        prepare(config, sources)
    except (HydraException, OmegaConfBaseException) as mistake:
        raise UserError(hydra_sentence(mistake)) from mistake


if __name__ == "__main__":
    main()
