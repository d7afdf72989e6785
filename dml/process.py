"""The processes of a run: how many there are, which ends with which, and what each does at a signal.

Most schedulers tell all processes of a job at once that they will take the machine away. The main process finishes its
step and writes a checkpoint; for that it needs its loader workers, which leave the signals to it. How many processes
there are, torchrun and srun say in the environment.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dml.errors import Interrupted, UserError

SWEPT = "DML_SWEPT"  # in the environment of a sweep: the names of what is swept

PARENT = "DML_PARENT"  # in the environment of a process that is to end with the one that started it


@contextmanager
def started_from_here(**variables: str) -> Iterator[dict[str, str]]:
    """Processes that are started meanwhile have these variables in their environment, and end when this one does."""
    own = {PARENT: str(os.getpid()), **variables}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield own
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


AT_ONCE = "DML_AT_ONCE"  # in the environment of a run: how many share the machine with it, itself included


def share_of_the_machine(place: int, at_once: int, *, several_devices: bool = False) -> dict[str, str]:
    """The environment of a run that is one of several at once.

    OMP_NUM_THREADS becomes its share of the cores, unless somebody has set it. Of several GPUs it sees one, each place
    the next, unless it takes several itself.

    Args:
        place: 0..at_once-1, which of those it is.
    """
    env = {**os.environ, AT_ONCE: str(at_once)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // at_once)))
    gpus = _gpus()
    if len(gpus) > 1 and not several_devices:
        env["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return env


def runs_at_once() -> int:
    """How many runs share the machine; 1 where nobody says so."""
    said = os.environ.get(AT_ONCE, "")
    return max(1, int(said)) if said.isascii() and said.isdigit() else 1


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. Without torch, whose import takes longer than all else here."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    try:
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def end_with_parent() -> None:
    """Makes a job or rank stop, as at SIGTERM, when the process that started it is gone."""
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


def stop_when_told() -> None:
    """Makes a signal to stop end this process at once, until training begins: a training finishes its step first."""

    def leave(number: int, frame: Any) -> None:
        no_more()
        raise Interrupted(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            if signal.getsignal(one) is signal.SIG_DFL:  # submitit has its own
                signal.signal(one, leave)


def wait_for_the_first_rank(seconds: float = 20) -> None:
    """All ranks find the same mistake, and rank 0 reports it. The others wait for its end: when a rank ends with an
    error, Lightning kills those that still run, before rank 0 has said anything."""
    if os.environ.get(PARENT) == str(os.getppid()) and os.environ.get("LOCAL_RANK", "0") != "0":
        deadline = time.monotonic() + seconds
        while os.environ[PARENT] == str(os.getppid()) and time.monotonic() < deadline:
            time.sleep(0.1)


# Those that the system has: Windows has the first alone.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Signals:
    """The first of `STOPPING` that this process got since `watch`, by its name."""

    def __init__(self) -> None:
        self.received: str | None = None

    def watch(self) -> None:
        """In place of Lightning's handlers, which do not let ranks finish their step; it puts back what was before."""
        if threading.current_thread() is threading.main_thread():
            for one in STOPPING:
                signal.signal(one, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = self.received or signal.Signals(number).name


def no_more() -> None:
    """Ignores signals to stop from now on: the process is leaving, and its parent may pass on the same signal again."""
    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            signal.signal(one, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """Holds signals back meanwhile. Processes that are started begin with them held too (see `leave_to_the_parent`)."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows, which sends none
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPING, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent(worker: int = 0) -> None:
    """Makes a loader worker ignore all signals but SIGTERM from its parent, which ends it. (That its parent is gone, a
    worker notices by itself.) To be called in a worker that was started while signals were `held`."""
    quiet = {*STOPPING, signal.SIGINT} - {signal.SIGTERM}
    for one in quiet:
        signal.signal(one, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, quiet)
    if hasattr(signal, "sigwaitinfo"):  # else SIGTERM stays held, and workers end with their parent alone
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


NUMBERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "MASTER_PORT"),
    "JSM_NAMESPACE_RANK",
)

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

OF_SLURM = ("SLURM_NNODES", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def check_environment() -> None:
    """Before Lightning is imported, which reads some of these at once.

    Raises:
        UserError: a variable of torchrun or srun that is no whole number.
    """
    for name in NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise UserError(
                f"The environment variable {name}={value} has to be a whole number, as torchrun and srun set it: "
                f"unset it, or start the run with one of them."
            )


def processes() -> int:
    """How many were started together. Raises as `check_environment`."""
    check_environment()
    return max(int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def of_torchrun() -> tuple[int, int]:
    """Processes of a machine, and machines. Raises UserError where torchrun's variables are not all there."""
    check_environment()
    _need(OF_TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID")
    return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])


def of_slurm() -> tuple[int, int]:
    """Tasks of a machine, and machines; a single task needs no more than its number.

    Raises:
        UserError: srun's variables are not all there, or machines have different numbers of tasks.
    """
    check_environment()
    tasks = int(os.environ["SLURM_NTASKS"])
    if tasks == 1:
        return 1, 1
    _need(OF_SLURM, "srun", f"SLURM_NTASKS={tasks}")
    nodes = int(os.environ["SLURM_NNODES"])
    if not nodes or not tasks or tasks % nodes:
        raise UserError(
            f"SLURM_NTASKS={tasks} and SLURM_NNODES={nodes} do not give every machine the same number of tasks: "
            "set --ntasks-per-node."
        )
    return tasks // nodes, nodes


def _need(names: tuple[str, ...], launcher: str, sign: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"The environment has {sign} but not {', '.join(missing)}: start all processes with {launcher}, or unset "
            f"{sign.partition('=')[0]} for a run of its own."
        )
