"""`python -m dml.experiment abe/table1`: tables and figures of the papers, trained, and set beside what was published.

Each is a file experiments/PAPER/NAME.yaml; a whole paper is `abe`, everything `all`. Trainings lie in --out, resume,
and are shared by the tables that need the same one. --record keeps what was measured beside the file.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.configuration.ranges import Seed, check_value
from dml.errors import INTERRUPTED, Interrupted, UserError
from dml.launch.entry import ending
from dml.papers.catalogue import FOLDER, Experiment, Training, find
from dml.papers.records import _record, keep, sizes
from dml.papers.trainings import LAUNCHERS, commands, finished, lacking, seconds_of
from dml.process import started_from_here
from dml.runs.provenance import add_start, hardware


def _list(experiments: Sequence[Experiment]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    table.add_column("", overflow="fold")
    for title in ("rows", "trained", "runs", "measured"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in experiments:
        trained = [row for row in one.rows.values() if row.overrides is not None]
        runs = len({(t.key, t.seed) for t in one.trainings()})
        numbers = (len(one.rows), len(trained), runs, len({m.row for m in one.measured}))
        table.add_row(one.name, one.title, *map(str, numbers))
    Console().print(table)


def _run(experiments: Sequence[Experiment], trainings: list[Training], options: argparse.Namespace) -> None:
    missing = lacking([one for one in trainings if not one.script])
    for sentence, (first, *more) in missing.items():
        others = f" and {len(more)} more" if more else ""
        print(f"Cannot be trained ({first.experiment}, {first.row}, {first.part}{others}): {sentence}", file=sys.stderr)
    gone = {one.overrides for some in missing.values() for one in some}
    trainings = [one for one in trainings if one.overrides not in gone]
    wanted = [one for one in trainings if not finished(one, options.out)]
    if trainings:
        numbers = [len({(t.key, t.seed) for t in some}) for some in (trainings, wanted)]
        print(f"{numbers[0]} trainings or scripts, {numbers[1]} to do.")
    elif not options.record:
        raise UserError("nothing of this can be trained here: --dry-run prints the commands.")
    if timed := [one for one in wanted if not one.script]:
        print(f"The steps of the trainings take about {_hours(seconds_of(timed))} here, one after another.", flush=True)
    failed = False
    with started_from_here():
        for command, folders in commands(wanted, options.out, options.launcher):
            if command[1] != "-m":  # a training notes it itself
                folders[0].mkdir(parents=True, exist_ok=True)
                machine = hardware("auto" if "cuda" in command else "cpu")
                add_start(folders[0], ["python", *_as_typed(command[1:-2])], machine)  # but for --out
            failed |= bool(_wait_for(command))
    for experiment in experiments:
        if options.record:
            _record(experiment, options.set, options.out)
    if failed:
        raise SystemExit(1)


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


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"


def _as_typed(command: Sequence[str]) -> list[str]:
    """Paths below the project as they are typed in it."""
    return [word.removeprefix(f"{FOLDER.parent}/") for word in command]


def _dry(trainings: Iterable[Training], options: argparse.Namespace) -> None:
    for command, _ in commands(trainings, options.out, options.launcher):
        print(shlex.join(["python", *_as_typed(command[1:])]))


def _smoke(experiments: Sequence[Experiment], rows: Sequence[str]) -> None:
    from dml.papers.smoke import smoke

    wrong = smoke(experiments, rows)
    for place, sentence in wrong.items():
        print(f"{place}: {sentence}", file=sys.stderr)
    if wrong:
        raise SystemExit(1)
    print("All rows compose, train and give their figures, at smoke scale.")


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dml.experiment", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="abe/table1, a paper (abe), or all")
    add("--list", action="store_true", help="what there is, and how much of it was measured")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    add("--rows", nargs="+", default=[], metavar="ROW", help="these alone")
    add("--seeds", nargs="+", type=int, default=[], metavar="SEED", help="instead of the experiment's")
    add("--scale", choices=("full", "smoke"), default="full", help="smoke: a step of each row on miniature data")
    add(
        "--launcher", choices=LAUNCHERS, default="basic", help="of Hydra, for the seeds of a row (default: %(default)s)"
    )
    add("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="changes to every row, as of a shorter training")
    add("--out", type=Path, default=Path("runs/experiments"), help="of trainings and pages (default: %(default)s)")
    add("--record", action="store_true", help="keep what was measured in experiments/, with commit and hardware")
    add("--sizes", action="store_true", help="keep exact parameters and flops of the rows, without training")
    add("--table", action="store_true", help="print what was measured as Markdown tables")
    add("--report", action="store_true", help="one page of everything named: published, measured, difference")
    options = parser.parse_args()
    for change in options.set:
        if (name := change.lstrip("+~").partition("=")[0]) == "seed" or name.startswith("paths."):
            raise UserError(f"--set {change} is for {'--seeds' if name == 'seed' else '--out'} to say.")
    for seed in options.seeds:
        check_value("--seeds", seed, Seed)
    experiments = find(options.names)
    if options.rows and len(experiments) != 1:
        raise UserError("--rows is for one experiment: name it.")
    trainings = [t for one in experiments for t in one.trainings(options.rows, options.seeds, options.set)]
    if options.list:
        _list(experiments)
    elif options.report:
        from dml.papers.page import write_page

        print(f"Report: {write_page(experiments, options.out)}")
    elif options.table:
        from dml.papers.page import markdown

        print("\n".join(f"{one.name}: {one.title}\n\n{markdown(one)}" for one in experiments if one.measured))
    elif options.sizes and options.set:
        raise UserError("--sizes is of the rows as they are: leave out --set.")
    elif options.sizes:
        for one in experiments:
            if found := sizes(one):
                print(f"Recorded: {keep(one, found)}")
    elif not options.names:
        raise UserError("name an experiment, as abe/table1; --list shows all.")
    elif options.dry_run:
        _dry(trainings, options)
    elif options.scale == "smoke":
        _smoke(experiments, options.rows)
    else:
        _run(experiments, trainings, options)


if __name__ == "__main__":
    main()
