"""What the commands share: Hydra's command line, and how they end.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dml.configuration.command_line import ending, hydra_sentence
from dml.configuration.composition import CONF
from dml.errors import CTRL_C, INTERRUPTED, Interrupted, UserError, stop
from dml.process import end_with_parent, no_more, stop_when_told, wait_for_the_first_rank


def command(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
    """`task(config)` with Hydra's command line around it.

    Returns:
        A function that leaves as `ending` says.
    """
    own: list[Exception] = []  # what the task raised

    def guarded(config: DictConfig) -> Any:
        end_with_parent()
        stop_when_told()
        try:
            return task(config)
        except UserError as mistake:
            wait_for_the_first_rank()
            stop(str(mistake))
        except Interrupted:
            no_more()
            wait_for_the_first_rank()
            raise SystemExit(INTERRUPTED) from None
        except KeyboardInterrupt:
            raise SystemExit(CTRL_C) from None
        except Exception as error:
            own.append(error)
            raise

    guarded.__module__ = task.__module__  # Hydra names the job after it
    run = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(guarded)

    @ending(files=False)
    def main() -> None:
        from dml.launch.sweep import Sweep

        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, and does not print them and leave
        try:
            run()
        except Exception as error:
            if error in own or Sweep.crashed or isinstance(error, BrokenPipeError | Interrupted):
                raise
            if not isinstance(error, HydraException | OmegaConfBaseException) and not Sweep.began:
                raise
            sentence = hydra_sentence(error)
            if not isinstance(error, HydraException | OmegaConfBaseException):  # of a plug-in
                sentence = f"the sweep ended ({sentence.rstrip('.')}): look at hydra.sweeper.* and hydra.launcher.*"
            if not Sweep.failed:
                stop(sentence)
            print(f"dml: {sentence}", file=sys.stderr)
        if Sweep.began:
            Sweep.conclude()

    return main
