"""What the commands with Hydra's command line share: where `conf/` lies, how processes start others, how they leave.

Heavy imports wait until the configuration is composed, so that `--help` answers at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from dml.errors import CTRL_C, INTERRUPTED, MISTAKE, Interrupted, UserError
from dml.signals import STOPPING, children, no_more

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


def command(task: Callable[[DictConfig], Any]) -> Callable[[], None]:
    """`task(config)` with Hydra's command line around it.

    Returns:
        A function that leaves with the exit codes of `dml.errors`: 2 and one sentence for a user's mistake, 1 and a
        traceback for ours.
    """
    composed = False

    def guarded(config: DictConfig) -> Any:
        nonlocal composed
        composed = True
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

    guarded.__module__ = task.__module__  # Hydra names the job after it
    run = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(guarded)

    def main() -> None:
        try:
            run()
            if Sweep.told or Sweep.failed:
                raise SystemExit(1)
        except HydraException as mistake:  # of --help, which Hydra does not guard
            stop(str(mistake))
        except SystemExit as left:
            # Hydra has said what the command line lacks, and leaves with 1.
            code = MISTAKE if left.code == 1 and not (composed or Sweep.began) else left.code
            raise SystemExit(INTERRUPTED if Sweep.told else code) from None

    return main


class Sweep(Callback):
    """Begins a sweep (`-m`) with the names of what is swept, and ends it with a table and with the jobs that failed."""

    began = 0.0
    failed = False
    told = False

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        place = OmegaConf.select(config, "paths.sweep_dir")
        if place is None or not isinstance(place, str | int | float):
            stop(f"paths.sweep_dir={'null' if place is None else place} is no folder: name one.")
        parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [o.get_key_element().lstrip("+~") for o in parsed if o.is_sweep_override()]
        given = {o.get_key_element().lstrip("+~") for o in parsed}
        params = dict(config.hydra.sweeper.get("params") or {})
        own = {name: values for name, values in params.items() if name not in given}
        if own != params:  # of an overlay: what was typed stands above it
            with read_write(config), read_write(config.hydra):
                config.hydra.sweeper.params = own
        os.environ[SWEPT] = ",".join(map(str, [*swept, *own]))
        Sweep.began = time.time()
        if config.hydra.launcher._target_.endswith(".BasicLauncher"):
            _stop_when_told()
        else:
            Sweep._wait_when_told()

    @staticmethod
    def _wait_when_told() -> None:
        """Jobs of several processes are told in theirs, and come to an end by themselves."""

        def pass_on(number: int, frame: Any) -> None:
            Sweep.told = True
            for child in children(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)

        for one in STOPPING:
            signal.signal(one, pass_on)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if Sweep.told:
            return
        from dml.report import leaves, write_summary

        folder = Path(config.hydra.sweep.dir)
        marks = sorted(mark for mark in folder.glob("*.failed") if mark.stat().st_mtime >= Sweep.began - 1)
        Sweep.failed = bool(marks)  # first of all: what is raised here Hydra makes a warning of
        try:
            if folder.is_dir() and leaves([folder]):
                write_summary([folder])
        except (UserError, OSError) as error:
            print(f"dml: {error}", file=sys.stderr)
        for mark in marks:
            print(f"Failed: {mark.with_suffix('')} ({mark.read_text().partition(chr(10))[0]})", file=sys.stderr)
        if marks:
            print(
                f"{len(marks)} of the jobs failed. The same sweep with paths.sweep_dir={folder} runs them again and "
                "skips what is done.",
                file=sys.stderr,
            )


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
