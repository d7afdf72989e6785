"""Sweeps (`-m`): each job has its own folder and process, whichever launcher starts it, and failures are remembered."""

import atexit
import hashlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, read_write

from dml.configuration.composition import folder_option
from dml.errors import MISTAKE, Interrupted, UserError, stop
from dml.launch.search import on_the_test, settle_search
from dml.process import STOPPING, SWEPT, cores, share_of_the_machine
from dml.started import processes

HELD = "DML_SWEEP"  # in the environment of a sweep: a file that its process has locked for as long as jobs may run

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
    """

    began: ClassVar[bool] = False
    launched: ClassVar[bool] = False
    crashed: ClassVar[bool] = False
    folder: ClassVar[Path] = Path()
    failed: ClassVar[list[Path]] = []
    held: ClassVar[FileLock | None] = None

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
        if "direction" in config.hydra.sweeper and (said := on_the_test(config)):
            print(said, file=sys.stderr)
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
            Sweep.held = _held()

    @classmethod
    def conclude(cls) -> None:
        """Writes and prints the table of the sweep, and prints which jobs failed.

        Raises:
            SystemExit: a job failed; the exit code is 1.
        """
        from dml.reporting.summary import write_summary
        from dml.runs.collecting import leaves

        try:
            if cls.folder.is_dir() and leaves([cls.folder]):
                write_summary([cls.folder], cls.folder)
        except (UserError, OSError) as error:
            print(f"dml: {error}", file=sys.stderr)
        for folder in cls.failed:
            code = ""
            with suppress(OSError):
                code = f" ({mark_of(folder).read_text().partition(os.linesep)[0]})"
            print(f"Failed: {folder}{code}", file=sys.stderr)
        if not cls.launched:
            stop("this sweep has no job: give the options that it varies at least one value.")
        if cls.failed:
            repeat = f"Repeat the sweep with {_the_same_folder()}: it runs them again and skips the jobs that are done."
            if all((folder / "metrics.json").exists() and not mark_of(folder).exists() for folder in cls.failed):
                repeat = "Their folders hold runs with other options: name another folder with paths.sweep_dir=FOLDER."
            print(f"{len(cls.failed)} of the jobs failed. {repeat}", file=sys.stderr)
            raise SystemExit(1)


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


def _held() -> FileLock | None:
    """Makes and locks a file that the jobs of this sweep look at. Returns None on a file system without locks."""
    try:
        Sweep.folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".sweep.", dir=Sweep.folder)
        os.close(descriptor)
        atexit.register(Path(path).unlink, missing_ok=True)
        held = FileLock(path)
        held.acquire(timeout=0)
    except (OSError, NotImplementedError):  # any other fault of the folder is reported by the first job
        return None
    os.environ[HELD] = path
    return held


def is_over() -> bool:
    """Returns whether the process that started the sweep was told to stop or is gone: its jobs have to stop then."""
    if HELD not in os.environ:
        return False
    if not os.path.exists(os.environ[HELD]):
        return True
    lock = FileLock(os.environ[HELD])
    try:
        lock.acquire(timeout=0)
    except (OSError, NotImplementedError):  # the sweep holds it, or another job that is just asking
        return False
    lock.release()
    return True


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
        with _turn(folder), _environment(config, hydra_config) as environment:
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
    if code == MISTAKE and (folder / "metrics.json").exists():
        return None  # the folder holds a run with other options, which has not failed
    if code:
        with suppress(OSError):  # a full disk must not stop other jobs
            said = f"exit code {code}\n{shlex.join(typed(overrides, folder))}\n"
            mark.write_text(said, errors="backslashreplace")  # names of folders may hold bytes that are not text
        return None
    with suppress(OSError):
        mark.unlink(missing_ok=True)
    return objective(config, json.loads((folder / "metrics.json").read_text()))


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Waits while another job has the same options: a search may try the same values twice at once, or the same sweep
    runs twice. The second one then finds the run finished. Raises Interrupted if the sweep is over meanwhile."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    waits = False
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0 if not waits else 0.5)
        except Timeout:
            if is_over():
                raise Interrupted(f"the sweep ended before the job in {folder} began") from None
            if not waits:
                print(f"{folder}: another process trains this; waiting for it.", flush=True)
            waits = True
        except (OSError, NotImplementedError):  # a file system without locks
            break
    try:
        yield
    finally:
        lock.release()


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


@contextmanager
def free_place(folder: Path, at_once: int, number: int) -> Iterator[int]:
    """Holds a place of `share_of_the_machine`, 0..at_once-1, that no other job of a sweep has.

    The number of the job alone would not do: jobs end in any order, and two of them would share a GPU.

    Raises Interrupted if the sweep is over meanwhile.

    Args:
        folder: where the locks are; a place is free again when its process ends, however that ends.
        at_once: how many jobs run at once.
        number: of the job. Its own place is asked for first, and is what it gets where a file system has no locks.
    """
    with ExitStack() as held:
        for place in cycle((number + i) % at_once for i in range(at_once)):
            try:
                # Not dml.files.alone, which would import torch here.
                held.enter_context(FileLock(folder / f".place_{place}.lock").acquire(timeout=0))
            except Timeout:  # a job that has just ended may still hold its place
                if is_over():
                    raise Interrupted("the sweep ended before this job began") from None
                time.sleep(0.1)
                continue
            except (OSError, NotImplementedError):
                pass
            yield place
            return


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
