"""`python -m dml.run`: compose the configuration, train, evaluate, report."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.command import SWEPT, command, started_from_here
from dml.errors import Interrupted, UserError
from dml.launch import check_environment, processes
from dml.signals import STOPPING, no_more


def _task(config: DictConfig) -> float | None:
    """What a sweep over hyperparameters maximises: see `objective`."""
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _job_of_a_sweep(config, overrides)
    _check_overlay(overrides)
    check_environment()
    _check_folder_is_named(overrides)
    from dml.collection import run_all
    from dml.pieces import pieces, settle
    from dml.train import run

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


def _job_of_a_sweep(config: DictConfig, overrides: list[str]) -> float | None:
    """One job of `-m`, in a process of its own: Lightning's launcher re-executes the command line on every rank.

    A job that fails leaves a file `FOLDER.failed` and no figure (of NaN Optuna's sweeper makes an error of
    its own), and those after it run all the same.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.sweep.dir) / job_name(overrides)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = folder.with_name(f"{folder.name}.failed")
    at_once = not hydra_config.launcher._target_.endswith(".BasicLauncher")
    log = folder.with_name(f"{folder.name}.log") if at_once else None
    if at_once and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return None  # told to stop, in an earlier job of this process
    print(f"\n{folder}" + (f": see {log}" if log else ""), flush=True)
    try:
        code = job(overrides, folder, log)
    except Interrupted:
        if not at_once:
            raise
        no_more()
        return None  # the sweep waits for the other jobs, and says then why it ends
    if code:
        print(f"dml: the job in {folder} ended with exit code {code}.", file=sys.stderr)
        with suppress(OSError):  # a full disk stops no other job
            mark.write_text(f"exit code {code}\n{shlex.join(_command(overrides, folder))}\n")
        return None
    mark.unlink(missing_ok=True)
    return objective(config, json.loads((folder / "metrics.json").read_text()))


def job_name(overrides: list[str]) -> str:
    """The folder of a job, by what the sweep varies: the same sweep again, or a larger one, finds what is done."""
    swept = os.environ.get(SWEPT, "").split(",")
    name = ",".join(o.replace("/", "_") for o in overrides if o.lstrip("+~").partition("=")[0] in swept) or "job"
    return name if len(name) <= 100 else f"{name[:91]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def job(overrides: list[str], folder: Path, log: Path | None = None) -> int:
    """The exit code of a run in a process of its own, which is passed the signals that this one gets.

    Args:
        log: where its output goes; None: where that of this process goes.

    Raises:
        Interrupted: a signal told this process, and so the run, to stop.
    """
    told: list[int] = []
    with started_from_here(), (log or Path(os.devnull)).open("a") as file:
        output: Any = file if log else None
        process = subprocess.Popen(_command(overrides, folder), stdout=output, stderr=output)

    def pass_on(number: int, frame: Any) -> None:
        told.append(number)
        process.send_signal(number)

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in STOPPING} if here else {}
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal told the run too
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:  # though the run may have ended well: what would come next has no time
        raise Interrupted(f"{signal.Signals(told[0]).name}, passed on to {folder}")
    return code


def _command(overrides: list[str], folder: Path) -> list[str]:
    quoted = str(folder).replace("'", "\\'")  # Hydra's grammar takes few characters bare
    return [sys.executable, "-m", "dml.run", *overrides, f"paths.output_dir='{quoted}'"]


main = command(_task)

if __name__ == "__main__":
    main()
