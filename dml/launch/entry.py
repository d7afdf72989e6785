"""The entry of commands that use Hydra: its command line, and how they end.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from dml.configuration.command_line import ending, hydra_sentence, is_group_nameless
from dml.configuration.composition import CONF
from dml.errors import CTRL_C, INTERRUPTED, Interrupted, UserError, rank_said, stop
from dml.process import (
    end_with_parent,
    no_more,
    stop_when_told,
    unknown_to_the_first_rank,
    wait_for_the_first_rank,
    without_farewell,
)


def command(task: Callable[[DictConfig], Any], sweeps: bool = True) -> Callable[[], None]:
    """Makes a command from a task: Hydra's command line composes the configuration for it.

    Args:
        task: takes the configuration.
        sweeps: whether `-m` is allowed.

    Returns:
        The command's `main`, which ends with the exit codes of `dml.errors`.
    """
    own: list[Exception] = []  # errors that the task raised, not Hydra

    def guarded(config: DictConfig) -> Any:
        end_with_parent()
        stop_when_told()
        try:
            return task(config)
        except UserError as mistake:
            if unknown_to_the_first_rank():
                print(f"dml: rank {rank_said()}: {mistake}", file=sys.stderr)
            stop(str(mistake))
        except Interrupted as told:
            no_more()
            wait_for_the_first_rank(certain=told.together)
            raise SystemExit(INTERRUPTED) from None
        except KeyboardInterrupt:
            raise SystemExit(CTRL_C) from None
        except (ConfigAttributeError, ConfigKeyError) as error:
            if not (removed := [one for one in HydraConfig.get().overrides.task if one.startswith("~")]):
                own.append(error)
                raise
            stop(f"{error.full_key} is missing: leave out {' '.join(removed)}.")
        except InterpolationResolutionError as error:
            stop(f"A reference ${{...}} among the options cannot be resolved ({str(error).splitlines()[0]}).")
        except Exception as error:
            own.append(error)
            raise

    guarded.__module__ = task.__module__  # Hydra takes the name of the job from it
    run = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(guarded)

    @without_farewell()
    @ending(files=False)
    def main() -> None:
        from dml.launch.sweep import Sweep

        if not sweeps and (asked := [word for word in ("-m", "--multirun") if word in sys.argv[1:]]):
            stop(f"{asked[0]} is for dml.run: give each option one value.")
        if any(word.lstrip("+").startswith("hydra.sweeper.params") for word in sys.argv[1:]):
            stop("hydra.sweeper.params is for the files of conf/sweep: give an option its values as in lr=0.1,0.2.")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them and leaving
        try:
            run()
        except Exception as error:
            if error in own or Sweep.crashed or isinstance(error, BrokenPipeError):
                raise
            told = isinstance(error, HydraException | OmegaConfBaseException) or is_group_nameless(error)
            if not told and not Sweep.began:
                raise
            sentence = hydra_sentence(error)
            if not told:  # raised by a plug-in
                sentence = f"the sweep ended ({sentence.rstrip('.')}): check hydra.sweeper.* and hydra.launcher.*"
            if not Sweep.failed:
                stop(sentence)
            print(f"dml: {sentence}", file=sys.stderr)
        if Sweep.began:
            Sweep.conclude()

    return main


def check_overlay() -> None:
    """Raises UserError if an overlay of conf/sweep was given, but this is a single run and not a sweep."""
    hydra_config = HydraConfig.get()
    given = {override.partition("=")[0].lstrip("+~") for override in hydra_config.overrides.task}
    if still := [str(name) for name in hydra_config.sweeper.get("params") or {} if name not in given]:
        overlay = dict(hydra_config.runtime.choices)["sweep"]
        raise UserError(f"sweep={overlay} is for a sweep over {', '.join(still)}: start it with -m, or leave it out.")
