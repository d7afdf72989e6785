"""Signals by which schedulers say that they will take the machine away: the processes of a run, and what each does.

Most schedulers tell all processes of a job at once. The main process finishes its step and writes a checkpoint; for
that it needs its loader workers, which leave the signals to it.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


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
    """From now on nothing interrupts leaving: whoever started this process may pass on what it got itself too."""
    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            signal.signal(one, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """Signals wait meanwhile, also for processes that are started: those begin with signals held (see
    `leave_to_the_parent`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPING, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent(worker: int = 0) -> None:
    """A loader worker does nothing at a signal but at its parent's SIGTERM, which ends it; a parent that is gone it
    notices itself. To be called in a worker that was started while signals were `held`."""
    quiet = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT}
    for one in quiet:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, quiet)
    if hasattr(signal, "sigwaitinfo"):  # else SIGTERM stays held, and workers end with their parent alone
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
