"""`python -m dml.run`: compose the configuration, train, evaluate, report."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.command import command, started_from_here
from dml.errors import Interrupted, UserError
from dml.launch import check_environment, processes
from dml.signals import STOPPING


def _task(config: DictConfig) -> float | None:
    """What a sweep over hyperparameters maximises: see `objective`."""
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from dml.sweeps import job_of_a_sweep

        return job_of_a_sweep(config, overrides)
    _check_overlay(overrides)
    check_environment()
    _check_folder_is_named(overrides)
    from dml.collection import run_all
    from dml.options import check
    from dml.pieces import pieces, settle
    from dml.train import run

    check(config)
    settle(config)
    metrics = run_all(config, overrides) if pieces(config) else run(config, overrides)
    return objective(config, metrics) if metrics else None


def objective(config: DictConfig, metrics: dict[str, float]) -> float:
    """What checkpoints were compared by on validation classes, where there are such; else Recall@1 on the test."""
    return metrics.get(f"best_on_validation/{config.protocol.criterion}", metrics["test/recall@1"])


def _check_overlay(overrides: list[str]) -> None:
    """Raises UserError where an overlay names what to sweep, and this is one run and no job of a sweep."""
    given = {override.partition("=")[0].lstrip("+~") for override in overrides}
    hydra_config = HydraConfig.get()
    if still := [str(name) for name in hydra_config.sweeper.get("params") or {} if name not in given]:
        overlay = dict(hydra_config.runtime.choices)["sweep"]
        raise UserError(f"sweep={overlay} is for a sweep over {', '.join(still)}: start it with -m, or leave it out.")


def _check_folder_is_named(overrides: list[str]) -> None:
    """Raises UserError where several processes would each take a folder of the minute in which they start."""
    several = processes() > 1
    named = "DML_OUTPUT_DIR" in os.environ or any(o.startswith("paths.output_dir=") for o in overrides)
    if several and not named:
        raise UserError(
            "Several processes were started together: name their folder with paths.output_dir=FOLDER, which a "
            "restart goes on in."
        )


def job(
    overrides: list[str], folder: Path, log: Path | None = None, is_over: Callable[[], bool] = lambda: False
) -> int:
    """The exit code of a run in a process of its own, which is passed the signals that this one gets.

    Args:
        log: where its output goes; None: where that of this process goes.
        is_over: asked twice a second: whether the run is to stop as by SIGTERM.

    Raises:
        Interrupted: a signal told this process, and so the run, to stop.
    """
    told: list[int] = []
    with started_from_here(), (log or Path(os.devnull)).open("a") as file:
        output: Any = file if log else None
        process = subprocess.Popen(typed(overrides, folder), stdout=output, stderr=output)

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


main = command(_task)

if __name__ == "__main__":
    main()
