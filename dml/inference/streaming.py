"""Embedding of any number of images into a gallery file, by one process or by several that torchrun started."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group, is_initialized
from tqdm import tqdm

from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.configuration.ranges import Size, check_value
from dml.data.paths import Paths
from dml.distributed import from_all_ranks
from dml.errors import UserError
from dml.inference.embedding import (
    Trained,
    check_norms,
    opened,
    picture_of,
)
from dml.inference.galleries import UNREADABLE, WRITTEN, Draft, check_names, check_place, held_alone, need_pyarrow
from dml.inference.places import image_files, unreadable_sentence
from dml.inference.vectors import side_by_side, writable

T = TypeVar("T")

MARKED_EVERY = 5.0  # seconds; a kill loses the work of this time at most


@contextmanager
def group() -> Iterator[None]:
    """Joins the processes that torchrun started into a group, and gives each a GPU if there are any.

    Without torchrun it does nothing. The processes exchange no data that lies on a device, so gloo is enough.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # Processes wait for the slowest one, and for the first to finish the file, without a word in between.
    init_process_group("gloo", timeout=timedelta(days=30))
    try:
        yield
    finally:
        destroy_process_group()


def write_gallery(
    run: Path,
    places: Sequence[Path],
    out: Path,
    *,
    checkpoint: str | None = None,
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
    skip: bool = False,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Runs the command: embeds all images of some files and folders into a .npy file (see `dml.inference.galleries`).

    Batches, and so the bits of the embeddings, are the same for any number of processes. If it is killed, the same
    command line continues the work, and repeats it for images that have changed. Memory is that of one batch, whatever
    the number of images.

    Args:
        places: image files, and folders of images.
        out: the .npy file to write.
        run, checkpoint, batch_size, device, skip: see `dml.inference.embedding.write_embeddings`.
        dtype: of the file.

    Raises:
        UserError: as `write_embeddings`; also if pyarrow is missing, a file of something else would be replaced, a name
            is not UTF-8, another process writes the same file, or the processes do not see the same
            images.
    """
    need_pyarrow()
    check_value("--batch-size", batch_size, Size)
    with group():
        first = not is_initialized() or get_rank() == 0
        given = run, places, out, checkpoint, batch_size, device, dtype, first
        _write(*_together(lambda: _prepared(*given)), out, skip, first)


def _write(files: list[Path], trained: Trained, what: dict[str, Any], out: Path, skip: bool, first: bool) -> None:
    """Embeds what `_prepared` returned; `first`: this process is the first one."""
    if any(one != what for one in from_all_ranks(what)):
        raise UserError("The processes do not see the same images or the same run: give all the same folders.")
    with ExitStack() as held:

        def begin() -> None:
            if first:
                held.enter_context(held_alone(out))
                seen = Paths.of(map(str, files)).files
                Draft.begin(out, what, np.stack((seen.sizes, seen.times), axis=1))

        _together(begin)
        draft = _together(lambda: Draft.open(out))
        unreadable = _together(lambda: _embed(trained, files, draft, what["batch_size"], skip))
        found = {at: why for of_rank in from_all_ranks(unreadable) for at, why in of_rank.items()}
        if first and len(found) == len(files):
            Draft.remove(out)  # nothing of it is of use
        if found and (not skip or len(found) == len(files)):
            remedy = "name others" if skip else "repair what cannot be read, or leave it out with --skip"
            raise UserError(f"{unreadable_sentence({files[at]: why for at, why in sorted(found.items())})}: {remedy}.")

        def finish() -> None:
            if not first:
                return
            count = draft.finish([str(file) for file in files], what["weights"])
            if found:
                said = unreadable_sentence({files[at]: why for at, why in sorted(found.items())})
                print(f"Left out: {said}.")
            before = f"; {draft.found} of them were there already" if draft.found else ""
            print(f"{out}: {count} embeddings of {trained.width} dimensions, {what['dtype']}{before}")

        _together(finish)


def _prepared(
    run: Path,
    places: Sequence[Path],
    out: Path,
    checkpoint: str | None,
    batch_size: int,
    device: str,
    dtype: str,
    first: bool,
) -> tuple[list[Path], Trained, dict[str, Any]]:
    """Returns the images with absolute paths, the run, and what is to be written, on which the processes have to
    agree."""
    files = [file.absolute() for file in image_files(places)]
    check_names(files)
    check_place(out)
    trained = Trained.of(run, checkpoint, device)
    if first:
        writable(out.parent)
    names = hashlib.sha256(b"\0".join(os.fsencode(file) for file in files)).hexdigest()
    what = {"shape": [len(files), trained.width], "dtype": dtype, "weights": trained.digest(), "images": names}
    return files, trained, what | {"batch_size": batch_size}  # the last bits may depend on the batches


def _together(step: Callable[[], T]) -> T:
    """Takes a step of all processes, which wait for one another at its end. A user's mistake that one of them meets is
    raised by all: the first one, which prints it, would not learn of it otherwise, and the others would wait."""
    done, said = [], None
    try:
        done.append(step())
    except UserError as error:
        said = str(error)
    for one in from_all_ranks(said):
        if one is not None:
            raise UserError(one)
    return done[0]


def _embed(trained: Trained, files: Sequence[Path], draft: Draft, batch_size: int, skip: bool) -> dict[int, str]:
    """Embeds and writes this process's share of the missing images. Returns why images cannot be read, by number.

    Without `skip`, once an image cannot be read, the others are only opened, to find all that cannot be read.
    """
    rank, world = (get_rank(), get_world_size()) if is_initialized() else (0, 1)
    every = [range(at, min(at + batch_size, len(files))) for at in range(0, len(files), batch_size)]
    # An earlier attempt may have left a batch in which one image could not be read.
    missing = [batch for batch in every[rank::world] if not (draft.state[batch.start : batch.stop] == WRITTEN).all()]
    unreadable: dict[int, str] = {}
    done: list[int] = []
    marked = time.monotonic()
    bar = tqdm(total=sum(map(len, missing)), desc="embedding", leave=False, disable=None if rank == 0 else True)
    for batch in opened(trained.transform, missing, lambda at: picture_of(files[at])):
        unreadable |= {at: image for at, image in batch if isinstance(image, str)}
        images = {at: image for at, image in batch if isinstance(image, Tensor)}
        if images and (skip or not unreadable):
            learners = trained.embed(torch.stack(list(images.values()))).numpy()
            check_norms(trained, [files[at] for at in images], learners)
            draft.rows[list(images)] = side_by_side(learners)
            done += images
        if time.monotonic() - marked >= MARKED_EVERY:
            draft.mark(done, WRITTEN)
            done, marked = [], time.monotonic()
        bar.update(len(batch))
    bar.close()
    draft.mark(done, WRITTEN)
    if skip:
        draft.mark(list(unreadable), UNREADABLE)
    return unreadable
