"""The processes of a run: which of them ends with which, and what each does at a signal.

Most schedulers send a signal to all processes of a job before they take the machine away. The main process then
finishes its step and writes a checkpoint. For that it needs its loader workers, so these ignore the signal.
"""

import ctypes
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dml.errors import Interrupted, rank_said

SWEPT = "DML_SWEPT"  # environment variable of a sweep: the names of the options that are swept

PATIENCE = 20  # seconds
PARENT = "DML_PARENT"  # environment variable of a process that has to end with its parent: the parent's id


@contextmanager
def started_from_here(**variables: str) -> Iterator[dict[str, str]]:
    """Gives processes that are started meanwhile these environment variables, and makes them end with this one."""
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


AT_ONCE = "DML_AT_ONCE"  # environment variable of a run: how many runs share the machine, itself included


def share_of_the_machine(place: int, at_once: int, *, several_devices: bool = False) -> dict[str, str]:
    """Returns the environment of a run that shares the machine with others.

    OMP_NUM_THREADS is set to its share of the cores, unless it is set already. If there are several GPUs, the run sees
    one of them, in turn by `place`, unless it uses several itself.

    Args:
        place: which of the runs it is, 0..at_once-1.
        at_once: how many runs share the machine.
        several_devices: whether the run uses several GPUs.
    """
    env = {**os.environ, AT_ONCE: str(at_once)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // at_once)))
    gpus = _gpus()
    if len(gpus) > 1 and not several_devices:
        env["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return env


def runs_at_once() -> int:
    """Returns how many runs share the machine; 1 if the environment does not say."""
    said = os.environ.get(AT_ONCE, "")
    return max(1, int(said)) if said.isascii() and said.isdigit() else 1


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_each(processes: int) -> int:
    """Returns how many cores each of a run's processes on this machine has. srun may have divided them already."""
    said = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if processes > 1 and os.environ.get("SLURM_NTASKS", "1") != "1" and said.isascii() and said.isdigit():
        return min(cores(), int(said))
    return cores() // processes


def duration(seconds: float) -> str:
    """Writes a duration in words, with about two digits."""
    if seconds > 5400:
        return f"{seconds / 3600:.1f} hours"
    if seconds > 90:
        return f"{seconds / 60:.0f} minutes"
    return f"{(whole := round(seconds))} second{'' if whole == 1 else 's'}"


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
OF_MALLOC = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Makes the C library keep the memory that this process frees, so that the next step on a CPU uses it again.

    glibc takes every block above 32 MiB from the system and returns it when it is freed. The system then clears the
    same pages for every step's activations: a third of the CPU time of MobileNetV2 at 96 pixels in batches of 64, where
    the peak of memory is some percent higher with this function (experiments/speed/freed_memory.yaml). It does nothing
    with another C library, or if the environment has settings of glibc's malloc.
    """
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in OF_MALLOC)
    if platform.libc_ver()[0] == "glibc" and not tuned:
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)  # large blocks lie in the heap, too
        library.mallopt(M_TRIM_THRESHOLD, -1)  # the heap does not shrink


NVIDIA, DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")


def _gpus() -> list[str]:
    """Returns the GPUs by the names that CUDA_VISIBLE_DEVICES takes, without the slow import of torch.

    A container may list GPUs that it was not given: those have no device file. Right after a start of the machine none
    may have one.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    try:
        told = [(gpu / "information").read_text() for gpu in NVIDIA.iterdir()]
    except OSError:
        return []
    minors = [number for one in told for number in re.findall(r"^Device Minor:\s*(\d+)", one, re.MULTILINE)]
    given = [minor for minor in minors if (DEVICES / f"nvidia{minor}").exists()]
    return [str(place) for place in range(len(given or minors))]


def end_with_parent() -> None:
    """Makes this job or rank stop, as at SIGTERM, when the process that started it is gone."""
    parent = int(os.environ.get(PARENT, "0"))
    if parent != os.getppid():
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # time to write a checkpoint, if the other processes of its group are still there
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_at_ctrl_c(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process that was started here, after Ctrl-C. The terminal sends Ctrl-C to both; if only
    this process got it, the other one is stopped by SIGTERM, at which a run writes a checkpoint."""
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def stop_when_told() -> None:
    """Makes a signal to stop end this process at once. Training replaces that: it finishes its step first."""

    def leave(number: int, frame: Any) -> None:
        no_more()
        raise Interrupted(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            if signal.getsignal(one) is signal.SIG_DFL:  # submitit has its own handler
                signal.signal(one, leave)


def wait_for_the_first_rank(certain: bool = False) -> None:
    """Makes other ranks wait for the end of rank 0, which reports a mistake that all ranks find. When a rank ends with
    an error, Lightning kills the ranks that still run, and rank 0 might not have reported it yet.

    Args:
        certain: whether rank 0 is known to end too, however long its loggers take. Otherwise they wait for `PATIENCE`
            seconds at most.
    """
    if os.environ.get(PARENT) == str(os.getppid()) and os.environ.get("LOCAL_RANK", "0") != "0":
        deadline = math.inf if certain else time.monotonic() + PATIENCE
        while os.environ[PARENT] == str(os.getppid()) and time.monotonic() < deadline:
            time.sleep(0.1)


def unknown_to_the_first_rank() -> bool:
    """Returns on another rank whether rank 0 goes on, so that it does not know of the mistake found here.

    Ranks wait for `PATIENCE` seconds to learn it: a mistake that all ranks find ends rank 0, with which Lightning's
    launcher and torchrun end the others. Under srun without `--kill-on-bad-exit` nothing does.
    """
    if (rank := rank_said()) == "0" or not rank.isdigit():  # if it is not a number, `stop` prints that mistake
        return False
    if os.environ.get(PARENT) == str(os.getppid()):
        wait_for_the_first_rank()
        return os.environ[PARENT] == str(os.getppid())
    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            signal.signal(one, signal.SIG_DFL)
    time.sleep(PATIENCE)
    return True


@contextmanager
def without_farewell() -> Iterator[None]:
    """Ends this process at once when it fails, without the interpreter's own end, if it talks to others by NCCL.

    At its end Lightning would destroy the process group, and NCCL then waits for the other ranks. They wait for this
    one in the middle of a step, and what started them does not see that it failed.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if not code or not _talks_by_nccl():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _talks_by_nccl() -> bool:
    ranks: Any = sys.modules.get("torch.distributed")
    return bool(
        ranks and ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1
    ) and "nccl" in str(ranks.get_backend())


# Signals to stop, as far as the system has them: Windows has only the first.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Signals:
    """Notes in `received` the name of the first signal of `STOPPING` that this process gets after `watch`."""

    def __init__(self) -> None:
        self.received: str | None = None

    def watch(self) -> None:
        """Installs its handlers instead of Lightning's, which do not let ranks finish their step. Lightning restores
        the earlier ones at the end."""
        if threading.current_thread() is threading.main_thread():
            for one in STOPPING:
                signal.signal(one, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received = self.received or signal.Signals(number).name


def no_more() -> None:
    """Ignores signals to stop from now on. The process is ending, and its parent may pass on the same signal again."""
    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            signal.signal(one, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """Holds signals to stop and Ctrl-C back meanwhile. Processes that are started inherit that, see
    `leave_to_the_parent`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows does not send such signals
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPING, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent(worker: int = 0) -> None:
    """Makes a loader worker ignore signals to stop, except SIGTERM from its parent, which ends it. It has to be called
    in a worker that was started while signals were `held`. A worker notices by itself when its parent is gone."""
    quiet = {*STOPPING, signal.SIGINT} - {signal.SIGTERM}
    for one in quiet:
        signal.signal(one, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, quiet)
    if hasattr(signal, "sigwaitinfo"):  # else SIGTERM stays held, and workers end only with their parent
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
