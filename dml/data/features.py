"""The feature store: features of images, computed once by the frozen first stages of a network, in one mapped file.

Training and evaluation read the features and begin after the frozen stages, as they read pictures from `dml.data.cache`
and begin after the first step of a transform. All runs map the same file into memory. safetensors and HDF5 are not
used, as for images: rows of known shape need no format.
"""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dml.data.cache import Damaged
from dml.data.check import digest
from dml.data.records import Records
from dml.errors import UserError
from dml.files import alone, write_atomically
from dml.models.stored import Stored


@dataclass(frozen=True)
class KeptFeatures:
    """The features that `dataset.cache=features` keeps, and where.

    Attributes:
        copies: augmented copies of each training image; None: the training transform is not random.
        train, test: texts that identify the results of the training and of the test transform.
        cache_dir: see `paths.cache_dir`.
    """

    copies: int | None
    train: str
    test: str
    cache_dir: str


class FeatureStore:
    """The stored features of some rows, k copies of each image.

    Args:
        folder: a complete store, made by `build_store`.
        rows: `[n]`, ascending.
        copies: k, copies of each image.

    Raises:
        Damaged: files of the store are missing or damaged.
        OSError: the files cannot be read.
    """

    def __init__(self, folder: Path, rows: np.ndarray, copies: int) -> None:
        try:
            said = json.loads((folder / "store.json").read_text())
            self.stage, self.tokens, self.height = str(said["stage"]), int(said["tokens"]), int(said["height"])
            shape = (len(rows) * copies, int(said["length"]), int(said["channels"]))
            self._features = np.memmap(folder / "features", np.float32, "r", shape=shape)
        except FileNotFoundError as error:
            raise Damaged(str(error)) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(str(error)) from None
        if (folder / "features").stat().st_size != self._features.nbytes:
            raise Damaged("it holds other images")
        self._rows, self.copies = rows, copies

    def place(self, row: int, copy: int = 0) -> int:
        """Returns the index at which the features of a copy of a row lie in the store."""
        return int(self._rows.searchsorted(row)) * self.copies + copy

    def batch(self, places: Tensor, device: torch.device) -> Stored:
        """Returns the features at places `[B]`, on a device."""
        features = torch.from_numpy(self._features[places.numpy()])
        if device.type == "cuda":
            features = features.pin_memory()  # else the copy would wait for the steps before
        return Stored.of(features.to(device, non_blocking=True), self.stage, self.tokens, self.height)


def build_store(
    records: Records,
    rows: np.ndarray,
    copies: int,
    settings: str,
    blank: Callable[[], Stored],
    batches: Callable[[int], Iterable[Stored]],
    cache_dir: str | Path,
) -> FeatureStore:
    """Opens the feature store of some rows, and first computes what is missing of it.

    One process computes while others wait. If that process is killed, the next one continues where it stopped.

    Args:
        records: the dataset.
        rows: `[n]`, rows of the records, ascending.
        copies: k, copies of each image.
        settings: text that identifies all that the features depend on: transform, network, precision.
        blank: computes the features of one image, `[1,T,C]`; their shape is that of all.
        batches: computes the features of all places from a given one on: k copies of the first row, of the second, ...
        cache_dir: see `paths.cache_dir`. The folder's name is a hash of the settings and of `records.stamps`.

    Raises:
        UserError: an image cannot be read, or the folder cannot be written.
    """
    key = digest(settings, (f"\n{stamp}" for stamp in records.stamps(rows)))
    folder = Path(cache_dir) / f"features-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(Damaged):
            return FeatureStore(folder, rows, copies)
        said = f"another process is filling the feature cache {folder}: waiting for it"
        with alone(folder / "lock", lambda: print(said, flush=True)):
            with suppress(Damaged):
                return FeatureStore(folder, rows, copies)  # another process made it meanwhile
            _fill(folder, len(rows) * copies, blank(), batches)
    except OSError as error:
        raise UserError(
            f"The feature cache {folder} cannot be written or read ({error.strerror}): free some disk space, choose "
            "another folder with paths.cache_dir=FOLDER, or set dataset.cache=none."
        ) from error
    return FeatureStore(folder, rows, copies)


def _fill(folder: Path, images: int, blank: Stored, batches: Callable[[int], Iterable[Stored]]) -> None:
    """Computes what is missing. Whole images reach the disk in order, so those written before a kill are kept."""
    (folder / "store.json").unlink(missing_ok=True)
    part, size = folder / "features.part", blank[0].numel() * 4
    (folder / "features").unlink(missing_ok=True)  # not overwritten: other processes may have the damaged file mapped
    done = min(part.stat().st_size // size, images) if part.exists() else 0
    bar: Any = tqdm(total=images, initial=done, desc="computing features", delay=1)
    with part.open("r+b" if done else "wb") as file, bar:
        file.truncate(done * size)
        file.seek(done * size)
        for features in batches(done):
            file.write(features.as_subclass(Tensor).cpu().contiguous().numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(features))
    os.replace(part, folder / "features")
    said = {"stage": blank.stage, "tokens": blank.tokens, "height": blank.height}
    write_atomically(folder / "store.json", json.dumps(said | {"length": blank.shape[1], "channels": blank.shape[2]}))
