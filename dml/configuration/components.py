"""Makes components from their configuration."""

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dml.errors import OUT_OF_MEMORY, PACKAGE, UserError, own_code


class Waits:
    """A component that begins a part of its work at a later step."""

    def waits(self, images: int) -> dict[str, int]:
        """Returns option and value, as in `loss.memory_from=1000`, -> step at which the part begins; 0: the start.

        Args:
            images: number of images in a step, of all devices together.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define waits()")


def without(config: DictConfig, names: Iterable[str]) -> DictConfig:
    """Returns a component's configuration without some of its options. References are not resolved."""
    rest = config.copy()
    OmegaConf.set_struct(rest, False)
    for name in names:
        rest.pop(name, None)
    return rest


def instantiate(config: DictConfig, **arguments: Any) -> Any:
    """Makes a component with `hydra.utils.instantiate`, and turns a user's mistake into a UserError.

    Raises:
        UserError: the component refused its options, or cannot read a file. A plain TypeError or ValueError, and any
            error of another package, is told with the name of the component's option before it; of the user's own code
            a ValueError alone, with its place, since others are faults, which keep their traceback.
    """
    try:
        return hydra.utils.instantiate(config, **arguments)
    except InstantiationException as error:
        cause: BaseException | None = error
        while isinstance(cause, InstantiationException):  # a component inside another
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, OSError) and cause.errno:  # the system's word on a file
            where = cause.filename or "a file"
            raise UserError(
                f"{config._get_full_key(None)}: {where} cannot be read ({cause.strerror}): make it readable, or choose "
                "another."
            ) from error
        place = own_code(cause) if cause is not None else None
        refused = isinstance(cause, ValueError if place else TypeError | ValueError)
        if refused or (isinstance(cause, Exception) and not place and _of_a_library(cause)):
            said = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
            raise UserError(f"{config._get_full_key(None)}: {said}{f' ({place})' if place else ''}.") from error
        if cause is None or not place:
            raise
        fault = cause
    raise fault  # here, so that its traceback ends where it arose, behind nothing but its own causes


def _of_a_library(error: Exception) -> bool:
    """Says whether another package raised an error, and it is not of the system: packages refuse options with errors of
    any kind."""
    if isinstance(error, MemoryError | OSError) or OUT_OF_MEMORY.search(str(error)) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
