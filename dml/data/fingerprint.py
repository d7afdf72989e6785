"""The fingerprint of a dataset, by which a resumed run notices that its data changed."""

import hashlib
from collections.abc import Iterator
from itertools import takewhile
from operator import lt

import numpy as np

from dml.data.paths import CHUNK, Paths
from dml.data.records import Records

Fingerprint = dict[str, str | int]


def fingerprint(records: Records) -> Fingerprint:
    """Computes the fingerprint of a dataset, which does not depend on the order of images or the folder above them.

    It takes ten seconds for ten million images.

    Returns:
        `digest`: a hash of all images' paths (relative to the folder that holds them all), file sizes, classes, roles,
        cameras and boxes. `images`, `classes` and `bytes`: totals, to say what changed.
    """
    sizes = np.maximum(records.paths.files.sizes, 0)
    paths = records.paths
    if _ascend(paths):  # then the lines, which begin with the paths, ascend too and need no sorting
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
    """Says whether the paths are in ascending order without repetition."""
    last = ""
    for chunk in paths.chunks():
        if not last < chunk[0] or not all(map(lt, chunk, chunk[1:])):
            return False
        last = chunk[-1]
    return True


def _common_folder(first: str, last: str) -> int:
    """Returns how many characters the folder that holds all images has, given the first and the last sorted path."""
    folders = zip(first.split("/")[:-1], last.split("/")[:-1], strict=False)
    return sum(len(a) + 1 for a, _ in takewhile(lambda pair: pair[0] == pair[1], folders))


def _lines(records: Records, sizes: np.ndarray, root: int) -> Iterator[list[str]]:
    """Yields the lines to hash, one per image, `CHUNK` at a time; paths begin at character `root`."""
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
    """Returns the SHA-256 of all lines, joined by newlines."""
    found, between = hashlib.sha256(), ""
    for chunk in chunks:
        found.update((between + "\n".join(chunk)).encode("utf-8", "surrogateescape"))
        between = "\n"
    return found.hexdigest()


def difference(before: Fingerprint, now: Fingerprint) -> str:
    """Says in words what changed between two fingerprints; empty if nothing did."""
    if before["digest"] == now["digest"]:
        return ""
    counted = [
        f"{before[what]} {what}, now {now[what]}"
        for what in ("images", "classes", "bytes")
        if before[what] != now[what]
    ]
    return "; ".join(counted) or "as many images and bytes, but other names, classes, roles, cameras or boxes"
