"""Which data these are: so that a run does not go on with others."""

import hashlib
import os
from functools import cache
from itertools import takewhile

import numpy as np

from dml.data.records import Records

Fingerprint = dict[str, str | int]


def fingerprint(records: Records) -> Fingerprint:
    """The same for the same images, in whatever order and under whatever folder; half a second for 120,000.

    Returns:
        `digest` of all images' paths (relative to the folder that holds them all), sizes where they are files, classes,
        roles and cameras; and `images`, `classes` and `bytes` in all, to tell what changed.
    """
    paths = records.paths.tolist()
    folders = zip(min(paths).split("/")[:-1], max(paths).split("/")[:-1], strict=False)
    root = sum(len(a) + 1 for a, _ in takewhile(lambda pair: pair[0] == pair[1], folders))
    sizes = [_size(path) for path in paths]
    cameras = [-1] * len(paths) if records.cameras is None else records.cameras.tolist()
    lines = sorted(
        f"{path[root:]}\0{size}\0{records.class_names[label]}\0{role}\0{camera}"
        for path, size, label, role, camera in zip(
            paths, sizes, records.labels.tolist(), records.roles.tolist(), cameras, strict=True
        )
    )
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"digest": digest, "images": len(paths), "classes": len(records.class_names), "bytes": sum(sizes)}


def difference(before: Fingerprint, now: Fingerprint) -> str:
    """What changed, in words; empty where nothing did."""
    if before["digest"] == now["digest"]:
        return ""
    counted = [
        f"{before[what]} {what}, now {now[what]}"
        for what in ("images", "classes", "bytes")
        if before[what] != now[what]
    ]
    return "; ".join(counted) or "as many images and bytes, of other names, classes or sides"


def places(paths: np.ndarray) -> np.ndarray:
    """`[N]` int64, the same number for the same file: folders that are links to one another hold the same."""
    folder = cache(os.path.realpath)
    parts = (os.path.split(path) for path in paths.tolist())
    number: dict[tuple[str, str], int] = {}
    return np.array([number.setdefault((folder(at), name), len(number)) for at, name in parts], np.int64)


def _size(path: str) -> int:
    """In bytes; 0 of what is no file."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0
