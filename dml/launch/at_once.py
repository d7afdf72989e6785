"""Several trainings at the same time, each in its own process with its output in a file."""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dml.errors import INTERRUPTED, Interrupted
from dml.process import STOPPING, duration, share_of_the_machine, started_from_here


@dataclass(frozen=True)
class Job:
    """A training to carry out.

    Attributes:
        name: as it is printed.
        command: the words of the command to start.
        log: the file to which its output is appended.
        several_devices: whether it uses several devices by itself.
        begin: called just before it starts.
    """

    name: str
    command: Sequence[str]
    log: Path
    several_devices: bool = False
    begin: Callable[[], None] = lambda: None


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    place: int
    since: float


def carry_out(jobs: Sequence[Job], at_once: int) -> list[Job]:
    """Carries out all jobs, `at_once` at a time. When one ends, it prints how many are done and the time left.

    The jobs share the machine: each gets its share of the cores, unless OMP_NUM_THREADS is set, and devices in turn.

    Returns:
        The jobs that ended with an error; the others were carried out all the same.

    Raises:
        Interrupted: a signal told this process, or one of the jobs, to stop, and all jobs have ended.
    """
    return _Several(jobs, at_once).carry_out()


class _Several:
    def __init__(self, jobs: Sequence[Job], at_once: int) -> None:
        self.waiting, self.at_once, self.number = deque(jobs), at_once, len(jobs)
        self.running: list[_Running] = []
        self.failed: list[Job] = []
        self.taken: list[float] = []  # seconds of the jobs that ended well
        self.told: list[int] = []  # signals to stop
        self.console = Console(soft_wrap=True, highlight=False, markup=False)

    def carry_out(self) -> list[Job]:
        with started_from_here(), self._passing_signals_on():
            try:
                while self.running or (self.waiting and not self.told):
                    while self.waiting and not self.told and len(self.running) < self.at_once:
                        self._start(self.waiting.popleft())
                    time.sleep(0.1)
                    for one in [one for one in self.running if one.process.poll() is not None]:
                        self._ended(one)
            finally:  # at Ctrl-C, which the terminal sends to the jobs too, or if a log cannot be written
                self._pass_on(signal.SIGTERM)
                for one in self.running:
                    one.process.wait()
        if self.told:
            raise Interrupted(f"{signal.Signals(self.told[0]).name}, passed on to all trainings")
        return self.failed

    def _start(self, job: Job) -> None:
        place = min(set(range(self.at_once)) - {one.place for one in self.running})
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.begin()
        env = share_of_the_machine(place, self.at_once, several_devices=job.several_devices)
        with job.log.open("ab") as file:
            process = subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
        self.running.append(_Running(job, process, place, time.monotonic()))
        if self.told:  # while the job was started
            process.send_signal(self.told[0])

    def _ended(self, one: _Running) -> None:
        self.running.remove(one)
        code, seconds = one.process.returncode, time.monotonic() - one.since
        if code == INTERRUPTED and not self.told:  # whoever stopped this job wants all to stop
            self._tell(signal.SIGTERM)
        if code and self.told:
            return
        if code:
            self.failed.append(one.job)
            print(f"dml: {one.job.name} ended with exit code {code}: see {one.job.log}", file=sys.stderr, flush=True)
        else:
            self.taken.append(seconds)
        ended = self.number - len(self.waiting) - len(self.running)
        said = "failed" if code else f"done in {duration(seconds)}"
        left = seconds_left(self.taken, [time.monotonic() - o.since for o in self.running], len(self.waiting))
        about = f", about {duration(left / self.at_once)} left" if left else ""
        failed = f" ({len(self.failed)} failed)" if self.failed else ""
        self.console.print(Text(f"{one.job.name}: {said}; {ended} of {self.number} done{failed}{about}"))

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._tell) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, number: int, frame: Any = None) -> None:
        self.told.append(number)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for one in self.running:
            one.process.send_signal(number)  # does nothing for a process that has ended


def seconds_left(taken: Sequence[float], running: Sequence[float], waiting: int) -> float | None:
    """Estimates the seconds that all remaining jobs take one after another, if each takes the mean of those that ended.

    Args:
        taken: the seconds of each job that ended well.
        running: the seconds that each running job has taken so far.
        waiting: how many jobs have not begun.

    Returns:
        The seconds; None if no job has ended well or none is left.
    """
    if not taken or not (running or waiting):
        return None
    mean = sum(taken) / len(taken)
    return sum(max(mean - seconds, 0) for seconds in running) + mean * waiting
