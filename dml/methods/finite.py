"""Terms of the objective that are NaN or infinite: remembered on the device, so that no step waits for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dml.errors import UserError


class NonFiniteLoss(UserError):
    """A term of the objective became NaN or infinite."""


class FiniteTerms:
    """Which terms became NaN or infinite at which step first. Only `check` waits for the device."""

    def __init__(self) -> None:
        # By the names of a step's terms, `[K]` each: the step, 0 where there was none, and the value.
        self._found: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[dict[str, Tensor]]:
        """The block puts in the scalars of this step, 1 and up, by name.

        Raises:
            NonFiniteLoss: in place of what the block raises, where a term is not finite: networks and miners fail on
                NaN in words of their own.
        """
        terms: dict[str, Tensor] = {}
        try:
            yield terms
        except Exception as error:
            self._note(terms, number)
            self.check(cause=error)
            raise
        self._note(terms, number)

    def _note(self, terms: dict[str, Tensor], step: int) -> None:
        if not terms:
            return
        values = torch.stack([value.detach() for value in terms.values()])
        steps = torch.zeros(len(terms), dtype=torch.int64, device=values.device)
        steps, first = self._found.get(tuple(terms), (steps, values))
        found = ~torch.isfinite(values) & (steps == 0)
        self._found[tuple(terms)] = torch.where(found, step, steps), torch.where(found, values, first)

    def check(self, cause: Exception | None = None) -> None:
        """Raises NonFiniteLoss, from `cause`, for the first term that became NaN or infinite."""
        found = [
            (step, name, value)
            for names, (steps, values) in self._found.items()
            if bool(steps.any())
            for step, name, value in zip(steps.tolist(), names, values.tolist(), strict=True)
            if step
        ]
        if found:
            step, term, value = min(found, key=lambda one: one[0])  # of a step's terms the first
            raise NonFiniteLoss(
                f"The loss term '{term}' became {value} at step {step}: lower lr or set trainer.gradient_clip_val."
            ) from cause
