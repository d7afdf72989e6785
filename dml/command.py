"""What the commands with Hydra's command line share: where `conf/` lies, how processes start others, how they leave.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import difflib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dml.errors import CTRL_C, INTERRUPTED, MISTAKE, UNREAD, Interrupted, UserError
from dml.signals import STOPPING, no_more

_HERE = Path(__file__).resolve().parent
# Inside the wheel, or beside the package in a checkout.
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"

# How and where a run is carried out, not what it computes: these may change when it is resumed.
EXECUTION = (
    "paths.",
    "logger",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.sync_batchnorm",  # several devices ask for it, or for frozen statistics
    "trainer.num_workers",
    "dataset.cache",
    "protocol.repeats",  # how many there are changes none of them
    "protocol.splits",
    "download",
    "trainer.log_every",
    "trainer.checkpoint_every",
)


@contextmanager
def ending(files: bool = True) -> Iterator[None]:
    """How every command ends; also a decorator of its `main`: the exit codes of `dml.errors`, and one sentence for what
    the user can put right. What is raised by code that is wrong passes, with its traceback.

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
        _end_with_parent()
        _stop_when_told()
        try:
            return task(config)
        except UserError as mistake:
            _after_the_first_rank()
            stop(str(mistake))
        except Interrupted:
            no_more()
            _after_the_first_rank()
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
        from dml.sweeps import Sweep

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


def stop(sentence: str) -> NoReturn:
    """Leaves with exit code 2; of several processes the first says why."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))
    if rank == "0" or not rank.isdigit():  # a rank that is no number is what the sentence is about
        print(f"dml: {sentence}", file=sys.stderr)
    raise SystemExit(MISTAKE)


SWEPT = "DML_SWEPT"  # in the environment of a sweep: the names of what is swept
PARENT = "DML_PARENT"  # in the environment of a process that is to end with the one that started it


@contextmanager
def started_from_here(**variables: str) -> Iterator[None]:
    """What is started meanwhile has some variables in its environment, and ends when this process does."""
    before = {name: os.environ.get(name) for name in (PARENT, *variables)}
    os.environ.update({PARENT: str(os.getpid()), **variables})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_with_parent() -> None:
    """A job or rank whose parent was killed stops as if it had been told to: nobody waits for it any more."""
    parent = int(os.environ.get(PARENT, "0"))
    if parent != os.getppid():
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # to write a checkpoint, where the others of its group are still there
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stop_when_told() -> None:
    """Until a training begins, which finishes its step first, a signal to stop ends at once what can go on later."""

    def leave(number: int, frame: Any) -> None:
        no_more()
        raise Interrupted(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            if signal.getsignal(one) is signal.SIG_DFL:  # submitit has its own
                signal.signal(one, leave)


def _after_the_first_rank(seconds: float = 20) -> None:
    """Lightning kills the first of the processes that it started where another ends with an error before it: what all
    have found is for the first to say."""
    if os.environ.get(PARENT) == str(os.getppid()) and os.environ.get("LOCAL_RANK", "0") != "0":
        deadline = time.monotonic() + seconds
        while os.environ[PARENT] == str(os.getppid()) and time.monotonic() < deadline:
            time.sleep(0.1)
