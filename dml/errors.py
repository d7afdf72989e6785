"""How a command ends, the one exception for mistakes that a user can put right, and what errors of the system mean.

Exit codes: 0 done; 1 an error, with its traceback, or a sweep with a job that failed; 2 a user's mistake, in one
sentence; 75 told to stop by a signal, with a checkpoint where training had begun; 130 Ctrl-C; 141 nobody reads what is
printed any more. After all but 2 the same command goes on.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def stop(sentence: str) -> NoReturn:
    """Leaves with exit code 2; of several processes the first says why."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))
    if rank == "0" or not rank.isdigit():  # a rank that is no number is what the sentence is about
        print(f"dml: {sentence}", file=sys.stderr)
    raise SystemExit(MISTAKE)


MISTAKE, INTERRUPTED, CTRL_C, UNREAD = 2, 75, 130, 141  # exit codes; 75 is EX_TEMPFAIL, 141 that of SIGPIPE

OUT_OF_MEMORY = re.compile("allocate memory|out of memory")


class Interrupted(Exception):
    """A signal asked the run to stop, and what it had is saved."""


class UserError(ValueError):
    """A mistake of the user: one sentence that names what is wrong, where, and the remedy.

    `python -m dml.run` prints the sentence and exits with code 2, without a traceback.
    """


class Unfaithful(Exception):
    """What was exported does not compute what the run does: a sentence, and exit code 1."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it, each once: `raise ... from None` can lead in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises UserError where what was asked for takes more memory than there is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # torch says so of a CPU in a plain RuntimeError, of a GPU in a class of its own.
        if any(isinstance(c, MemoryError) or OUT_OF_MEMORY.search(str(c)) for c in causes(error)):
            raise UserError(
                "There is too little memory for this: lower image_size, head.dim, sampler.batch_size or "
                "protocol.batch_size, set trainer.micro_batch, or method.checkpointing=true where the method has it."
            ) from error
        raise


def no_room(error: BaseException | None) -> bool:
    """Whether an error comes of a full disk or a quota: torch wraps the system's error in one of its own."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return any(isinstance(cause, OSError) and cause.errno in full for cause in causes(error))


def no_permission(error: BaseException | None) -> str | None:
    """The file that an error says may not be read or written; None for other errors."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and cause.filename:
            return str(cause.filename)
    return None
