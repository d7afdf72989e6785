"""Prepares a benchmark from its archives: fetches, unpacks, verifies, and puts it into its official layout."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

import dml
from dml.configuration.options import check_plain
from dml.data.dataset import open_dataset
from dml.data.records import Records
from dml.data.unpack import DamagedArchive, take
from dml.errors import UserError
from dml.fetch import fetch
from dml.files import alone, folder_of_url, write_atomically

DEPTH = 5  # levels of folders in which the layout is looked for: re-packagings nest it


def prepare(config: DictConfig, sources: Sequence[str] = ()) -> Path:
    """Returns the folder of the configured data set, and makes it if it does not exist.

    Args:
        config: composed, with the `download` section of a dataset's YAML.
        sources: archives, folders and URLs; none: the mirrors are used.

    Raises:
        UserError: the data set cannot be fetched, the sources do not fit it, or its folder holds something else. The
            data set's folder is then not made, and downloads are kept.
    """
    if config.download is None or config.dataset.root is None:
        raise UserError(
            "this data set has no official layout to prepare: give dataset=NAME of a benchmark, as dataset=cub200."
        )
    check_plain({"dataset": OmegaConf.to_container(config.dataset, resolve=True)})
    root = Path(config.dataset.root).resolve()
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        if _holds_something(root):
            if sources:
                print(f"{root} is there already, so the sources are not used.")
            return _found(config, root)
        if root.is_mount():
            raise UserError(
                f"{root} is a mount point, which cannot be replaced by a finished folder: set dataset.root to a folder "
                "below it."
            )
        with alone(root.parent / f".{root.name}.lock"):
            if _holds_something(root):  # another process made it meanwhile
                return _found(config, root)
            return _make(config, root, sources)
    except OSError as error:
        raise UserError(f"{error.filename or root} cannot be written or read ({error.strerror}).") from error


def _holds_something(root: Path) -> bool:
    return root.exists() and (not root.is_dir() or any(root.iterdir()))


def _found(config: DictConfig, root: Path) -> Path:
    """Verifies the data set that the folder holds. Raises UserError if the folder holds something else."""
    try:
        records = open_dataset(config)
    except UserError as error:
        raise UserError(
            f"{root} is there already, but: {error}. Remove it, or set dataset.root to another folder."
        ) from None
    if not (root / "dataset.json").exists() and os.access(root, os.W_OK):
        _write_card(config, root, records, [])
    print(f"{root} is complete: {_counts(records)}.")
    return root


def _make(config: DictConfig, root: Path, sources: Sequence[str]) -> Path:
    staging, downloads = root.parent / f".{root.name}.unpacking", root.parent / f".{root.name}.downloads"
    shutil.rmtree(staging, ignore_errors=True)
    files = [path for source in sources for path in given(source, downloads)] or _fetched(config, downloads)
    staging.mkdir()
    try:
        for path in files:
            try:
                take(path, staging, (staging, downloads))
            except DamagedArchive:
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


def given(source: str, downloads: Path, **known: Any) -> list[Path]:
    """Returns the path of a source; one given as a URL is downloaded into `downloads`.

    Args:
        source: a path or a URL.
        downloads: folder that keeps what was downloaded.
        known: `md5` and `at_most` of a download, see `dml.fetch.fetch`.

    Raises:
        UserError: the path does not exist, or the download fails.
    """
    if "://" in source:
        return [_download(source, downloads, **known)]
    path = Path(os.path.expanduser(source))  # leaves the ~ of an unknown user as it is
    if not path.exists():
        raise UserError(f"source={source} is neither a file, a folder nor a URL.")
    return [path]


def _download(url: str, downloads: Path, name: str | None = None, **known: Any) -> Path:
    """Downloads a file into its URL's folder.

    `known`: see `dml.fetch.fetch`.
    """
    try:
        name = name or Path(unquote(urlparse(url).path)).name or "download"
    except ValueError as error:
        raise UserError(f"source={url} is no URL ({error}).") from None
    path = folder_of_url(url, downloads) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fetch(url, path, **known)
    return path


def _fetched(config: DictConfig, downloads: Path) -> list[Path]:
    """Downloads each file from the first of its mirrors that works.

    Raises:
        UserError: there is no mirror or none works; the message says what to do by hand.
    """
    then = f"Then: python -m dml.data.prepare dataset={_choice()} source=FILE,..."
    by_hand = f"{' '.join(config.download.by_hand.split())} {then}"
    if not config.download.files:
        raise UserError(f"no public mirror has this data set, so it has to be downloaded by hand. {by_hand}")
    paths = []
    for file in config.download.files:
        said = []
        for mirror in file.mirrors:
            try:
                paths.append(_download(mirror, downloads, file.name, md5=file.get("md5"), at_most=file.get("at_most")))
                break
            except UserError as error:
                said.append(str(error))
        else:
            raise UserError(f"{' '.join(said)} By hand: {by_hand}")
    return paths


def _choice() -> str:
    """Returns the name of the dataset as it was typed on the command line."""
    typed = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("dataset=")]
    return typed[-1] if typed else "NAME"


def _arranged(config: DictConfig, staging: Path) -> Path:
    """Arranges re-packaged files, and returns the folder at or below `staging` that has the official layout.

    Raises:
        UserError: no folder has it.
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
    """Yields `staging` and the folders below it, level by level."""
    level = [staging]
    for _ in range(DEPTH):
        yield from level
        level = [inner for folder in level for inner in sorted(folder.iterdir()) if inner.is_dir()]
        if len(level) > 1000:  # these are folders of images
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
    write_atomically(root / "dataset.json", json.dumps(card, indent=1, ensure_ascii=False) + "\n")


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
