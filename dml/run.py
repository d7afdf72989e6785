"""`python -m dml.run`: compose the configuration, train, evaluate, report."""

import json
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.command import command, stop


def _task(config: DictConfig) -> float:
    """Recall@1 on the test classes."""
    overrides = list(HydraConfig.get().overrides.task)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _job_of_a_sweep(overrides)
    from dml.collection import run_all
    from dml.pieces import pieces, settle
    from dml.train import run

    settle(config)
    metrics = run_all(config, overrides) if pieces(config) else run(config, overrides)
    return metrics.get("test/recall@1", float("nan"))


def _job_of_a_sweep(overrides: list[str]) -> float:
    """One job of `-m`, in a process of its own: Lightning's launcher re-executes the command line on every rank."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.sweep.dir) / hydra_config.sweep.subdir
    code = job(overrides, folder)
    if code:
        stop(f"The job in {folder} ended with exit code {code}; the jobs after it were not started.")
    return json.loads((folder / "metrics.json").read_text())["test/recall@1"]


def job(overrides: list[str], folder: Path) -> int:
    """The exit code of a run in a process of its own."""
    quoted = str(folder).replace("'", "\\'")  # Hydra's grammar takes few characters bare
    options = [*overrides, f"paths.output_dir='{quoted}'"]
    return subprocess.run([sys.executable, "-m", "dml.run", *options], check=False).returncode


main = command(_task)

if __name__ == "__main__":
    main()
