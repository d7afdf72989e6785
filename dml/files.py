"""Files that are either whole or not there."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


def replace_file(path: Path, content: str) -> None:
    """Writes beside, then renames: a kill leaves the old file or the new one."""
    with beside(path) as new:
        new.write_text(content)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A place to write to, which takes the place of `path` at the end, or goes where writing failed."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    os.replace(new, path)


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written beside, flushed to the disk, then renamed; of `last.ckpt` the one before is kept.

    Lightning's own saving goes through fsspec's transaction, which moves the file from a temporary folder: across
    file systems that is a copy, and a kill leaves half of it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as new:
            with new.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if path.name == LAST and path.exists():
                os.replace(path, path.with_name(PREVIOUS))


def sound(path: Path) -> bool:
    """Whether a checkpoint is there and whole: the checksums of all its parts hold."""
    try:
        with ZipFile(path) as parts:
            return parts.testzip() is None
    except (OSError, BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error):
        return False
