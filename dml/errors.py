"""How a command ends, the one exception for mistakes that a user can put right, and checks that many components share.

Exit codes: 0 done; 1 an error, with its traceback, or a sweep with a job that failed; 2 a user's mistake, in one
sentence; 75 told to stop by a signal, with a checkpoint where training had begun; 130 Ctrl-C; 141 nobody reads what is
printed any more. After all but 2 the same command goes on.
"""

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MISTAKE, INTERRUPTED, CTRL_C, UNREAD = 2, 75, 130, 141  # exit codes; 75 is EX_TEMPFAIL, 141 that of SIGPIPE


class Interrupted(Exception):
    """A signal asked the run to stop, and what it had is saved."""


class UserError(ValueError):
    """A mistake of the user: one sentence that names what is wrong, where, and the remedy.

    `python -m dml.run` prints the sentence and exits with code 2, without a traceback.
    """


def whole_number(option: str, value: Any, least: int) -> None:
    """Raises UserError unless `value` is a whole number from `least` to 2^32 - 1 (the range of seeds)."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**32:
        raise UserError(f"{option}={value} has to be a whole number between {least} and {2**32 - 1}.")


def positive(option: str, value: Any) -> None:
    """Raises UserError unless `value` is a finite number above 0."""
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{option}={value} has to be a positive number.")


def not_negative(option: str, value: Any) -> None:
    """Raises UserError unless `value` is a finite number of 0 or more."""
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"{option}={value} has to be a number of 0 or more.")


def true_or_false(option: str, value: Any) -> None:
    """Raises UserError unless `value` is a truth value: Hydra takes `no` for a word, which counts as true."""
    if not isinstance(value, bool):
        raise UserError(f"{option}={value} has to be true or false.")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises UserError where what was asked for takes more memory than there is."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            # torch says so of a CPU in a plain RuntimeError, of a GPU in a class of its own.
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause) or "out of memory" in str(cause):
                raise UserError(
                    "There is too little memory for this: lower image_size, head.dim, sampler.batch_size or "
                    "protocol.batch_size, or set method.checkpointing=true where the method has it."
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise


def no_room(error: BaseException | None) -> bool:
    """Whether an error comes of a full disk or a quota: torch wraps the system's error in one of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        error = error.__cause__ or error.__context__
    return False


def no_permission(error: BaseException | None) -> str | None:
    """The file that an error says may not be read or written; None for other errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
            return str(error.filename)
        error = error.__cause__ or error.__context__
    return None
