"""The one exception for mistakes that a user can put right, and the checks that many components share."""

import math
from typing import Any


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
