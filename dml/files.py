"""Files that are either whole or not there."""

import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO


def replace_file(path: Path, content: str) -> None:
    """Writes beside, then renames: a kill leaves the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(content)
    os.replace(beside, path)


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written beside, flushed to the disk, then renamed.

    Lightning's own saving goes through fsspec's transaction, which moves the file from a temporary folder: across
    file systems that is a copy, and a kill leaves half of it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        with beside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
