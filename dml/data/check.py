"""Finds image files that cannot be decoded before a run starts, instead of in its third hour.

The outcome is stored in the cache folder, so the next start only compares file sizes and times. Images that do not lie
in files of their own (rendered ones, or those in a zip whose checksums were verified) need no check.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from tqdm import tqdm

from dml.data.images import VERSION, quiet, reason
from dml.data.paths import CHUNK, NO_FILE
from dml.data.records import Records
from dml.errors import UserError
from dml.files import alone, write_atomically
from dml.process import cores


def readable(records: Records, cache_dir: str | Path) -> Records:
    """Returns the records after checking that every image file can be decoded.

    With `records.unreadable` = `stop`, a file that cannot be decoded is an error; with `skip`, its row is left out with
    a warning.

    Raises:
        UserError: some files cannot be decoded; the message names every one of them.
    """
    bad = check_images(records, np.arange(len(records)), cache_dir)
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


def check_images(records: Records, rows: np.ndarray, cache_dir: str | Path) -> dict[int, str]:
    """Finds the rows among `rows` `[n]` whose file cannot be decoded to its last pixel.

    Decodes with one thread per core (PIL releases the interpreter lock), and shows a progress bar after a second.

    Returns:
        Row -> reason why it cannot be decoded, rows ascending.
    """
    rows = rows[records.paths.files.sizes[rows] != NO_FILE]
    if not len(rows):
        return {}
    stamps = (f"\n{stamp}" for stamp in records.stamps(rows))
    memory = Path(cache_dir) / f"unreadable-{digest(f'Pillow {PIL.__version__}, decoded as {VERSION}', stamps)}.json"
    rows = np.sort(rows)
    if (known := _remembered(memory)) is None:
        with _writing(memory), alone(memory.with_suffix(".lock")):  # all ranks ask at once
            if (known := _remembered(memory)) is None:
                bad = _decode_all(records, rows)
                found = {records.paths[row]: reason(error) for row, error in bad.items()}
                if not any(_may_pass(error) for error in bad.values()):
                    write_atomically(memory, json.dumps(found))
                return {row: reason(error) for row, error in bad.items()}
    if not known:
        return {}
    return {row: known[path] for row, path in zip(rows.tolist(), records.paths[rows], strict=True) if path in known}


def digest(first: str, others: Iterable[str]) -> str:
    """Returns the first 32 hexadecimal digits of the SHA-256 of these texts, joined."""
    found = hashlib.sha256()
    left = chain([first], others)
    while text := "".join(islice(left, CHUNK)):
        found.update(text.encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:32]


def _decode_all(records: Records, rows: np.ndarray) -> dict[int, Exception]:
    def fault(row: int) -> Exception | None:
        try:
            records.open_image(row)
        except Exception as error:  # PIL's decoders raise many types
            return error.with_traceback(None)  # the traceback would keep the decoded pixels in memory
        return None

    bad: dict[int, Exception] = {}
    bar: Any = tqdm(total=len(rows), desc="checking images", leave=False, delay=1)
    with quiet(), ThreadPoolExecutor(cores()) as pool, bar:
        for at in range(0, len(rows), CHUNK):  # in parts, since every task waiting for a thread takes a kilobyte
            some = rows[at : at + CHUNK].tolist()
            for row, error in zip(some, pool.map(fault, some), strict=True):
                bar.update()
                if error is not None:
                    bad[row] = error
    return bad


def _may_pass(error: Exception) -> bool:
    """Says whether the cause is the system (rights, memory, a failing disk) and not the content of the file."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def _remembered(memory: Path) -> dict[str, str] | None:
    """Returns path -> reason from an earlier check; None if there is no such file or it is damaged."""
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(known, dict) and all(isinstance(why, str) for why in known.values())
    return known if sound else None


@contextmanager
def _writing(memory: Path) -> Iterator[None]:
    """Makes the folder of a file, and turns errors of writing there into a sentence."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"the cache folder {memory.parent} cannot be written ({error.strerror}): choose another one with "
            "paths.cache_dir=FOLDER"
        ) from error
