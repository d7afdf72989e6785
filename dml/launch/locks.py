"""The locks of a sweep: by which its jobs learn that it is over, wait for one another, and share the machine."""

import atexit
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

from filelock import FileLock, Timeout

from dml.errors import Interrupted

HELD = "DML_SWEEP"  # in the environment of a sweep: a file that its process has locked for as long as jobs may run


def hold(folder: Path) -> FileLock | None:
    """Makes and locks a file that the jobs of the sweep in a folder look at. Returns None on a file system without
    locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".sweep.", dir=folder)
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


@contextmanager
def turn(folder: Path) -> Iterator[None]:
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
