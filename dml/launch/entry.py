"""What the commands share: Hydra's command line, and how they end.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import difflib
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dml.configuration.composition import CONF
from dml.errors import CTRL_C, INTERRUPTED, UNREAD, Interrupted, Unfaithful, UserError, stop
from dml.process import end_with_parent, no_more, stop_when_told, wait_for_the_first_rank


@contextmanager
def ending(files: bool = True) -> Iterator[None]:
    """How every command ends; also a decorator of its `main`: the exit codes of `dml.errors`, and one sentence for what
    the user can put right. Other exceptions are faults of the code: they pass, with their traceback.

    Args:
        files: the system's errors are those of files that the user named; of a training they are not.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a pipe that nobody reads is told quietly
    except UserError as mistake:
        stop(str(mistake))
    except Unfaithful as sentence:
        print(f"dml: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None
    except (ConfigCompositionException, OverrideParseException) as mistake:
        stop(hydra_sentence(mistake))
    except Interrupted as told:
        if str(told):
            print(f"dml: Stopped by {told}; the same line goes on.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except KeyboardInterrupt:
        raise SystemExit(CTRL_C) from None
    except (BrokenPipeError, SystemExit) as left:
        by_rich = isinstance(left.__context__, BrokenPipeError)  # it leaves with 1, its output sent nowhere
        if not by_rich and not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more
        raise SystemExit(UNREAD if by_rich or isinstance(left, BrokenPipeError) else left.code) from None
    except OSError as error:
        if not files:
            raise
        stop(f"{error.filename or 'What is printed'} cannot be written or read ({error.strerror or error}).")


def _nobody_reads() -> bool:
    """Whether the other end of the pipe that this process prints to is closed."""
    asked = select.poll()
    asked.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in asked.poll(0))


def hydra_sentence(error: Exception) -> str:
    """What Hydra says of a command line, in one sentence; of an unknown choice of a group, the near ones."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        near = difflib.get_close_matches(choice.lower(), error.options, n=5, cutoff=0.5)
        remedy = f"did you mean {', '.join(near)}? --help lists all" if near else f"choose {', '.join(error.options)}"
        return f"{group}={choice} is unknown: {remedy}."
    said = [" ".join(str(error).split()) or type(error).__name__]
    if error.__cause__ is not None and str(error.__cause__).strip():
        said.append(f"({str(error.__cause__).strip().splitlines()[0]})")
    if "does not support sweep type" in said[0]:
        said.append("- choose from such a range with hydra/sweeper=optuna")
    return " ".join(said).rstrip(".?") + "."


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
