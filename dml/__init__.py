"""Deep metric learning research: published methods side by side, exactly evaluated."""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__version__ = "0.1.0"


def load(place: str | Path, checkpoint: str = "last", device: str = "auto") -> Any:
    """Loads a trained network and returns an `Embedder`, which embeds images: see `dml.inference.load.load`."""
    # Imported by name: packages below that one import this module for its version, which would be a circle.
    return import_module("dml.inference.load").load(place, checkpoint, device)


def _ctrl_c(number: int, frame: FrameType | None) -> None:
    """Ends at once during imports: these turn an interrupt into other errors, and there is nothing to save yet."""
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


# argv is ["-m"] while `python -m dml.x` imports its package: so this is a command, and dml is not used as a library.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _at_the_end
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell has said to ignore it
        signal.signal(signal.SIGINT, _ctrl_c)
