"""Images as evaluation sees them, kept as bytes once they were made: later passes neither decode nor resize.

LMDB and diskcache were passed over: an index on disk outlives the images and the transform that it was made from. This
file has no name, and is gone with the process, however it ends.
"""

import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional


class ImageCache:
    """`[3,H,W]` images of one size by row, shared with the workers that the process forks.

    Args:
        folder: on whose disk the file lies; made where it is not there.
        shape: of every image.
        limit: bytes; rows that would lie beyond are not kept.
    """

    def __init__(self, folder: Path, shape: torch.Size, limit: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the cache)
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        self._shape = shape
        self._size = 1 + shape.numel()  # a byte that tells whether the others are there: holes of a file are zeros
        self._rows = int(limit // self._size)

    def get(self, row: int) -> Tensor | None:
        """The image of a row, bit for bit as it was put; None where it is not kept."""
        if row >= self._rows:
            return None
        content = bytearray(os.pread(self._file, self._size, row * self._size))
        if len(content) < self._size or not content[0]:
            return None
        return _scaled(torch.frombuffer(content, dtype=torch.uint8, offset=1).view(self._shape))

    def put(self, row: int, image: Tensor) -> None:
        """Keeps an image whose values are those of bytes scaled to 0..1; no other."""
        levels = (image * 255).round().to(torch.uint8)
        if row >= self._rows or image.shape != self._shape or not torch.equal(_scaled(levels), image):
            return
        start = row * self._size
        try:
            os.pwrite(self._file, levels.numpy().tobytes(), start + 1)
            os.pwrite(self._file, b"\1", start)  # last: what is cut short is not there
        except OSError:  # a full disk: this image is made anew each time
            return


def _scaled(levels: Tensor) -> Tensor:
    """As the transforms do it: 0..255 to 0..1, to the same bits."""
    return functional.to_dtype(levels, torch.float32, scale=True)
