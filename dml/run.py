"""`python -m dml.run`: compose the configuration, train, evaluate, report.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from dml.errors import UserError

_HERE = Path(__file__).resolve().parent
# Inside the wheel, or beside the package in a checkout.
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"

_composed = False


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _task(config: DictConfig) -> float:
    global _composed
    _composed = True
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _job_of_a_sweep()
    try:
        from dml.train import run

        return run(config, HydraConfig.get().overrides.task).get("test/recall@1", float("nan"))
    except UserError as mistake:
        _stop(str(mistake))


def _job_of_a_sweep() -> float:
    """One job of `-m`, in a process of its own: Lightning's launcher re-executes the command line on every rank."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.sweep.dir) / hydra_config.sweep.subdir
    command = [sys.executable, "-m", "dml.run", *hydra_config.overrides.task, f"paths.output_dir={folder}"]
    code = subprocess.run(command, check=False).returncode
    if code:
        _stop(f"The job in {folder} ended with exit code {code}; the jobs after it were not started.")
    return json.loads((folder / "metrics.json").read_text())["test/recall@1"]


def _stop(sentence: str) -> NoReturn:
    print(f"dml: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """The command line; exit code 2 and one sentence for a user's mistake, 1 and a traceback for ours."""
    try:
        _task()
    except HydraException as mistake:  # of --help, which Hydra does not guard
        _stop(str(mistake))
    except SystemExit as stop:
        # Hydra has said what the command line lacks, and leaves with 1.
        raise SystemExit(2 if stop.code == 1 and not _composed else stop.code) from None


if __name__ == "__main__":
    main()
