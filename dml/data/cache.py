"""The image cache: images are decoded and resized once, into one file that all workers, ranks and runs map into memory.

LMDB, HDF5, WebDataset and FFCV are not used: pixels of known shape need neither a database nor a format, and a mapped
file costs a worker no copy. Pillow decodes and resizes, so that a cached image has the same bits as an uncached one.

`dataset.cache=memory` uses the same file and reads it once at the start: the system's page cache then keeps it in
memory that all processes share. A separate segment of shared memory is not used: it would be a second copy of those
pages, and a killed run would leave it behind.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torchvision
from PIL import Image
from tqdm import tqdm

from dml.data.check import digest
from dml.data.images import VERSION, quiet
from dml.data.paths import NO_FILE
from dml.data.records import Records
from dml.data.transforms import Transform
from dml.errors import UserError
from dml.files import alone
from dml.process import cores

PLACE = np.dtype([("at", "<i8"), ("offset", "<i8"), ("height", "<i4"), ("width", "<i4")])
CHUNK = 256  # images between two entries in the journal
READ = 2**24  # bytes


class Damaged(Exception):
    """A cache is incomplete or damaged and has to be made again."""


class ImageCache:
    """The cached pictures of some rows, as `Transform.prepared` made them.

    Args:
        folder: a complete cache, made by `build_cache`.
        rows: `[n]`, the rows that the cache was built from, in the same order.

    Raises:
        Damaged: files of the cache are missing or damaged.
        OSError: the files cannot be read.
    """

    def __init__(self, folder: Path, rows: np.ndarray) -> None:
        try:
            with (folder / "places.npy").open("rb") as file:
                places = np.lib.format.read_array(file, allow_pickle=False)
            self._pixels = np.memmap(folder / "pixels", np.uint8, "r")
        except FileNotFoundError as error:
            raise Damaged(str(error)) from None
        except OSError:  # a lack of rights, for example, is no reason to make the cache again
            raise
        except Exception as error:  # damaged bytes can lead to any exception
            raise Damaged(str(error)) from None
        if places.dtype != PLACE or not np.array_equal(places["at"], np.arange(len(rows))):
            raise Damaged("it holds other images")
        written = np.sort(places, order="offset")
        if _sound(written, len(rows), len(self._pixels)) < len(rows):
            raise Damaged("the pixels are not where they should be")
        order = np.argsort(rows)
        self._rows, self._places = rows[order], places[order]

    def size(self, rows: np.ndarray) -> int:
        """Returns how many bytes the pictures of some rows `[n]` take."""
        places = self._places[self._rows.searchsorted(rows)]
        return int((3 * places["height"].astype(np.int64) * places["width"]).sum())

    def read(self) -> None:
        """Reads the whole file once, so that the system keeps it in memory for all processes that map it."""
        for start in range(0, len(self._pixels), READ):
            self._pixels[start : start + READ].max()

    def image(self, row: int) -> Image.Image:
        """Returns the picture of a row, with the same bits as when it was cached."""
        at = self._rows.searchsorted(row)
        assert self._rows[at] == row
        _, offset, height, width = self._places[at].tolist()
        pixels = self._pixels[offset : offset + 3 * height * width]
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)


def build_cache(
    records: Records, rows: np.ndarray, transform: Transform, settings: str, cache_dir: str | Path
) -> ImageCache:
    """Opens the cache of some rows, and first makes what is missing or damaged, with one thread per core.

    One process makes it while others wait. If that process is killed, the next one continues where it stopped.

    Args:
        records: the dataset.
        rows: `[n]`, rows of the records.
        transform: its `first` step is what the cache keeps the result of.
        settings: the options of the dataset that decide what the pictures look like.
        cache_dir: see `paths.cache_dir`. The folder's name is a hash of the settings, the transform, the versions of
            Pillow and torchvision, and every file's path, size and time.

    Raises:
        UserError: the images are no files, one of them cannot be read, or the folder cannot be written.
    """
    if (records.paths.files.sizes[rows] == NO_FILE).any():
        raise UserError(
            f"The images of dataset {records.name} do not lie in files of their own and need no cache: set "
            "dataset.cache=none."
        )
    versions = f"Pillow {PIL.__version__}, torchvision {torchvision.__version__}, decoded as {VERSION}"
    stamps = (f"\n{stamp}" for stamp in records.stamps(rows))
    key = digest("\n".join([settings, repr(transform.first), versions]), stamps)
    folder = Path(cache_dir) / f"images-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Damaged):
            return ImageCache(folder, rows)
        said = f"another process is filling the image cache {folder}: waiting for it"
        with alone(folder / "lock", lambda: print(said, flush=True)):
            with suppress(Damaged):
                return ImageCache(folder, rows)  # another process made it meanwhile
            _fill(folder, records, rows, transform)
    except OSError as error:
        raise UserError(
            f"The image cache {folder} cannot be written or read ({error.strerror}): free some disk space, choose "
            "another folder with paths.cache_dir=FOLDER, or set dataset.cache=none."
        ) from error
    return ImageCache(folder, rows)


def _fill(folder: Path, records: Records, rows: np.ndarray, transform: Transform) -> None:
    """Makes the missing pictures. Pixels reach the disk before the journal lists them, so a kill leaves it right."""
    kept = _journal(folder, len(rows))
    if not len(kept):  # removed and not overwritten: other processes may have the damaged files mapped
        for name in ("places.npy", "pixels", "journal"):
            (folder / name).unlink(missing_ok=True)
    end = 0 if not len(kept) else int(_end(kept)[-1])
    todo = np.setdiff1d(np.arange(len(rows)), kept["at"])

    def prepared(at: int) -> np.ndarray:
        return np.asarray(transform.prepared(records.opened(int(rows[at]))))

    workers = cores()
    bar: Any = tqdm(total=len(rows), initial=len(kept), desc="caching images", delay=1)
    with (
        (folder / "pixels").open("r+b" if len(kept) else "wb") as pixels,
        (folder / "journal").open("r+b" if len(kept) else "wb") as journal,
        quiet(),
        ThreadPoolExecutor(workers) as pool,
        bar,
    ):
        pixels.seek(end)
        journal.seek(len(kept) * PLACE.itemsize)
        for chunk in np.split(todo, range(CHUNK, len(todo), CHUNK)):
            places = np.zeros(len(chunk), PLACE)
            for i, picture in enumerate(pool.map(prepared, chunk.tolist())):
                places[i] = (chunk[i], end, *picture.shape[:2])
                end += pixels.write(picture.tobytes())
                bar.update()
            pixels.flush()
            os.fsync(pixels.fileno())
            journal.write(places.tobytes())
            journal.flush()
            os.fsync(journal.fileno())
    places = np.sort(_journal(folder, len(rows)), order="at")
    beside = folder / ".places.npy"
    with beside.open("wb") as file:
        np.save(file, places)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / "places.npy")
    (folder / "journal").unlink()


def _journal(folder: Path, images: int) -> np.ndarray:
    """Returns where pixels lie, in the order of writing, up to the first entry that is incomplete or wrong."""
    journal, pixels = folder / "journal", folder / "pixels"
    if not (journal.exists() and pixels.exists()):
        return np.empty(0, PLACE)
    content = journal.read_bytes()
    places = np.frombuffer(content[: len(content) // PLACE.itemsize * PLACE.itemsize], PLACE)
    return places[: _sound(places, images, pixels.stat().st_size)]


def _sound(places: np.ndarray, images: int, size: int) -> int:
    """Counts the sound entries from the first on: adjacent, within `size` bytes, and each of a different image."""
    first = np.zeros(len(places), bool)
    first[np.unique(places["at"], return_index=True)[1]] = True
    sound = first & (places["at"] >= 0) & (places["at"] < images) & (places["height"] > 0) & (places["width"] > 0)
    sound &= (places["offset"] == np.concatenate([[0], _end(places)[:-1]])) & (_end(places) <= size)
    return len(places) if sound.all() else int(sound.argmin())


def _end(places: np.ndarray) -> np.ndarray:
    """Returns the offset of the byte after each picture."""
    return places["offset"] + 3 * places["height"].astype(np.int64) * places["width"]
