"""What a trained run makes of any images.

N images, L learners, d width of one learner, D = L*d.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from dml.configuration.defaults import CHECKPOINTS, EMBEDDED_AT_ONCE
from dml.configuration.ranges import Pixels, Size, check_value
from dml.data.images import SUFFIXES, closed_folder, decode, quiet, reason
from dml.data.transforms import Transform
from dml.errors import UserError
from dml.files import NETWORK
from dml.inference.vectors import UNIT, Embedded, writable, write_vectors
from dml.methods.base import Method
from dml.runs.folder import RunFolder
from dml.runs.reading import reading, require
from dml.training.rebuild import rebuild

T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    """A method with its trained weights, in evaluation mode, and what it takes to show it an image.

    Attributes:
        checkpoint: the file.
        step: of the training, at which it was written.
        config: of the run.
        transform: picture -> `[3,S,S]`, the run's own for its test images.
    """

    checkpoint: Path
    step: int
    config: DictConfig
    method: Method
    transform: Transform

    @classmethod
    def of(cls, run: Path, checkpoint: str = "last", device: str = "cpu") -> "Trained":
        """What lies in a run folder.

        Args:
            checkpoint: of `CHECKPOINTS`.
            device: `cpu`, `cuda`, or `auto`: a GPU where there is one.

        Raises:
            UserError: no such checkpoint there, a damaged one, one with weights that are NaN or infinite, or one that
                asks for something to be called that makes no network and no transform; an unknown device, or one that
                is not there.
        """
        place = _device(device)
        path = _checkpoint(run, checkpoint)
        with reading(path, "choose another with --checkpoint, or repeat the run"):
            found = rebuild(path)
            for name, weights in found.method.named_parameters():
                require(bool(weights.isfinite().all()), f"its weights {name} are NaN or infinite")
            check_value("image_size", found.config.image_size, Pixels)
        return cls(path, found.step, found.config, found.method.to(place), found.transform)

    @property
    def width(self) -> int:
        """D."""
        size = self.config.image_size
        return self.embed(torch.zeros(1, 3, size, size)).flatten(1).shape[1]

    @torch.inference_mode()
    def embed(self, images: Tensor) -> Tensor:
        """`[B,3,H,W]` -> learners `[B,L,d]` float32 on the CPU, each of unit norm."""
        return self.method.embed(images.to(self.method.device)).float().cpu()

    def embed_all(self, images: Sequence[Tensor]) -> np.ndarray:
        """`[3,H,W]` each -> learners `[B,L,d]`."""
        return self.embed(torch.stack(list(images))).numpy()

    def weights(self) -> dict[str, Tensor]:
        """Tensors of the networks by name, copied to the CPU; not those that only training needs."""
        state = {name: value for name, value in self.method.state_dict().items() if isinstance(value, Tensor)}
        return {name: value.detach().cpu().clone() for name, value in state.items() if not name.startswith("losses.")}

    def digest(self) -> str:
        """The same of the same weights, shown images in the same way, whatever file they lie in."""
        shown_at = [self.config.image_size, OmegaConf.to_container(self.config.transform.test, resolve=True)]
        found = hashlib.sha256(json.dumps(shown_at, sort_keys=True).encode())
        for name, value in self.method.state_dict().items():
            if isinstance(value, Tensor):
                found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:32]


def embed_images(
    run: Path,
    files: Sequence[Path],
    *,
    checkpoint: str = "last",
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
) -> np.ndarray:
    """Images as the run's own evaluation sees and embeds them.

    Args:
        run: a run folder.
        files: N images.
        checkpoint, device: see `Trained.of`.
        batch_size: images that are embedded at a time.

    Returns:
        `[N,D]` float32, of unit norm.

    Raises:
        UserError: as `Trained.of`; no files; images that cannot be read, or whose embedding is none, by name.
    """
    return embed_files(Trained.of(run, checkpoint, device), files, batch_size=batch_size).embeddings


def embed_files(
    trained: Trained, files: Sequence[Path], *, batch_size: int = EMBEDDED_AT_ONCE, skip: bool = False
) -> Embedded:
    """As `embed_images`, of a run that is loaded; shows a progress bar.

    Args:
        skip: leave out images that cannot be read. Else, once there is one, the rest is only looked at.

    Raises:
        UserError: images that cannot be read, by name; with `skip` if that is all of them; no files; a batch size that
            is none.
    """
    check_value("--batch-size", batch_size, Size)
    if not files:
        raise UserError("there are no images to embed: name some.")
    found = Embedded(np.empty(0))
    learners = []
    bar = tqdm(total=len(files), desc="embedding", leave=False, disable=None)
    for batch in opened(trained.transform, in_batches(files, batch_size), picture_of):
        images = [image for _, image in batch if isinstance(image, Tensor)]
        found.files += [file for file, image in batch if isinstance(image, Tensor)]
        found.unreadable |= {file: image for file, image in batch if isinstance(image, str)}
        if images and (skip or not found.unreadable):
            learners.append(trained.embed(torch.stack(images)))
        bar.update(len(batch))
    bar.close()
    if found.unreadable and not (skip and learners):
        remedy = "name others" if skip else "repair or remove them, or leave them out with --skip"
        raise UserError(f"{unreadable_sentence(found.unreadable)}: {remedy}.")
    found.learners = torch.cat(learners).numpy()
    check_norms(trained, found.files, found.learners)
    return found


def check_norms(trained: Trained, files: Sequence[Path], learners: np.ndarray) -> None:
    """Raises UserError where embeddings `[N,L,d]` of some images are none."""
    apart = np.abs(np.linalg.norm(learners, axis=2) - 1)
    if broken := [file for file, ok in zip(files, (apart < UNIT).all(1), strict=True) if not ok]:
        raise UserError(
            f"{trained.checkpoint} makes vectors that are NaN or not of unit norm of {_some(broken)}: its weights "
            "cannot be used; choose another with --checkpoint."
        )


def picture_of(file: Path) -> Image.Image:
    """What an image file shows. Raises whatever PIL's decoders do."""
    return decode(str(file))


def opened(
    transform: Transform, batches: Sequence[Sequence[T]], picture: Callable[[T], Image.Image]
) -> Iterator[list[tuple[T, Tensor | str]]]:
    """Batches with their images `[3,S,S]`, or why there is none; the next is opened while one is used.

    Args:
        picture: opens one.
    """

    def image(file: T) -> Tensor | str:
        try:
            return transform(picture(file))
        except Exception as error:  # whatever PIL's decoders raise
            return reason(error)

    with quiet(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        ahead = [pool.submit(image, file) for file in (batches[0] if batches else ())]
        for i, batch in enumerate(batches):
            following = batches[i + 1] if i + 1 < len(batches) else ()
            now, ahead = ahead, [pool.submit(image, file) for file in following]
            yield [(file, future.result()) for file, future in zip(batch, now, strict=True)]


def in_batches(files: Sequence[T], size: int) -> list[Sequence[T]]:
    """`files` in pieces of a size; the last may have fewer."""
    return [files[at : at + size] for at in range(0, len(files), size)]


def unreadable_sentence(files: dict[Path, str]) -> str:
    """Names images that cannot be read; without a full stop."""
    first, reason = next(iter(files.items()))
    if len(files) == 1:
        return f"the image {shown_path(first)} cannot be read ({reason})"
    return f"{len(files)} images cannot be read: {', '.join(shown_path(file) for file in files)}"


def _some(files: Sequence[Path]) -> str:
    named = ", ".join(map(shown_path, files[:3]))
    return named + (f" and {len(files) - 3} more images" if len(files) > 3 else "")


def shown_path(path: str | Path) -> str:
    """A path as it can be printed, whatever bytes its name is made of."""
    return os.fsencode(path).decode("utf-8", "replace")


def image_files(places: Iterable[Path]) -> list[Path]:
    """Files as they are, and the images in folders and below them, in the order of their paths; each once.

    Of folders, hidden entries and files without an image suffix (`dml.data.images.SUFFIXES`) are passed over.

    Raises:
        UserError: what is not there, a folder that cannot be read, or one without images.
    """
    found: list[Path] = []
    for place in places:
        if place.is_file():
            found.append(place)
            continue
        if not place.is_dir():
            raise UserError(f"there is no image or folder {shown_path(place)}.")
        images = _below(place)
        if not images:
            raise UserError(f"the folder {shown_path(place)} has no images ({' '.join(SUFFIXES)}).")
        found += images
    return list(dict.fromkeys(found))


def _below(folder: Path) -> list[Path]:
    found = []
    for at, folders, names in os.walk(folder, onerror=closed_folder):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(at, name) for name in names if name[0] != "." and name.lower().endswith(SUFFIXES)]
    return sorted(found)


def _checkpoint(run: Path, name: str) -> Path:
    """Raises UserError where the run has no checkpoint of that name."""
    if name not in CHECKPOINTS:
        raise UserError(f"--checkpoint {name} is unknown: choose {', '.join(CHECKPOINTS)}.")
    if (run / NETWORK).is_file() and not (run / "checkpoints").exists():
        return run / NETWORK
    folder = RunFolder(run)
    path = folder.last if name == "last" else folder.best(name.removeprefix("best_on_"))
    if not path.is_file():
        others = [other for other in CHECKPOINTS if (path.parent / f"{other}.ckpt").is_file()]
        have = f"it has {', '.join(others)}" if others else "name the folder of a run that was trained"
        raise UserError(f"{run} has no checkpoint {path.relative_to(run)}: {have}.")
    return path


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda", "auto"):
        raise UserError(f"--device {name} is unknown: choose cpu, cuda or auto.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def report_skipped(found: Embedded) -> None:
    """Says which images were left out, if any."""
    if found.unreadable:
        print(f"Left out: {unreadable_sentence(found.unreadable)}.")


def write_embeddings(
    run: Path,
    places: Sequence[Path],
    out: Path,
    *,
    checkpoint: str = "last",
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
    learners: bool = False,
    skip: bool = False,
) -> None:
    """The command: embeds all images of some files and folders into one file, and says how many.

    Args:
        learners: see `write_vectors`.
        skip: see `embed`.
        run, checkpoint, batch_size, device: see `embed_images`.

    Raises:
        UserError: as `embed_images` and `image_files`; a file that cannot be written.
    """
    files = image_files(places)
    trained = Trained.of(run, checkpoint, device)
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file with -o.")
    writable(out.parent)
    found = embed_files(trained, files, batch_size=batch_size, skip=skip)
    write_vectors(out, found.vectors(trained.digest()), found.learners if learners else None)
    report_skipped(found)
    count, parts, width = found.learners.shape
    print(f"{out}: {count} embeddings of {parts * width} dimensions")
