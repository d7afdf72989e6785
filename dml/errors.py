"""Exit codes of the commands, the exception for mistakes of the user, and the meaning of errors of the system.

Exit codes: 0 done; 1 an error, with its traceback, a job that failed, or a check that did not hold; 2 a user's mistake
or a full disk, told in one sentence; 75 stopped by a signal, with a checkpoint if training had begun; 130 Ctrl-C; 141
nobody reads the output any more. The same command continues the work, after 2 once the cause is mended.
"""

import errno
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).parent


def stop(sentence: str) -> NoReturn:
    """Ends the process with exit code 2. If there are several processes, only the first one prints the sentence."""
    if (rank := rank_said()) == "0" or not rank.isdigit():  # if the rank is not a number, that is the mistake to print
        print(f"dml: {sentence}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def rank_said() -> str:
    """Returns the rank of this process as what started it says, 0 if nothing does."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))


MISTAKE, INTERRUPTED, CTRL_C, UNREAD = 2, 75, 130, 141  # exit codes; 75 is EX_TEMPFAIL, 141 that of SIGPIPE

OUT_OF_MEMORY = re.compile(
    "allocate memory|out of memory|STATUS_ALLOC_FAILED"
    "|could not create a (primitive(?! descriptor)|memory object)"  # oneDNN
)


class Interrupted(BaseException):
    """A signal asked the run to stop, and its state is saved.

    Like KeyboardInterrupt it is no Exception: a handler of what damaged files and foreign code raise must not take a
    signal for one of their errors.

    Attributes:
        together: whether all ranks of the run have agreed to stop.
    """

    def __init__(self, said: str, together: bool = False) -> None:
        super().__init__(said)
        self.together = together


class UserError(ValueError):
    """A mistake of the user: one sentence that says what is wrong, where, and what to do.

    `python -m dml.run` prints the sentence and exits with code 2, without a traceback.
    """


SHOWN = 5  # names that a sentence lists


def some(names: Sequence[str]) -> str:
    """Returns the first names of a list for a sentence, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class Unfaithful(Exception):
    """Something exported or published is not what the run is. The command prints the sentence; the exit code is 1."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and the errors that led to it, each once: with `raise ... from None` the chain can be a
    circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def own_code(error: BaseException) -> str | None:
    """Returns the place, `file:line`, in the user's own code where an error arose, or that called the library in which
    it did. None: it arose in code of this package, or a library that this called."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return None
        if not _is_of_a_library(file):
            return f"{file}:{line}"
    return None


def _is_of_a_library(file: Path) -> bool:
    known = str(file).startswith("<") or file.is_relative_to(sysconfig.get_path("stdlib"))
    return known or bool({"site-packages", "dist-packages"} & {*file.parts})


LESS = (
    "lower image_size, head.dim, sampler.batch_size or protocol.batch_size, set trainer.micro_batch, or "
    "method.checkpointing=true if the method has it; dataset.cache=device takes memory of the GPU"
)


@contextmanager
def enough_memory(remedy: str = LESS) -> Iterator[None]:
    """Turns an out-of-memory error that is raised meanwhile into a UserError.

    Args:
        remedy: what to do, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # torch raises a plain RuntimeError for a CPU, and a class of its own for a GPU.
        if any(isinstance(c, MemoryError) or OUT_OF_MEMORY.search(str(c)) for c in causes(error)):
            raise UserError(f"There is too little memory for this: {remedy}.") from error
        raise


def no_room(error: BaseException | None) -> bool:
    """Returns whether a full disk or a quota caused an error. torch wraps the system's error in one of its own."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return any(isinstance(cause, OSError) and cause.errno in full for cause in causes(error))


def no_permission(error: BaseException | None) -> str | None:
    """Returns the file for which an error says that permission is missing; None for other errors."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and cause.filename:
            return str(cause.filename)
    return None
