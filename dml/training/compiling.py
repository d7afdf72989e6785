"""`trainer.compile=true`: compiles the backbone and heads of a training step into one graph.

Only training steps are compiled, since their batches all have one size; evaluation, `embed` and export are not. The
method keeps its modules, so that checkpoints are the same with and without compilation.
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
    """Makes every training step of a method call a compiled `learners`, as one graph without a break.

    Raises:
        UserError: the device or another option does not allow compilation, or there is no compiler.
    """
    device = trainer.strategy.root_device
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"trainer.compile=true is for CPUs and NVIDIA's GPUs, not for {device.type}: leave it out.")
    if trainer._detect_anomaly:
        raise UserError(
            "trainer.detect_anomaly looks at single operators, which trainer.compile=true fuses: set only one of them."
        )
    if trainer.world_size > 1 and any(
        isinstance(part, nn.SyncBatchNorm) and part.training for part in method.modules()
    ):
        raise UserError(
            "trainer.compile=true cannot compile batch norm over several devices: freeze its statistics with "
            "backbone.batch_norm=running, or leave trainer.compile out."
        )
    torch._dynamo.reset()  # drops the graphs of other trainings in this process, since their number is limited
    from torch._inductor import config  # takes seconds

    ordered = torch.are_deterministic_algorithms_enabled() and hasattr(config, "deterministic")  # torch 2.8 has none
    options: Options = {"deterministic": True} if ordered else {}
    _try_out(device, options)
    method.compiled_learners = torch.compile(method.learners, fullgraph=True, dynamic=False, options=options)


def _try_out(device: torch.device, options: Options) -> None:
    """Raises UserError if nothing can be compiled on this machine; a training would only fail at its first step."""

    def more(values: torch.Tensor) -> torch.Tensor:
        return (values + 1).sin()

    try:
        torch.compile(more, fullgraph=True, dynamic=False, options=options)(torch.zeros(64, device=device))
    except Exception as error:  # torch and the compiler raise many types
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        needs = (
            "a C++ compiler, such as g++" if device.type == "cpu" else "Triton, a GPU that it knows and a C compiler"
        )
        raise UserError(
            f"trainer.compile=true needs {needs}, but nothing can be compiled here "
            f"({(lines or [type(error).__name__])[0][:200]}): install what is missing, or leave trainer.compile out."
        ) from error
