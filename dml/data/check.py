"""Find the image files that do not decode before a run starts, not in its third hour.

The outcome is remembered in the cache folder, so that the second start only looks at sizes and times. Images that do
not lie in files of their own (rendered, or in a zip whose checksums were verified) need no check.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dml.data.images import VERSION, quiet, reason
from dml.data.paths import CHUNK, NO_FILE
from dml.data.records import Records
from dml.errors import UserError
from dml.files import write_atomically


def readable(records: Records, cache_dir: str | Path, workers: int = 2) -> Records:
    """The records, once every image file is known to decode.

    With `records.unreadable` = `stop`, any file that does not is an error; with `skip`, its row is left out with a
    warning.

    Raises:
        UserError: names every file that does not decode.
    """
    bad = check_images(records, np.arange(len(records)), cache_dir, workers)
    if not bad:
        return records
    names = ", ".join(f"{records.paths[row]} ({why})" for row, why in bad.items())
    if records.unreadable == "stop":
        raise UserError(
            f"{len(bad)} of the {len(records)} images of dataset {records.name} cannot be read: {names}; repair or "
            "remove them, or leave them out with dataset.unreadable=skip"
        )
    warnings.warn(f"left out {len(bad)} images that cannot be read: {names}", stacklevel=2)
    return records.subset(np.setdiff1d(np.arange(len(records)), list(bad)))


def check_images(records: Records, rows: np.ndarray, cache_dir: str | Path, workers: int = 2) -> dict[int, str]:
    """Those of `rows` `[n]` whose file cannot be decoded to its last pixel, ascending, and why.

    Decodes in `workers` threads (PIL releases the interpreter lock), with a progress bar when it takes over a second.
    """
    rows = rows[records.paths.files.sizes[rows] != NO_FILE]
    if not len(rows):
        return {}
    stamps = (f"\n{stamp}" for stamp in records.stamps(rows))
    memory = Path(cache_dir) / f"unreadable-{digest(f'decoded as {VERSION}', stamps)}.json"
    rows = np.sort(rows)
    known = _remembered(memory)
    if known is not None:
        if not known:
            return {}
        return {row: known[path] for row, path in zip(rows.tolist(), records.paths[rows], strict=True) if path in known}
    bad = _decode_all(records, rows, workers)
    if not any(_may_pass(error) for error in bad.values()):
        _remember(memory, {records.paths[row]: reason(error) for row, error in bad.items()})
    return {row: reason(error) for row, error in bad.items()}


def digest(first: str, others: Iterable[str]) -> str:
    """32 hexadecimal digits of these texts, one behind the other."""
    found = hashlib.sha256()
    left = chain([first], others)
    while text := "".join(islice(left, CHUNK)):
        found.update(text.encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:32]


def _decode_all(records: Records, rows: np.ndarray, workers: int) -> dict[int, Exception]:
    def fault(row: int) -> Exception | None:
        try:
            records.open_image(row)
        except Exception as error:  # whatever PIL's decoders raise
            return error.with_traceback(None)  # which would keep what was decoded
        return None

    bad: dict[int, Exception] = {}
    bar: Any = tqdm(total=len(rows), desc="checking images", leave=False, delay=1)
    with quiet(), ThreadPoolExecutor(max(1, workers)) as pool, bar:
        for at in range(0, len(rows), CHUNK):  # what waits for a thread takes a kilobyte each
            some = rows[at : at + CHUNK].tolist()
            for row, error in zip(some, pool.map(fault, some), strict=True):
                bar.update()
                if error is not None:
                    bad[row] = error
    return bad


def _may_pass(error: Exception) -> bool:
    """Whether it says something of the system (rights, memory, a disk that fails) rather than of the file's content."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def _remembered(memory: Path) -> dict[str, str] | None:
    """None where there is no such file, or one that is damaged."""
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(known, dict) and all(isinstance(why, str) for why in known.values())
    return known if sound else None


def _remember(memory: Path, bad: dict[str, str]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memory, json.dumps(bad))  # whole or not at all, whoever else is checking
    except OSError as error:
        raise UserError(
            f"the cache folder {memory.parent} cannot be written ({error.strerror}): set paths.cache_dir"
        ) from error
