"""A run in its own process."""

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

from dml.configuration.composition import AGAIN, output_dir
from dml.errors import Interrupted
from dml.process import STOPPING, end_at_ctrl_c, started_from_here


def objective(config: DictConfig, metrics: dict[str, float]) -> float:
    """Returns the value of the protocol's criterion: on validation classes if it has some, else on the test classes."""
    validated, tested = (f"{part}/{config.protocol.criterion}" for part in ("best_on_validation", "test"))
    return metrics[validated if validated in metrics else tested]


def job(
    overrides: list[str],
    folder: Path,
    log: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] | None = None,
    again: str | None = None,
) -> int:
    """Carries out a run in its own process, passes signals on to it, and returns its exit code.

    Args:
        overrides: of the run's command line.
        folder: of the run.
        log: the file for its output; None: it goes where the output of this process goes.
        is_over: called twice a second; once it returns True, the run is stopped by SIGTERM.
        env: the environment of the run; None: that of this process.
        again: the option that continues the sweep or protocol to which the run belongs, see `going_on`; None: it is
            continued by itself.

    Raises:
        Interrupted: a signal told this process, and so the run, to stop.
    """
    told: list[int] = []
    whole = os.environ.get(AGAIN, again)  # a protocol of several trainings may be a job of a sweep
    with started_from_here(**({AGAIN: whole} if whole else {})) as own, (log or Path(os.devnull)).open("a") as file:
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
    except KeyboardInterrupt:
        end_at_ctrl_c(process)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:  # even if the run ended well, since nothing else may be started now
        raise Interrupted(f"{signal.Signals(told[0]).name}, passed on to {folder}")
    return code


def typed(overrides: list[str], folder: Path) -> list[str]:
    """Returns the words of the command that starts a run in a folder."""
    return [sys.executable, "-m", "dml.run", *overrides, output_dir(folder)]
