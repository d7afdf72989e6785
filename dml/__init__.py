"""Deep metric learning research: published methods side by side, exactly evaluated."""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__version__ = "0.1.0"


def load(place: str | Path, checkpoint: str | None = None, device: str = "auto") -> Any:
    """Loads what a run has learned, as an `Embedder` that embeds images. See `dml.inference.load.load`."""
    # Imported here and by name: modules of `dml.inference` import this module for its version.
    return import_module("dml.inference.load").load(place, checkpoint, device)


def _ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C. During an import it ends the process at once: imports take seconds and turn an interrupt into
    other errors, and there is nothing to clean up yet."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _at_the_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    sys.__excepthook__(kind, error, traceback)


# sys.argv begins with -m only while `python -m dml.x` imports this package: it is a command then, and not a library.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _at_the_end
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, _ctrl_c)
