"""What the commands with Hydra's command line share: where `conf/` lies, and how they leave.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from dml.errors import UserError

_HERE = Path(__file__).resolve().parent
# Inside the wheel, or beside the package in a checkout.
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"


def command(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
    """`task(config)` with Hydra's command line around it.

    Returns:
        A function that leaves with exit code 2 and one sentence for a user's mistake, 1 and a traceback for ours.
    """
    composed = False

    def guarded(config: DictConfig) -> Any:
        nonlocal composed
        composed = True
        try:
            return task(config)
        except UserError as mistake:
            stop(str(mistake))

    guarded.__module__ = task.__module__  # Hydra names the job after it
    run = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(guarded)

    def main() -> None:
        try:
            run()
        except HydraException as mistake:  # of --help, which Hydra does not guard
            stop(str(mistake))
        except SystemExit as left:
            # Hydra has said what the command line lacks, and leaves with 1.
            raise SystemExit(2 if left.code == 1 and not composed else left.code) from None

    return main


class SweepSummary(Callback):
    """Ends a sweep (`-m`) with the table of its runs."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from dml.report import leaves, write_summary

        folder = Path(config.hydra.sweep.dir)
        if folder.is_dir() and leaves([folder]):
            write_summary([folder])


def stop(sentence: str) -> NoReturn:
    """Leaves with exit code 2."""
    print(f"dml: {sentence}", file=sys.stderr)
    raise SystemExit(2)
