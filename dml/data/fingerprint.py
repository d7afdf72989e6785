"""Which data these are: so that a run does not go on with others."""

import hashlib
from collections.abc import Iterator
from itertools import takewhile
from operator import lt

import numpy as np

from dml.data.paths import CHUNK, Paths
from dml.data.records import Records

Fingerprint = dict[str, str | int]


def fingerprint(records: Records) -> Fingerprint:
    """The same for the same images, in whatever order and under whatever folder; ten seconds for ten million.

    Returns:
        `digest` of all images' paths (relative to the folder that holds them all), sizes where they are files, classes,
        roles, cameras and boxes; and `images`, `classes` and `bytes` in all, to tell what changed.
    """
    sizes = np.maximum(records.paths.files.sizes, 0)
    paths = records.paths
    if _ascend(paths):  # then lines that begin with them do too
        digest = _digest(_lines(records, sizes, _common_folder(paths[0], paths[-1])))
    else:
        ends = min(map(min, paths.chunks())), max(map(max, paths.chunks()))
        digest = _digest(_sorted(_lines(records, sizes, _common_folder(*ends))))
    return {
        "digest": digest,
        "images": len(records),
        "classes": len(records.class_names),
        "bytes": int(sizes.sum()),
    }


def _ascend(paths: Paths) -> bool:
    """Whether they come in the order of names, each once."""
    last = ""
    for chunk in paths.chunks():
        if not last < chunk[0] or not all(map(lt, chunk, chunk[1:])):
            return False
        last = chunk[-1]
    return True


def _common_folder(first: str, last: str) -> int:
    """The length of the path of the folder that holds all, by the first and the last in the order of names."""
    folders = zip(first.split("/")[:-1], last.split("/")[:-1], strict=False)
    return sum(len(a) + 1 for a, _ in takewhile(lambda pair: pair[0] == pair[1], folders))


def _lines(records: Records, sizes: np.ndarray, root: int) -> Iterator[list[str]]:
    """What is said of each image, its path from character `root` on; `CHUNK` images at a time."""
    for number, paths in enumerate(records.paths.chunks()):
        rows = slice(number * CHUNK, number * CHUNK + len(paths))
        cameras = [-1] * len(paths) if records.cameras is None else records.cameras[rows].tolist()
        boxes = [""] * len(paths) if records.boxes is None else [f"\0{box}" for box in records.boxes[rows].tolist()]
        columns = (sizes[rows].tolist(), records.labels[rows].tolist(), records.roles[rows].tolist(), cameras, boxes)
        yield [
            f"{path[root:]}\0{size}\0{records.class_names[label]}\0{role}\0{camera}{box}"
            for path, size, label, role, camera, box in zip(paths, *columns, strict=True)
        ]


def _sorted(chunks: Iterator[list[str]]) -> Iterator[list[str]]:
    lines = [line for chunk in chunks for line in chunk]
    lines.sort()
    return (lines[at : at + CHUNK] for at in range(0, len(lines), CHUNK))


def _digest(chunks: Iterator[list[str]]) -> str:
    """Of all lines, with a newline between any two."""
    found, between = hashlib.sha256(), ""
    for chunk in chunks:
        found.update((between + "\n".join(chunk)).encode("utf-8", "surrogateescape"))
        between = "\n"
    return found.hexdigest()


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
