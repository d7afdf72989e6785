"""Images as evaluation sees them, kept as bytes once they were made: later passes neither decode nor resize.

LMDB and diskcache were passed over: an index on disk outlives the images and the transform that it was made from. This
file has no name, and is gone with the process, however it ends.
"""

import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from dml.errors import UserError


class ImageCache:
    """Images of one size by row, shared with the workers that the process forks.

    Args:
        folder: on whose disk the file lies; made where it is not there.
        shape: of every image.
        limit: bytes; what does not fit is not kept.

    Raises:
        UserError: a folder that cannot be written.
    """

    def __init__(self, folder: Path, shape: torch.Size, limit: float) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the cache)
        except OSError as error:
            raise UserError(
                f"The cache folder {folder} cannot be written ({error.strerror}): choose another with "
                "paths.cache_dir=FOLDER, or set trainer.image_cache=0."
            ) from error
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        self._shape = shape
        self._size = 1 + shape.numel()  # a byte that tells whether the others are there: holes of a file are zeros
        self._room = int(limit // self._size)
        self._start: dict[int, int] = {}  # of a row in the file

    def reserve(self, rows: np.ndarray) -> None:
        """Makes room for these rows, `[n]`, as far as there is any; before the workers that put them are forked."""
        for row in rows.tolist():
            if len(self._start) < self._room:
                self._start.setdefault(row, len(self._start) * self._size)

    def get(self, row: int) -> Tensor | None:
        """The image of a row, bit for bit as it was put; None where it is not kept."""
        if row not in self._start:
            return None
        content = bytearray(os.pread(self._file, self._size, self._start[row]))
        if len(content) < self._size or not content[0]:
            return None
        return _scaled(torch.frombuffer(content, dtype=torch.uint8, offset=1).view(self._shape))

    def put(self, row: int, image: Tensor) -> None:
        """Keeps an image of a reserved row whose values are those of bytes scaled to 0..1; no other."""
        levels = (image * 255).round().to(torch.uint8)
        if row not in self._start or image.shape != self._shape or not torch.equal(_scaled(levels), image):
            return
        try:
            os.pwrite(self._file, levels.numpy().tobytes(), self._start[row] + 1)
            os.pwrite(self._file, b"\1", self._start[row])  # last: what is cut short is not there
        except OSError:  # a full disk: this image is made anew each time
            return


def _scaled(levels: Tensor) -> Tensor:
    """As the transforms do it: 0..255 to 0..1, to the same bits."""
    return functional.to_dtype(levels, torch.float32, scale=True)
