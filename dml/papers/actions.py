"""What `python -m dml.experiment` does: a function a subcommand.

Experiments are named as in `catalogue.find`.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.configuration.defaults import EXPERIMENTS
from dml.configuration.ranges import Few, Seed, check_value
from dml.errors import INTERRUPTED, Interrupted, UserError
from dml.launch.at_once import Job, carry_out, duration
from dml.papers.catalogue import FOLDER, find, read_experiment
from dml.papers.experiment import Experiment, Training
from dml.papers.page import markdown, write_page
from dml.papers.records import keep, record_finished, sizes_of
from dml.papers.smoke import check_rows
from dml.papers.trainings import commands, each_once, finished, job_of, lacking, seconds_of
from dml.papers.tuning import command_of_search, job_of_search, searches, tuned
from dml.process import started_from_here
from dml.runs.provenance import add_start, hardware


def show(names: Sequence[str]) -> None:
    """Prints how many rows experiments have, and how many of them were measured."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("", overflow="fold")
    for title in ("rows", "trained", "runs", "measured"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in find(names):
        trained = [row for row in one.rows.values() if row.overrides is not None]
        runs = len({(t.key, t.seed) for t in one.trainings()})
        numbers = (len(one.rows), len(trained), runs, len({m.row for m in one.measured}))
        table.add_row(one.name, one.title, *map(str, numbers))
    Console().print(table)


def run(
    names: Sequence[str],
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    changes: Sequence[str] = (),
    out: Path = EXPERIMENTS,
    launcher: str = "basic",
    jobs: int = 1,
    dry_run: bool = False,
    record: bool = False,
) -> None:
    """Trains what is not trained yet, after it has said how long that takes.

    Args:
        rows: of one experiment, these alone.
        seeds: in place of the experiment's.
        changes: overrides of every row, beside its own.
        out: the folder of the trainings.
        launcher: of Hydra, for the seeds of a row.
        jobs: trainings at once, of all rows and seeds, each a process with its output in its folder.
        dry_run: the commands are printed, and nothing is started.
        record: what is finished then is recorded.

    Raises:
        UserError: a name, row, seed, change or number of jobs that is none, or nothing that can be trained here.
        SystemExit: with 1, where a training failed.
        Interrupted: a signal stopped a training.
    """
    _check_changes(changes)
    for seed in seeds:
        check_value("--seeds", seed, Seed)
    check_value("--jobs", jobs, Few)
    if jobs > 1 and launcher != "basic":
        raise UserError("--jobs starts each training itself: leave out --launcher.")
    experiments = _find(names, rows)
    if dry_run:
        found = [command_of_search(search, out) for one in experiments for search in searches(one, rows, changes)]
        trainings = [t for one in experiments for t in one.trainings(rows, seeds, changes)]
        for command in (*found, *_commands(trainings, out, launcher, jobs)):
            print(shlex.join(["python", *_as_typed(command[1:])]))
        return
    experiments = [_tune(one, rows, changes, out, jobs) for one in experiments]
    trainings = [t for one in experiments for t in one.trainings(rows, seeds, changes)]
    failed = _train(_possible(trainings), out, launcher, jobs)
    if record:
        for experiment in experiments:
            record_finished(experiment, changes, out)
    if failed:
        raise SystemExit(1)


def smoke(names: Sequence[str], rows: Sequence[str] = ()) -> None:
    """See `check_rows`. Raises SystemExit with 1 where a row failed."""
    wrong = check_rows(_find(names, rows), rows)
    for place, sentence in wrong.items():
        print(f"{place}: {sentence}", file=sys.stderr)
    if wrong:
        raise SystemExit(1)
    print("All rows compose, train and give their figures, at smoke scale.")


def record(names: Sequence[str], changes: Sequence[str] = (), out: Path = EXPERIMENTS, sizes: bool = False) -> None:
    """Keeps what the finished trainings came to; where `sizes`, exact parameters and flops, without training.

    Raises:
        UserError: a name or change that is none, or changes where sizes are wanted.
    """
    if sizes and changes:
        raise UserError("--sizes is of the rows as they are: leave out --set.")
    _check_changes(changes)
    for one in find(names):
        if not sizes:
            record_finished(one, changes, out)
        elif found := sizes_of(one):
            print(f"Recorded: {keep(one, found)}")


def report(names: Sequence[str], out: Path = EXPERIMENTS) -> None:
    """Writes `index.html` of experiments."""
    print(f"Report: {write_page(find(names), out)}")


def table(names: Sequence[str]) -> None:
    """Prints what was measured as Markdown. Raises UserError where nothing was."""
    measured = [one for one in find(names) if one.measured]
    if not measured:
        raise UserError(f"nothing of {', '.join(names)} was measured: run it with --record.")
    print("\n".join(f"{one.name}: {one.title}\n\n{markdown(one)}" for one in measured))


def _find(names: Sequence[str], rows: Sequence[str]) -> list[Experiment]:
    """Raises UserError for a name that is none, and for rows of several experiments."""
    experiments = find(names)
    if rows and len(experiments) != 1:
        raise UserError("--rows is for one experiment: name it.")
    return experiments


def _check_changes(changes: Sequence[str]) -> None:
    """Raises UserError for a change that another option is for."""
    for change in changes:
        if (name := change.lstrip("+~").partition("=")[0]) == "seed" or name.startswith("paths."):
            raise UserError(f"--set {change} is for {'--seeds' if name == 'seed' else '--out'} to say.")


def _tune(experiment: Experiment, rows: Sequence[str], changes: Sequence[str], out: Path, jobs: int) -> Experiment:
    """The experiment with its rows tuned; what the searches find is recorded, as all trainings go by it.

    Raises:
        UserError: no trial of a search ended well, or its data is not there.
        Interrupted: a signal stopped one.
    """
    wanted = searches(experiment, rows, changes)
    if not wanted:
        return experiment
    _possible([t for one in wanted for t in experiment.trainings([one.row], [0], changes)])
    print(f"{len(wanted)} searches of {wanted[0].trials} trials each.", flush=True)
    if jobs > 1:
        carry_out([job_of_search(one, out) for one in wanted], jobs)
    for search in wanted:
        if jobs == 1:
            with started_from_here():
                _wait_for(command_of_search(search, out))  # 1 where a trial failed, which is recorded
        keep(experiment, tuned=[tuned(search, changes, out)])
    return read_experiment(experiment.name)


def _possible(trainings: Sequence[Training]) -> list[Training]:
    """Those whose data is there; says what the others lack. Raises UserError where there are none."""
    missing = lacking([one for one in trainings if not one.script])
    for sentence, (first, *more) in missing.items():
        others = f" and {len(more)} more" if more else ""
        print(f"Cannot be trained ({first.experiment}, {first.row}, {first.part}{others}): {sentence}", file=sys.stderr)
    gone = {one.overrides for some in missing.values() for one in some}
    possible = [one for one in trainings if one.overrides not in gone]
    if not possible:
        raise UserError("nothing of this can be trained here: --dry-run prints the commands.")
    return possible


def _commands(trainings: Sequence[Training], out: Path, launcher: str, jobs: int) -> list[Sequence[str]]:
    if jobs > 1:
        return [job_of(one, out).command for one in each_once(trainings)]
    return [command for command, _ in commands(trainings, out, launcher)]


def _train(trainings: Sequence[Training], out: Path, launcher: str, jobs: int) -> bool:
    """Whether one of the trainings failed. Raises Interrupted where a signal stopped one."""
    wanted = [one for one in trainings if not finished(one, out)]
    numbers = [len(each_once(some)) for some in (trainings, wanted)]
    print(f"{numbers[0]} trainings or scripts, {numbers[1]} to do.")
    if timed := [one for one in wanted if not one.script]:
        seconds = duration(seconds_of(timed))
        print(f"The steps of the trainings take about {seconds} here, one after another.", flush=True)
    if jobs > 1:
        return bool(carry_out([_noted(one, out) for one in each_once(wanted)], jobs))
    failed = False
    with started_from_here():
        for command, folders in commands(wanted, out, launcher):
            if command[1] != "-m":  # a training notes it itself
                _note_start(command, folders[0])
            failed |= bool(_wait_for(command))
    return failed


def _wait_for(command: Sequence[str]) -> int:
    """The exit code. Raises Interrupted where a signal stopped it, and waits for it where one stops this process."""
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal told it too
        process.wait()
        raise
    if code == INTERRUPTED:
        raise Interrupted("a signal to " + shlex.join(command))
    return code


def _noted(training: Training, out: Path) -> Job:
    """A training to be carried out beside others; of a script, its start is noted."""
    job = job_of(training, out)
    return replace(job, begin=partial(_note_start, job.command, job.log.parent)) if training.script else job


def _note_start(command: Sequence[str], folder: Path) -> None:
    """Of a script."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = hardware("auto" if "cuda" in command else "cpu")
    add_start(folder, ["python", *_as_typed(command[1:-2])], machine)  # but for --out


def _as_typed(command: Sequence[str]) -> list[str]:
    """Paths below the project as they are typed in it."""
    return [word.removeprefix(f"{FOLDER.parent}/") for word in command]
