"""Embedding of any images by a trained run.

N images, L learners, d width of one learner, D = L*d.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from dml.configuration.defaults import CHECKPOINTS, EMBEDDED_AT_ONCE
from dml.configuration.options import TRAINER
from dml.configuration.ranges import Pixels, Size, check_value
from dml.configuration.trainings import trainings_of
from dml.data.images import decode, quiet, reason
from dml.data.transforms import Transform
from dml.errors import UserError, enough_memory, some
from dml.files import NETWORK, sound
from dml.inference.places import image_files, shown_path, unreadable_sentence
from dml.inference.vectors import UNIT, Embedded, check_vectors_place, writable, write_vectors
from dml.methods.base import Method
from dml.models.products import products
from dml.process import cores
from dml.runs.chosen import result
from dml.runs.folder import RunFolder
from dml.runs.reading import reading, require
from dml.training.rebuild import rebuild

T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    """A method with its trained weights, in evaluation mode, and the transform of its images.

    Attributes:
        checkpoint: the file of the weights.
        step: of the training, at which the checkpoint was written.
        config: of the run.
        method: the method with these weights.
        transform: turns a picture into `[3,S,S]`, as the run does with its test images.
    """

    checkpoint: Path
    step: int
    config: DictConfig
    method: Method
    transform: Transform

    @classmethod
    def of(cls, run: Path, checkpoint: str | None = None, device: str = "cpu") -> "Trained":
        """Loads a checkpoint of a run folder, or the weights that `dml.export` or `dml.publish` wrote.

        Args:
            run: the folder.
            checkpoint: one of `CHECKPOINTS`; None: the one that the run's figures are of, the last one if it has no
                figures yet. What was exported or published has one only: None or `last`.
            device: `cpu`, `cuda`, or `auto`: a GPU if there is one.

        Raises:
            UserError: the folder has no such checkpoint; the checkpoint is damaged, has weights that are NaN or
                infinite, or names a function that makes neither a network nor a transform; or the device is unknown or
                not there.
        """
        place = _device(device)
        path = _checkpoint(run, checkpoint)
        with reading(path, "choose another with --checkpoint, or repeat the run"):
            require(path.name == NETWORK or sound(path), "some of it is not as it was written")
            found = rebuild(path)
            for name, weights in found.method.state_dict().items():
                known = not isinstance(weights, Tensor) or bool(weights.isfinite().all())
                require(known, f"its weights {name} are NaN or infinite")
            check_value("image_size", found.config.image_size, Pixels)
            check_value("trainer.matmul", found.config.trainer.matmul, TRAINER["matmul"])
        return cls(path, found.step, found.config, found.method.to(place), found.transform)

    @property
    def width(self) -> int:
        """D, the width of the embedding: that of all learners side by side."""
        size = self.config.image_size
        return self.embed(torch.zeros(1, 3, size, size)).flatten(1).shape[1]

    @torch.inference_mode()
    def embed(self, images: Tensor) -> Tensor:
        """Embeds images `[B,3,H,W]`: returns learners `[B,L,d]` float32 on the CPU, each of unit norm.

        Numbers are rounded as in an evaluation of the run on this device: to half precision if `trainer.precision` says
        so, and the factors of a GPU's products as `trainer.matmul` says. A run in double precision is embedded in
        float32. Raises UserError if the memory does not suffice."""
        enough = enough_memory("lower the batch size (--batch-size), or choose the CPU (--device cpu)")
        with enough, products(self.config.trainer.matmul), self._rounding.forward_context():
            seen = self._rounding.convert_input(images.to(self.method.device))
            found: Tensor = self._network.embed(seen).float().cpu()
        return normalize(found, dim=-1) if isinstance(self._rounding, HalfPrecision) else found

    @cached_property
    def _rounding(self) -> Precision:
        """Lightning's plugin for the precision of the run. As there, the CPU takes bfloat16 in place of float16."""
        said, device = str(self.config.trainer.precision), self.method.device.type
        if said in ("16-mixed", "16", "bf16-mixed", "bf16"):
            return MixedPrecision("16-mixed" if said.startswith("16") and device != "cpu" else "bf16-mixed", device)
        return HalfPrecision(said) if said in ("16-true", "bf16-true") else Precision()  # type: ignore[arg-type]

    @cached_property
    def _network(self) -> Method:
        """The method, or a copy of it with weights in half precision if the run had those."""
        half = isinstance(self._rounding, HalfPrecision)
        return self._rounding.convert_module(deepcopy(self.method)) if half else self.method  # type: ignore[return-value]

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensors of the network by name, copied to the CPU, without those of losses."""
        state = {name: value for name, value in self.method.state_dict().items() if isinstance(value, Tensor)}
        return {name: value.detach().cpu().clone() for name, value in state.items() if not name.startswith("losses.")}

    def digest(self) -> str:
        """Returns a digest of the weights, the image size and the test transform. It does not depend on the file in
        which the weights are."""
        shown_at = [self.config.image_size, OmegaConf.to_container(self.config.transform.test, resolve=True)]
        found = hashlib.sha256(json.dumps(shown_at, sort_keys=True).encode())
        for name, value in self.method.state_dict().items():
            if isinstance(value, Tensor):
                found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:32]


def embed_files(
    trained: Trained, files: Sequence[Path], *, batch_size: int = EMBEDDED_AT_ONCE, skip: bool = False
) -> Embedded:
    """Embeds images as the run's own evaluation does, and shows a progress bar.

    Args:
        trained: the run.
        files: N images.
        batch_size: images that are embedded at a time.
        skip: leave out images that cannot be read. Without it, once an image cannot be read, the others are only
            opened, to name all that cannot be read.

    Raises:
        UserError: images cannot be read (with `skip`: none of them can), there are no files, `batch_size` is out of
            range, or embeddings are NaN or not of unit norm.
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
    """Raises UserError, which names the images, if some of their embeddings `[N,L,d]` are NaN or not of unit norm."""
    apart = np.abs(np.linalg.norm(learners, axis=2) - 1)
    if broken := [shown_path(file) for file, ok in zip(files, (apart < UNIT).all(1), strict=True) if not ok]:
        raise UserError(
            f"{trained.checkpoint} gives embeddings that are NaN or not of unit norm for {some(broken)}: its weights "
            "cannot be used; choose another with --checkpoint."
        )


def picture_of(file: Path) -> Image.Image:
    """Opens an image file. Raises whatever PIL's decoders raise."""
    return decode(str(file))


def opened(
    transform: Transform, batches: Sequence[Sequence[T]], picture: Callable[[T], Image.Image]
) -> Iterator[list[tuple[T, Tensor | str]]]:
    """Yields batches of pairs: a file, and its image `[3,S,S]` or, as str, the reason why it cannot be read. The next
    batch is opened while one is used.

    Args:
        transform: turns a picture into `[3,S,S]`.
        batches: of files, or of whatever `picture` takes.
        picture: opens one of them.
    """

    def image(file: T) -> Tensor | str:
        try:
            return transform(picture(file))
        except Exception as error:  # whatever PIL's decoders raise
            return reason(error)

    with quiet(), ThreadPoolExecutor(min(8, cores())) as pool:
        ahead = [pool.submit(image, file) for file in (batches[0] if batches else ())]
        for i, batch in enumerate(batches):
            following = batches[i + 1] if i + 1 < len(batches) else ()
            now, ahead = ahead, [pool.submit(image, file) for file in following]
            yield [(file, future.result()) for file, future in zip(batch, now, strict=True)]


def in_batches(files: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cuts `files` into batches of a size; the last one may be smaller."""
    return [files[at : at + size] for at in range(0, len(files), size)]


def _checkpoint(run: Path, name: str | None) -> Path:
    """Returns the path of a run's checkpoint. Raises UserError if the run has none of that name."""
    if name is not None and name not in CHECKPOINTS:
        raise UserError(f"--checkpoint {name} is unknown: choose {', '.join(CHECKPOINTS)}.")
    if (run / NETWORK).is_file() and not (run / "checkpoints").exists():
        if name not in (None, "last"):
            raise UserError(f"{run} has the weights of one checkpoint only: leave --checkpoint {name} out.")
        return run / NETWORK
    folder = RunFolder(run)
    if name is None:
        name = _of_the_figures(folder)
    path = folder.last if name == "last" else folder.best(name.removeprefix("best_on_"))
    if not path.is_file():
        others = [other for other in CHECKPOINTS if (path.parent / f"{other}.ckpt").is_file()]
        have = f"it has {', '.join(others)}" if others else _remedy(folder)
        raise UserError(f"{run} has no checkpoint {path.relative_to(run)}: {have}.")
    return path


def _remedy(folder: RunFolder) -> str:
    """Returns what to do about a folder without checkpoints."""
    config = folder.config()
    several = [*trainings_of(config)] if config is not None else []
    if several:
        return f"it has {len(several)} trainings, so name the folder of one, such as {folder.path / several[0]}"
    return "name the folder of a run that was trained"


def _of_the_figures(folder: RunFolder) -> str:
    """Returns the name of the checkpoint to which a run's figures belong; `last` if it has no figures yet."""
    if not (folder.path / "metrics.json").is_file():
        return "last"
    try:
        return result(folder.metrics())
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}, or choose the weights with --checkpoint last.") from error


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda", "auto"):
        raise UserError(f"--device {name} is unknown: choose cpu, cuda or auto.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU on this machine; use --device cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def report_skipped(found: Embedded) -> None:
    """Prints which images were left out, if any."""
    if found.unreadable:
        print(f"Left out: {unreadable_sentence(found.unreadable)}.")


def write_embeddings(
    run: Path,
    places: Sequence[Path],
    out: Path,
    *,
    checkpoint: str | None = None,
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
    learners: bool = False,
    skip: bool = False,
) -> None:
    """Runs the command: embeds all images of some files and folders into one .npz file, and prints how many.

    Args:
        places: image files, and folders of images.
        out: the file to write.
        learners: write the learners one by one too, see `write_vectors`.
        skip: see `embed_files`.
        run, checkpoint, device: see `Trained.of`.
        batch_size: images that are embedded at a time.

    Raises:
        UserError: as `Trained.of`, `embed_files` and `image_files`; also if the file cannot be written, or is of
            something else.
    """
    check_value("--batch-size", batch_size, Size)
    files = image_files(places)
    check_vectors_place(out)
    trained = Trained.of(run, checkpoint, device)
    writable(out.parent)
    found = embed_files(trained, files, batch_size=batch_size, skip=skip)
    write_vectors(out, found.vectors(trained.digest()), found.learners if learners else None)
    report_skipped(found)
    count, parts, width = found.learners.shape
    print(f"{out}: {count} embedding{'' if count == 1 else 's'} of {parts * width} dimensions")
