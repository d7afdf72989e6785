"""A trained embedding as an object of Python's: `dml.load(place)`."""

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.configuration.ranges import Size, check_value
from dml.data.images import pixels, reason
from dml.errors import UserError
from dml.hub import folder_of
from dml.inference.embedding import Trained, check_norms, in_batches, opened, picture_of
from dml.inference.places import is_folder, shown_path
from dml.inference.vectors import side_by_side

Picture = str | Path | Image.Image

DECODING = Lock()  # Pillow reads a picture when its pixels are asked for, and not in two threads at once


class Embedder:
    """A trained run that embeds images.

    Attributes:
        trained: the run's method with its weights.
        card: facts about it: method, width, image size, step, the digest of its weights, and the operations that turn a
            picture into an input.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.card: dict[str, Any] = {
            "method": type(trained.method).__name__,
            "dim": trained.width,
            "image_size": int(trained.config.image_size),
            "step": trained.step,
            "weights": trained.digest(),
            "transform": OmegaConf.to_container(trained.config.transform.test, resolve=True),
        }

    def transform(self, picture: Picture) -> Tensor:
        """Turns a file or an opened picture into the network's input: `[3,S,S]` float32 in 0..1. An opened picture is
        turned upright as its EXIF orientation says, as files are. Raises UserError if it cannot be read."""
        try:
            return self.trained.transform(_opened(picture))
        except Exception as error:  # whatever PIL's decoders raise
            raise UserError(_unreadable(picture, reason(error))) from error

    def embed(self, images: Sequence[Picture], batch_size: int = EMBEDDED_AT_ONCE) -> np.ndarray:
        """Embeds files or opened pictures: returns `[N,D]` float32 of unit norm.

        With equal batches the embeddings equal the run's own to the last bit.

        Raises:
            UserError: there are no images, or one cannot be read.
        """
        check_value("batch_size", batch_size, Size)
        listed = isinstance(images, Sized) and hasattr(images, "__getitem__") and not isinstance(images, Mapping)
        if isinstance(images, str | Path | Image.Image) or not listed or not len(images):
            raise UserError("embed takes a list of images, with at least one: put a single image into a list.")
        if wrong := [type(one).__name__ for one in images if not isinstance(one, str | Path | Image.Image)]:
            raise UserError(
                f"embed takes files and pictures of Pillow, and no {wrong[0]}: for an array, PIL.Image.fromarray(...)."
            )
        found = []
        for batch in opened(self.trained.transform, in_batches(list(images), batch_size), _opened):
            shown = []
            for picture, image in batch:
                if isinstance(image, str):
                    raise UserError(_unreadable(picture, image))
                shown.append(image)
            learners = self.trained.embed(torch.stack(shown)).numpy()
            check_norms(self.trained, [_name(picture) for picture, _ in batch], learners)
            found.append(side_by_side(learners))
        return np.concatenate(found)


def load(place: str | Path, checkpoint: str | None = None, device: str = "auto") -> Embedder:
    """Loads what a run has learned.

    Args:
        place: the folder of a run, or a folder that `python -m dml.export` or `dml.publish` wrote, or the address of a
            published embedding, `hf://owner/name[@revision]`.
        checkpoint: of a run, one of `dml.configuration.defaults.CHECKPOINTS`; None: see `Trained.of`.
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one.

    Raises:
        UserError: there is no such folder, or nothing trained in it. Also as `dml.hub.folder_of` and `Trained.of`.
    """
    folder = folder_of(place)
    if not is_folder(folder):
        raise UserError(
            f"there is no folder {shown_path(folder)}: name the folder of a run, of dml.export or of dml.publish, or "
            "hf://owner/name."
        )
    return Embedder(Trained.of(folder, checkpoint, device))


def _opened(picture: Picture) -> Image.Image:
    if not isinstance(picture, Image.Image):
        return picture_of(Path(picture))
    if not all(picture.size):
        raise ValueError("it has no pixels")
    with DECODING:
        return pixels(picture)


def _unreadable(picture: Picture, why: str) -> str:
    return f"the image {_name(picture)} cannot be read ({why}): repair it, or leave it out."


def _name(picture: Picture) -> Path:
    if isinstance(picture, Image.Image):
        return Path(getattr(picture, "filename", "") or "(a picture)")
    return Path(picture)
