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
    """What a run has learned, ready to embed: an `Embedder`, see `dml.inference.load.load`."""
    # By name: packages below that one import this module, for its version.
    return import_module("dml.inference.load").load(place, checkpoint, device)


def _ctrl_c(number: int, frame: FrameType | None) -> None:
    """Imports, which take seconds, make other errors of an interrupt, and leave nothing to be put in order."""
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


# So it is named while `python -m dml.x` imports what x lies in: a command, and no library.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _at_the_end
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored, where the shell says so
        signal.signal(signal.SIGINT, _ctrl_c)
