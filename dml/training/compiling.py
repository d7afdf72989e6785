"""`trainer.compile=true`: backbone and heads of a training step as one compiled graph.

Steps alone are compiled, as their batches are all of one size; evaluation, `embed` and export go on as they are. The
method keeps its modules, so that checkpoints know nothing of it.
"""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from dml.errors import UserError
from dml.methods.base import Method

Options = dict[str, str | int | bool | Callable[..., Any]]


def compile_steps(method: Method, trainer: pl.Trainer) -> None:
    """Has every training step of a method call a compiled `learners`, without a break in its graph.

    Raises:
        UserError: a device or an option that it does not go together with; no compiler.
    """
    device = trainer.strategy.root_device
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"trainer.compile=true is for CPUs and NVIDIA's GPUs, not for {device.type}: leave it out.")
    if trainer._detect_anomaly:
        raise UserError("trainer.detect_anomaly looks at single operators, which trainer.compile=true fuses: give one.")
    if trainer.world_size > 1 and any(
        isinstance(part, nn.SyncBatchNorm) and part.training for part in method.modules()
    ):
        raise UserError(
            "trainer.compile=true has no batch norm over several devices: freeze its statistics with "
            "backbone.batch_norm=running, or leave trainer.compile out."
        )
    torch._dynamo.reset()  # of other trainings in this process: a graph each, and there is a limit
    options: Options = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    _try_out(device, options)
    method.compiled_learners = torch.compile(method.learners, fullgraph=True, dynamic=False, options=options)


def _try_out(device: torch.device, options: Options) -> None:
    """Raises UserError where nothing can be compiled here: a training would find out at its first step."""

    def more(values: torch.Tensor) -> torch.Tensor:
        return (values + 1).sin()

    try:
        torch.compile(more, fullgraph=True, dynamic=False, options=options)(torch.zeros(64, device=device))
    except Exception as error:  # torch's and the compiler's, of many kinds
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        needs = (
            "a C++ compiler, such as g++" if device.type == "cpu" else "Triton, a GPU that it knows and a C compiler"
        )
        raise UserError(
            f"trainer.compile=true needs {needs}, and nothing can be compiled here "
            f"({(lines or [type(error).__name__])[0][:200]}): install what is missing, or leave trainer.compile out."
        ) from error
