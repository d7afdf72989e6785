"""A run in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dml.errors import Interrupted
from dml.process import STOPPING, started_from_here


def objective(config: DictConfig, metrics: dict[str, float]) -> float:
    """The protocol's criterion, on validation classes where it has some, else on the test classes."""
    validated, tested = (f"{part}/{config.protocol.criterion}" for part in ("best_on_validation", "test"))
    return metrics[validated if validated in metrics else tested]


def job(
    overrides: list[str],
    folder: Path,
    log: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Carries out a run in a process of its own, passes signals on to it, and returns its exit code.

    Args:
        log: where its output goes; None: where that of this process goes.
        env: its environment; None: this process's.
        is_over: asked twice a second; when it says yes, the run is stopped by SIGTERM.

    Raises:
        Interrupted: a signal told this process, and so the run, to stop.
    """
    told: list[int] = []
    with started_from_here() as own, (log or Path(os.devnull)).open("a") as file:
        output: Any = file if log else None
        process = subprocess.Popen(
            typed(overrides, folder), stdout=output, stderr=output, env=None if env is None else {**env, **own}
        )

    def pass_on(number: int, frame: Any) -> None:
        told.append(number)
        process.send_signal(number)

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in STOPPING} if here else {}
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if not told and is_over():
                pass_on(signal.SIGTERM, None)
        code = process.returncode
    except KeyboardInterrupt:  # the terminal told the run too
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:  # though the run may have ended well: what would come next has no time
        raise Interrupted(f"{signal.Signals(told[0]).name}, passed on to {folder}")
    return code


def typed(overrides: list[str], folder: Path) -> list[str]:
    """The command of a run in a folder."""
    quoted = str(folder).replace("'", "\\'")  # Hydra's grammar takes few characters bare
    return [sys.executable, "-m", "dml.run", *overrides, f"paths.output_dir='{quoted}'"]
