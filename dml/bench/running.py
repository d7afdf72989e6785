"""Runs parts one after another, each in a process of its own, within a limit of time."""

import json
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory

from dml.bench.results import FAILED, LEFT_OUT, Figure, Outcome, Record, Remark, as_json, of_json
from dml.bench.sizes import Sizes
from dml.configuration.defaults import SMOKE_PARTS
from dml.errors import UserError
from dml.process import end_with_parent, started_from_here

PARTS = {name: f"dml.bench.{name}:measure" for name in SMOKE_PARTS}

PATIENCE = 8  # a part that takes this many times its usual seconds counts as hanging and is stopped
LINES = 30  # how many of the last lines are shown of a part that failed


@dataclass(frozen=True)
class Task:
    """What a part gets to know.

    Attributes:
        folder: an empty folder of its own.
        end: when it has to be done, by `time.monotonic`, a clock that all processes share.
    """

    sizes: Sizes
    folder: Path
    end: float

    def left(self) -> float:
        """Returns the seconds until `end`."""
        return self.end - time.monotonic()

    def pieces(self, jobs: Mapping[str, Callable[[], Iterable[Record]]], needed: float) -> Iterator[Record]:
        """Carries out jobs in turn and yields their records.

        A job that fails, or for which fewer than `needed` seconds are left, gives a remark; the others go on.
        """
        for name, job in jobs.items():
            if self.left() < needed:
                yield left_out(name, needed, self.left())
                continue
            try:
                yield from job()
            except Exception as error:
                traceback.print_exc()
                yield Remark(FAILED, f"{name}: {sentence(error)}")


def left_out(name: str, needed: float, left: float) -> Remark:
    return Remark(LEFT_OUT, f"{name}: takes about {needed:.0f} s, and {max(0.0, left):.0f} s are left of --minutes.")


def sentence(error: BaseException) -> str:
    """Returns an error as one sentence: a UserError in full, any other as its type and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, UserError) and lines:
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else f"{type(error).__name__}."


def carry_out(
    names: Iterable[str], sizes: Sizes, seconds: float, parts: Mapping[str, str] = PARTS
) -> Iterator[tuple[str, Outcome]]:
    """Runs parts in turn.

    Args:
        names: of the parts to run.
        seconds: time for all of them together.
        parts: name -> the function that measures the part, as `module:function`.

    Yields:
        Name and outcome of each part once it is done, and before that whenever it has measured something, then with a
        remark that it is not done. So what was measured can be kept even if this process is killed.
    """
    end = time.monotonic() + seconds
    with TemporaryDirectory(prefix="dml-smoke-") as folder:
        for name in names:
            needed, left = sizes.seconds.get(name, 0), end - time.monotonic()
            if left < needed:
                yield name, Outcome(remarks=[left_out(name, needed, left)])
                continue
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
            own = Path(folder) / name
            own.mkdir()
            most = min(left, PATIENCE * needed) if needed else left
            if name == "throughput":  # its networks are left out one by one
                most = left
            outcome = Outcome()
            for outcome in _one(parts[name], Task(sizes, own, time.monotonic() + most)):
                yield name, outcome
            print(f" {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
            for line in outcome.printed:
                print(f"    {line}", file=sys.stderr)


def _one(function: str, task: Task) -> Iterator[Outcome]:
    """Runs a part in a process of its own, and kills it with all its child processes if it is not done in time.

    Yields:
        What it has measured, whenever that is more; at last its outcome.
    """
    began = time.monotonic()
    records, log = task.folder / "records.jsonl", task.folder / "log.txt"
    records.touch()
    log.touch()
    with started_from_here():
        process = mp.get_context("spawn").Process(target=_child, args=(function, task))
        process.start()
    lines = 0
    try:
        while process.is_alive() and task.left() > 0:
            process.join(min(1.0, task.left()))
            outcome = _measured(records, began)
            if len(outcome.figures) + len(outcome.remarks) > lines:
                lines = len(outcome.figures) + len(outcome.remarks)
                outcome.add(Remark(LEFT_OUT, "what comes after this: it was not done yet when this was written."))
                yield outcome
        over = process.is_alive()
    finally:
        _end(process)
    outcome = _measured(records, began)
    if over:
        outcome.add(Remark(FAILED, f"was not done after {outcome.seconds:.0f} s and was stopped."))
    elif process.exitcode and not outcome.failed:
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        outcome.add(Remark(FAILED, f"its process ended {how}."))
    if outcome.failed:
        outcome.printed = log.read_text(errors="replace").splitlines()[-LINES:]
    yield outcome


def _measured(records: Path, began: float) -> Outcome:
    """Reads what a part has measured, without a line that is being written."""
    outcome = Outcome(seconds=time.monotonic() - began)
    for line in records.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            outcome.add(of_json(json.loads(line)))
    return outcome


def _end(process: mp.process.BaseProcess) -> None:
    """Kills a process and those that it started, which are one process group."""
    assert process.pid is not None
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # in case it has not made its group yet
        process.join()


def _child(function: str, task: Task) -> None:
    os.setsid()
    end_with_parent()
    mp.set_start_method(None, force=True)  # back to the system's default: loader workers are forked, as in any run
    warnings.simplefilter("ignore")
    with (task.folder / "log.txt").open("w", buffering=1) as log, (task.folder / "records.jsonl").open("w") as records:
        for number in (1, 2):
            os.dup2(log.fileno(), number)

        # Each record is flushed as a whole line, so that it is there even if the process is killed.
        def put(record: Record) -> None:
            records.write(json.dumps(as_json(record)) + "\n")
            records.flush()

        try:
            for record in resolve_name(function)(task):
                put(record if task.sizes.goals or isinstance(record, Remark) else _without_goal(record))
        except BaseException as error:
            traceback.print_exc()
            put(Remark(FAILED, sentence(error)))
            raise SystemExit(1) from None
        finally:
            sys.stdout.flush()


def _without_goal(figure: Figure) -> Figure:
    return Figure(figure.name, figure.value, figure.unit)
