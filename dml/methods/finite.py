"""Finds terms of the objective that become NaN or infinite, without making a step wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dml.errors import UserError


class NonFiniteLoss(UserError):
    """A term of the objective became NaN or infinite."""


class FiniteTerms:
    """Remembers on the device which terms became NaN or infinite, and at which step. Only `check` waits for it."""

    def __init__(self) -> None:
        # Names of a step's K terms -> `[K]` first step with a non-finite value (0: none), and `[K]` that value.
        self._found: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[dict[str, Tensor]]:
        """Opens a block that puts the scalars of this step, counted from 1, into a dict by name.

        Raises:
            NonFiniteLoss: the block fails and a term is not finite. It replaces the block's own exception, since
                networks and miners fail on NaN with various messages.
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
            step, term, value = min(found, key=lambda one: one[0])  # among equal steps the first term
            raise NonFiniteLoss(
                f"The loss term '{term}' became {value} at step {step}: lower lr or set trainer.gradient_clip_val."
            ) from cause
