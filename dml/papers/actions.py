"""The subcommands of `python -m dml.experiment` that train and record, one function each.

`names` are names of experiments as `catalogue.find` takes them.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dml.configuration.defaults import EXPERIMENTS
from dml.configuration.ranges import Few, Seed, check_value
from dml.errors import INTERRUPTED, MISTAKE, Interrupted, UserError
from dml.launch.at_once import Job, carry_out
from dml.papers.catalogue import FOLDER, find, read_experiment
from dml.papers.checks import check_changes, check_folder, check_searched
from dml.papers.estimate import seconds_of
from dml.papers.experiment import Experiment, Search, Training
from dml.papers.possible import check_options, possible
from dml.papers.records import keep, record_finished, sizes_of
from dml.papers.smoke import check_rows
from dml.papers.trainings import commands, each_once, finished, job_of
from dml.papers.tuning import alone_with, command_of_search, job_of_search, searches, tuned
from dml.process import duration, end_at_ctrl_c, started_from_here
from dml.runs.folder import OUTPUT
from dml.runs.provenance import FILE as PROVENANCE
from dml.runs.provenance import add_start, hardware


def run(
    names: Sequence[str],
    rows: Sequence[str] = (),
    parts: Sequence[str] = (),
    seeds: Sequence[int] = (),
    changes: Sequence[str] = (),
    out: Path = EXPERIMENTS,
    launcher: str = "basic",
    jobs: int = 1,
    dry_run: bool = False,
    record: bool = False,
    missing: bool = False,
) -> None:
    """Starts the trainings that are not finished yet, and first prints about how long they will take.

    Args:
        rows, parts: names of those to train, of one experiment; empty: all.
        seeds: used in place of the experiment's; empty: the experiment's.
        changes: Hydra overrides that are added to those of every row.
        out: the folder of the trainings.
        launcher: Hydra's launcher for the seeds of a row.
        jobs: how many trainings run at once. With more than one, each is a process that writes its output to a file in
            its folder.
        dry_run: whether the commands are printed and nothing is started.
        record: whether all finished trainings are recorded at the end.
        missing: whether trainings that are recorded already are left out, though they are not in `out`.

    Raises:
        UserError: a name, row or part does not exist, a seed, change, folder or number of jobs is not allowed, a change
            does not fit a row, or is of an option that is searched for, or nothing can be trained here.
        SystemExit: with 1, if a training failed; with 2, if a search could not start and has said why.
        Interrupted: a signal stopped a training.
    """
    check_changes(changes)
    check_folder(out, writes=not dry_run)
    for seed in seeds:
        check_value("--seeds", seed, Seed)
    check_value("--jobs", jobs, Few)
    if jobs > 1 and launcher != "basic":
        raise UserError("--jobs starts each training itself and takes no launcher: leave out --launcher or --jobs.")
    experiments = _find(names, rows, parts)
    check_searched(experiments, rows, changes)
    if not any(one.trainings(rows, seeds, changes, parts) for one in experiments):  # before hours of searching
        if changes and any(one.trainings(rows, seeds, parts=parts) for one in experiments):
            raise UserError("these rows are scripts, which take no changes: leave out --set.")
        if not (rows or parts):
            raise UserError(f"nothing of {', '.join(names)} is trained here: all its rows are quoted from elsewhere.")
        raise UserError("these rows have no training in these parts: --dry-run without --rows and --parts prints all.")
    scripts = [row for one in experiments for row in rows if one.rows[row].command is not None]
    if changes and scripts:
        raise UserError(f"the row '{scripts[0]}' is a script, which takes no changes: leave out --set or that row.")

    def wanted() -> list[Training]:
        every = [(one, training) for one in experiments for training in one.trainings(rows, seeds, changes, parts)]
        return [training for one, training in every if not (missing and one.has(training))]

    if missing and not wanted():
        print("All of this is recorded already.")
        return
    of_rows = {(one.experiment, one.row) for one in wanted()}
    every = [search for one in experiments for search in searches(one, rows, changes)]
    missing_searches = [one for one in every if (one.experiment, one.row) in of_rows]
    check_options([*missing_searches, *(wanted() if changes else ())])  # the rows as they stand are tested
    if dry_run:
        for search in missing_searches:
            print(shlex.join(["python", *_as_typed(command_of_search(search, out)[1:])]))
            print(f"# {search.experiment}, {search.row}: then its trainings, with the options that this search finds")
        searched = {(one.experiment, one.row) for one in missing_searches}
        rest = [one for one in wanted() if (one.experiment, one.row) not in searched]
        for command in _commands(rest, out, launcher, jobs):
            print(shlex.join(["python", *_as_typed(command[1:])]))
        return
    experiments = [
        _tune(one, [search for search in missing_searches if search.experiment == one.name], parts, changes, out, jobs)
        for one in experiments
    ]
    failed = _train(possible(wanted(), elsewhere=launcher == "submitit_slurm"), out, launcher, jobs)
    if record:
        for experiment in experiments:
            record_finished(experiment, changes, out)
    if failed:
        raise SystemExit(1)


def smoke(names: Sequence[str], rows: Sequence[str] = ()) -> None:
    """Runs `check_rows` and prints what went wrong.

    Raises:
        UserError: a name or row does not exist, or rows of several experiments.
        SystemExit: with 1, if a row failed.
    """
    wrong = check_rows(_find(names, rows), rows)
    for place, sentence in wrong.items():
        print(f"{place}: {sentence}", file=sys.stderr)
    if wrong:
        raise SystemExit(1)
    print("All rows compose, train one step and give their figures.")


def record(names: Sequence[str], changes: Sequence[str] = (), out: Path = EXPERIMENTS, sizes: bool = False) -> None:
    """Writes the results of finished searches and the metrics of all finished trainings to the experiments' records.

    A search that is recorded already stays as it is.

    Args:
        changes: Hydra overrides that the trainings were run with, beside those of their rows.
        out: the folder of the trainings.
        sizes: whether exact parameters and flops are recorded instead, which needs no training.

    Raises:
        UserError: a name does not exist, a change or the folder is not allowed, a change does not fit a row and nothing
            was trained with it, changes or a folder are given together with `sizes`, or the figures of a training are
            damaged.
    """
    for given, option, what in ((changes, "--set", "changes"), (out != EXPERIMENTS, "--out", "folder of trainings")):
        if sizes and given:
            raise UserError(f"--sizes counts the rows as they are and takes no {what}: leave out {option} or --sizes.")
    check_changes(changes)
    check_folder(out)
    experiments = find(names)
    check_searched(experiments, (), changes)
    trainings = [training for one in experiments for training in one.trainings(changes=changes)]
    if changes and not any((out / one.key).is_dir() for one in trainings):  # what some rows were trained with fits them
        check_options(trainings)
    for one in experiments:
        if not sizes:
            record_finished(_with_searches(one, changes, out), changes, out)
        elif found := sizes_of(one):
            print(f"Recorded: {keep(one, found)}")


def _find(names: Sequence[str], rows: Sequence[str], parts: Sequence[str] = ()) -> list[Experiment]:
    """Raises UserError for an unknown name, and for rows or parts if there are several experiments."""
    experiments = find(names)
    for option, chosen in (("--rows", rows), ("--parts", parts)):
        if chosen and len(experiments) != 1:
            raise UserError(f"{option} is for one experiment: name that one alone, as in abe/table1.")
    return experiments


def _tune(
    experiment: Experiment,
    wanted: Sequence[Search],
    parts: Sequence[str],
    changes: Sequence[str],
    out: Path,
    jobs: int,
) -> Experiment:
    """Carries out searches before trainings of some parts, and returns the experiment with their results.

    The results are recorded even without --record, as all trainings of the rows use them.

    Raises:
        UserError: all trials of a search failed, or its data is not there.
        SystemExit: with 2, if a search could not start and has said why.
        Interrupted: a signal stopped a search.
    """
    if not wanted:
        return experiment
    possible([t for one in wanted for t in experiment.trainings([one.row], [0], changes, parts)])
    print(f"Searches: {len(wanted)}, of {wanted[0].trials} trials each.", flush=True)
    for some in [wanted] if jobs > 1 else [[one] for one in wanted]:
        with alone_with(experiment, some, changes, out) as left:
            if left and jobs > 1:
                carry_out([job_of_search(one, out) for one in left], jobs)
            elif left:
                with started_from_here():
                    code = _wait_for(command_of_search(left[0], out))
                if code == MISTAKE:  # with 1 a trial failed: the record tells which
                    raise SystemExit(MISTAKE)
            for search in left:
                keep(experiment, tuned=[tuned(search, changes, out)])
    return read_experiment(experiment.name)


def _with_searches(experiment: Experiment, changes: Sequence[str], out: Path) -> Experiment:
    """Records the searches of a folder that the experiment lacks, and returns the experiment with them."""
    for search in searches(experiment, (), changes):
        if (out / search.key).is_dir():
            try:
                keep(experiment, tuned=[tuned(search, changes, out)])
            except UserError as error:  # it is not finished, or failed
                print(f"Left out: {error}")
    return read_experiment(experiment.name)


def _commands(trainings: Sequence[Training], out: Path, launcher: str, jobs: int) -> list[Sequence[str]]:
    if jobs > 1:
        return [job_of(one, out).command for one in each_once(trainings)]
    return [command for command, _ in commands(trainings, out, launcher)]


def _train(trainings: Sequence[Training], out: Path, launcher: str, jobs: int) -> bool:
    """Starts what is not finished. Returns whether any of it failed. Raises Interrupted if a signal stopped one."""
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
            if command[1] != "-m":  # a training notes its start itself
                _note_start(command, folders[0])
            failed |= bool(_wait_for(command))
    return failed


def _wait_for(command: Sequence[str]) -> int:
    """Starts a command and returns its exit code. Waits for it to end even if a signal stops this process.

    Raises:
        Interrupted: a signal stopped the command.
    """
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        end_at_ctrl_c(process)
        raise
    if code == INTERRUPTED:
        raise Interrupted("a signal to " + shlex.join(command))
    return code


def _noted(training: Training, out: Path) -> Job:
    """Returns the job of a training; the job of a script also notes its start."""
    job = job_of(training, out)
    return replace(job, begin=partial(_note_start, job.command, job.log.parent)) if training.script else job


def _note_start(command: Sequence[str], folder: Path) -> None:
    """Writes down the start of a script: command, date, commit and hardware. Earlier starts count if they left
    anything that the script may go on with."""
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} <= {PROVENANCE, OUTPUT}:
        (folder / PROVENANCE).unlink(missing_ok=True)
    machine = hardware("auto" if "cuda" in command else "cpu")
    add_start(folder, ["python", *_as_typed(command[1:-2])], machine)  # without the last two words, --out FOLDER


def _as_typed(command: Sequence[str]) -> list[str]:
    """Shortens paths below the project to what one types in its root."""
    return [word.removeprefix(f"{FOLDER.parent}/") for word in command]
