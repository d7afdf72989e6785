"""Sweeps (`-m`): each job has its own folder and process, whichever launcher starts it, and failures are remembered."""

import hashlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, read_write

from dml.configuration.composition import folder_option
from dml.errors import MISTAKE, Interrupted, UserError, stop
from dml.launch.locks import free_place, hold, is_over, turn
from dml.launch.search import on_the_test, settle_search, told_of_search, when_found
from dml.process import STOPPING, SWEPT, cores, share_of_the_machine
from dml.started import processes

NAME_BYTES = 100  # of a folder's name; file systems allow 255, and files beside it have longer names

Launch = Callable[..., Sequence[JobReturn]]


class Sweep(Callback):
    """The state of the sweep of this process, as a callback of Hydra's. It notes at the start which options are swept,
    remembers which jobs failed, and prints that at the end.

    Attributes:
        began: whether this process started a sweep.
        launched: whether that sweep has had a job.
        crashed: whether a job raised an error that is not an ordinary failure of a job.
        folder: of the sweep.
        failed: the folders of jobs that failed.
        held: the lock that jobs look at, see `is_over`; None: there is none.
        criterion: what a search maximises; empty: the sweep is none.
        before: when results of an earlier search were written, in the file system's time; 0: there are none.
    """

    began: ClassVar[bool] = False
    launched: ClassVar[bool] = False
    crashed: ClassVar[bool] = False
    folder: ClassVar[Path] = Path()
    failed: ClassVar[list[Path]] = []
    held: ClassVar[FileLock | None] = None
    criterion: ClassVar[str] = ""
    before: ClassVar[float] = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        place = OmegaConf.select(config, "paths.sweep_dir")
        if not isinstance(place, str | int | float):
            stop(f"paths.sweep_dir={'null' if place is None else place} is no folder: name one.")
        if processes() > 1:
            stop(
                "Several processes were started together, and each would carry out the whole sweep: start one, without "
                "torchrun or srun. Its jobs start their ranks themselves: trainer=ddp trainer.devices=N."
            )
        for option in ("nodes", "tasks_per_node"):
            if (asked := config.hydra.launcher.get(option)) not in (None, 1):
                stop(
                    f"hydra.launcher.{option}={asked} would start a job of the sweep {asked} times: leave it out. Jobs "
                    "start their ranks themselves: trainer=ddp trainer.devices=N."
                )
        Sweep.began, Sweep.folder = True, Path(config.hydra.sweep.dir)
        parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [o.get_key_element().lstrip("+~") for o in parsed if o.is_sweep_override()]
        given = {o.get_key_element().lstrip("+~") for o in parsed}
        if "paths.output_dir" in given:
            stop("paths.output_dir is for a single run: name the folder of a sweep with paths.sweep_dir=FOLDER.")
        settle_search(config, parsed)
        if "direction" in config.hydra.sweeper:
            Sweep.criterion, Sweep.before = str(config.protocol.criterion), when_found(Sweep.folder)
            print(on_the_test(config), end="", file=sys.stderr)
        params = dict(config.hydra.sweeper.get("params") or {})
        own = {name: values for name, values in params.items() if name not in given}
        if own != params:  # what was typed takes precedence over the overlay
            with read_write(config), read_write(config.hydra):
                config.hydra.sweeper.params = own
        os.environ[SWEPT] = ",".join(map(str, [*swept, *own]))
        launcher: Any = get_class(config.hydra.launcher._target_)
        if not hasattr(launcher.launch, "__wrapped__"):
            launcher.launch = remembered(launcher.launch)
        if launcher.__name__ not in ("BasicLauncher", "SlurmLauncher"):
            Sweep.held = hold(Sweep.folder)

    @classmethod
    def conclude(cls) -> None:
        """Writes and prints the table of the sweep, and prints what a search found and which jobs failed.

        Raises:
            SystemExit: a job failed; the exit code is 1. Or the table cannot be written; it is 2.
        """
        from dml.reporting.summary import write_summary
        from dml.runs.collecting import leaves

        unwritten = False
        try:
            if cls.folder.is_dir() and leaves([cls.folder]):
                remedy = f"put that right, then repeat the sweep with {_the_same_folder()}"
                write_summary([cls.folder], cls.folder, remedy=remedy)
        except (UserError, OSError) as error:
            unwritten = True
            print(f"dml: {error}", file=sys.stderr)
        if cls.criterion:
            print(told_of_search(cls.folder, cls.criterion, cls.before), end="")
        for folder in cls.failed:
            code = ""
            with suppress(OSError):
                code = f" ({mark_of(folder).read_text().partition(os.linesep)[0]})"
            print(f"Failed: {folder}{code}", file=sys.stderr)
        if not cls.launched:
            stop("this sweep has no job: give the options that it varies at least one value.")
        if cls.failed:
            print(
                f"{len(cls.failed)} of the jobs failed. Put that right, then repeat the sweep with "
                f"{_the_same_folder()}: it runs them again and skips the jobs that are done.",
                file=sys.stderr,
            )
            raise SystemExit(1)
        if unwritten:
            raise SystemExit(MISTAKE)


def _the_same_folder() -> str:
    """Returns the option that names the sweep's folder, as a shell takes it."""
    return shlex.quote(folder_option("sweep_dir", Sweep.folder))


def remembered(launch: Launch) -> Launch:
    """Wraps a launcher's `launch`, so that the process that started the sweep notes in `Sweep` which jobs failed.

    Jobs that run at once on this machine end when a signal tells that process to stop, or when it is gone. Jobs of
    SLURM go on.
    """

    def launched(self: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with _noting_signals() as told:
            returns = launch(self, job_overrides, initial_job_idx=initial_job_idx)
        if told:
            raise Interrupted(f"{signal.Signals(told[0]).name}, with {_the_same_folder()}")
        for one in returns:
            Sweep.launched = True
            Sweep.crashed |= one.status == JobStatus.FAILED
            folder = Sweep.folder / job_name(list(one.overrides or []))
            if one.status == JobStatus.COMPLETED and folder in Sweep.failed:  # a search may try the same job twice
                Sweep.failed.remove(folder)
            if one.status == JobStatus.COMPLETED and one.return_value is None:
                Sweep.failed.append(folder)
        return returns

    launched.__wrapped__ = launch  # type: ignore[attr-defined]
    return launched


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Collects signals to stop meanwhile. At a signal it releases the lock, by which the jobs learn that they have to
    stop."""
    told: list[int] = []

    def tell(number: int, frame: Any) -> None:
        told.append(number)
        assert Sweep.held is not None
        Sweep.held.release()

    if Sweep.held is None:  # `dml.launch.job.job` passes signals on, or the jobs go on in SLURM
        yield told
        return
    before = {number: signal.signal(number, tell) for number in STOPPING}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def job_of_a_sweep(config: DictConfig, overrides: list[str]) -> float | None:
    """Carries out one job of a sweep in its own process, which Lightning needs: it repeats the command line for every
    rank.

    A job that fails leaves a file `FOLDER.failed`, and the next jobs run all the same.

    Returns:
        What a search maximises, see `objective`; None for a job that failed or was stopped (at NaN, Optuna's sweeper
        would stop).

    Raises:
        UserError: the folder of the sweep cannot be made.
    """
    from dml.launch.job import job, objective, typed

    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.sweep.dir) / job_name(overrides)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent} cannot be made ({error.strerror}): name another with paths.sweep_dir=FOLDER."
        ) from error
    at_once = not hydra_config.launcher._target_.endswith(".BasicLauncher")
    if is_over():
        return None
    log = folder.with_name(f"{folder.name}.log") if at_once else None
    print(f"\n{folder}" + (f": see {log}" if log else ""), flush=True)
    try:
        with turn(folder), _environment(config, hydra_config) as environment:
            if is_over():
                return None
            code = job(overrides, folder, log, is_over, environment, folder_option("sweep_dir", folder.parent))
    except Interrupted:
        if at_once:  # other jobs may still be writing their checkpoints
            return None
        raise
    mark = mark_of(folder)
    if code:
        print(f"dml: the job in {folder} ended with exit code {code}.", file=sys.stderr)
        with suppress(OSError):  # a full disk must not stop other jobs
            said = f"exit code {code}\n{shlex.join(typed(overrides, folder))}\n"
            mark.write_text(said, errors="backslashreplace")  # names of folders may hold bytes that are not text
        return None
    with suppress(OSError):
        mark.unlink(missing_ok=True)
    return objective(config, json.loads((folder / "metrics.json").read_text()))


@contextmanager
def _environment(config: DictConfig, hydra_config: Any) -> Iterator[dict[str, str] | None]:
    """Gives the environment of a job that shares the machine with others: with joblib's launcher, the only one that
    says how many. None for other launchers."""
    number = hydra_config.launcher.get("n_jobs")
    if number is None:
        yield None
        return
    at_once = number if number > 0 else max(1, cores() + 1 + number)  # as joblib counts them
    with free_place(Path(hydra_config.sweep.dir), at_once, hydra_config.job.num) as place:
        yield share_of_the_machine(place, at_once, several_devices=config.trainer.devices != 1)


def mark_of(folder: Path) -> Path:
    """Returns the path of the file that marks a job as failed."""
    return folder.with_name(f"{folder.name}.failed")


def job_name(overrides: list[str]) -> str:
    """Returns the name of a job's folder, made of the options that the sweep varies. So the same sweep again, or a
    larger one, finds the jobs that are done.

    Different jobs have different names: `/ , %` in a value are written `%2F %2C %25`, and a long name ends in a digest.
    """
    swept = os.environ.get(SWEPT, "").split(",")
    mine = [o for o in overrides if o.lstrip("+~").partition("=")[0] in swept]
    name = ",".join(o.replace("%", "%25").replace("/", "%2F").replace(",", "%2C") for o in mine) or "job"
    as_bytes = os.fsencode(name)
    if len(as_bytes) <= NAME_BYTES:
        return name
    digest = hashlib.sha256(as_bytes).hexdigest()[:16]
    return f"{as_bytes[: NAME_BYTES - 17].decode('utf-8', 'ignore')}_{digest}"
