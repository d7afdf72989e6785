"""`python -m dml.experiment abe/table1`: tables and figures of the papers, trained, and set beside what was published.

Each is a file experiments/PAPER/NAME.yaml; a whole paper is `abe`, everything `all`. Trainings lie in --out, resume,
and are shared by the tables that need the same one. --record keeps what was measured beside the file.
"""

import argparse
import fcntl
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.command import ending, hydra_sentence, started_from_here
from dml.errors import INTERRUPTED, Interrupted, UserError
from dml.files import beside, replace_file
from dml.papers import FOLDER, Compared, Experiment, Measurement, Training, find, load
from dml.provenance import add_start, commit, hardware, starts
from dml.ranges import Seed, check_value

LAUNCHERS = ("basic", "joblib", "submitit_local", "submitit_slurm")


def commands(trainings: Iterable[Training], out: Path, launcher: str = "basic") -> list[tuple[list[str], list[Path]]]:
    """What to start, and the folders of what it runs: a sweep over the seeds of each configuration, a script a seed."""
    by_key: dict[str, list[Training]] = {}
    for training in trainings:
        mine = by_key.setdefault(training.key, [])
        if training.seed not in (one.seed for one in mine):
            mine.append(training)
    launched = [] if launcher == "basic" else [f"hydra/launcher={launcher}"]
    result = []
    for key, mine in by_key.items():
        if mine[0].script:
            result += [(_script(one, out), [folder_of(one, out)]) for one in mine]
            continue
        seeds = ",".join(str(one.seed) for one in mine)
        sweep = ["-m", "dml.run", "-m", *mine[0].overrides, *launched, f"seed=choice({seeds})"]
        command = [sys.executable, *sweep, f"paths.sweep_dir={out / key}"]
        result.append((command, [folder_of(one, out) for one in mine]))
    return result


def _script(training: Training, out: Path) -> list[str]:
    path, *options = (option.replace("{seed}", str(training.seed)) for option in training.overrides)
    return [sys.executable, str(FOLDER.parent / path), *options, "--out", str(folder_of(training, out))]


def folder_of(training: Training, out: Path) -> Path:
    """Where a training, done or not, has its place."""
    return out / training.key / f"seed={training.seed}"


def finished(training: Training, out: Path) -> Path | None:
    """The folder of a training that is done."""
    folder = folder_of(training, out)
    return folder if (folder / "metrics.json").exists() else None


def lacking(trainings: Sequence[Training]) -> dict[str, list[Training]]:
    """What keeps trainings from starting, as data sets that are not there, and which, one of each configuration.

    Raises:
        UserError: options that do not compose.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from dml.build import open_dataset
    from dml.command import CONF

    found: dict[str, list[Training]] = {}
    opened: dict[str, str] = {}
    for training in {one.overrides: one for one in trainings}.values():
        with initialize_config_dir(str(CONF), version_base="1.3"):
            try:
                config = compose("config", overrides=list(training.overrides))
            except HydraException as error:
                raise UserError(f"{training.experiment}, {training.row}: {hydra_sentence(error)}") from error
        settings = str(config.dataset)
        if settings not in opened:
            try:
                open_dataset(config)
                opened[settings] = ""
            except UserError as mistake:
                opened[settings] = str(mistake)
        if opened[settings]:
            found.setdefault(opened[settings], []).append(training)
    return found


def seconds_of(trainings: Sequence[Training]) -> float:
    """How long the training steps of all would take here, one after another: two steps of each model are timed.

    Data, evaluation and weights are left out, and configurations of one size are timed once.

    Raises:
        UserError: a number of steps or images that is none.
    """
    import time

    import torch
    from hydra import compose, initialize_config_dir
    from tqdm import tqdm

    from dml.build import build_method
    from dml.command import CONF
    from dml.options import check
    from dml.pieces import pieces

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed: dict[str, float] = {}
    total = 0.0
    distinct = {(training.key, training.seed): training for training in trainings}
    for training in tqdm(distinct.values(), desc="estimating", leave=False):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides=list(training.overrides))
        check(config)
        config.backbone.weights = "none"
        config.runtime.train_classes = 100
        size = json.dumps([str(config[part]) for part in ("backbone", "head", "method", "image_size")])
        if size not in timed:
            method = build_method(config).to(device)
            images = torch.rand(8, 3, config.image_size, config.image_size, device=device)
            for _ in range(2):  # the second is measured: the first makes buffers
                start = time.perf_counter()
                method.embed(images).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                timed[size] = (time.perf_counter() - start) / len(images)
        several = max(1, len(pieces(config)))
        total += timed[size] * config.sampler.batch_size * config.trainer.max_steps * several
    return total


def measure(experiment: Experiment, changes: Sequence[str], out: Path) -> list[Measurement]:
    """What the finished trainings of an experiment came to."""
    found = []
    for training in _with_seeds(experiment, changes, out):
        folder = folder_of(training, out)
        metrics = json.loads((folder / "metrics.json").read_text())
        if training.script:
            metrics = metrics.get(training.row, {})
        wanted = {column.metric for column in experiment.parts[training.part].columns.values()}
        wanted |= {one["metric"] for one in _drawn(experiment) if "metric" in one} | {"untrained/recall@1"}
        kept = {name: metrics[name] for name in sorted(wanted) if name in metrics}
        if not kept:  # of a script from before it had this row
            continue
        begun = starts(folder) or [dict.fromkeys(("command", "commit", "date", "hardware"), "unknown")]
        # A run that went on elsewhere is of all these commits and machines.
        commits, machines = (", ".join(dict.fromkeys(one[name] for one in begun)) for name in ("commit", "hardware"))
        found.append(
            Measurement(
                *(training.row, training.part, training.key, training.seed, list(changes), kept),
                *(begun[-1]["command"], commits, begun[-1]["date"], machines),
                metrics["run/seconds"] * metrics.get("run/trainings", 1) if "run/seconds" in metrics else None,
            )
        )
    return found


def _with_seeds(experiment: Experiment, changes: Sequence[str], out: Path) -> list[Training]:
    """The finished trainings, of whatever seeds there are."""
    result = []
    for training in experiment.trainings(seeds=[0], changes=changes):
        names = [path.parent.name for path in (out / training.key).glob("seed=*/metrics.json")]
        seeds = sorted(int(name.removeprefix("seed=")) for name in names)
        result += [replace(training, seed=seed) for seed in seeds]
    return result


def _drawn(experiment: Experiment) -> list[dict[str, str]]:
    axes = [experiment.figure.get(name, {}) for name in ("x", "y")]
    return [one for axis in axes for one in (axis if isinstance(axis, list) else [axis]) if isinstance(one, dict)]


def sizes(experiment: Experiment) -> list[Measurement]:
    """Parameters and flops of the rows whose columns show them: exact, and nothing is trained."""
    from hydra import compose, initialize_config_dir

    from dml.build import build_method, complexity
    from dml.command import CONF

    found = []
    for training in experiment.trainings(seeds=[0]):
        columns = experiment.parts[training.part].columns.values()
        if not training.script and any(column.metric.startswith("model/") for column in columns):
            overrides = training.overrides
            with initialize_config_dir(str(CONF), version_base="1.3"):
                config = compose("config", overrides=list(overrides))
            config.backbone.weights = "none"
            config.runtime.train_classes = 2
            counted = complexity(build_method(config), config.image_size)
            metrics = {f"model/{name}": float(n) for name, n in counted.items()}
            command = shlex.join(["python", "-m", "dml.describe", *overrides])
            today = datetime.now(UTC).date().isoformat()
            told = (command, commit(), today, hardware("cpu"))
            found.append(Measurement(training.row, training.part, training.key, None, [], metrics, *told))
    return found


def compare_rows(experiment: Experiment, changes: Sequence[str], out: Path) -> list[Compared]:
    """The finished rows of an experiment with the one that it compares them with, where that is finished too."""
    from dml.compare import over_classes, paired, runs_of

    folders: dict[tuple[str, str], list[Path]] = {}
    for training in _with_seeds(experiment, changes, out):
        folders.setdefault((training.row, training.part), []).extend(runs_of(folder_of(training, out)))
    found = []
    for (row, part), mine in folders.items():
        base = folders.get((experiment.compared_with, part))
        if base is None or row == experiment.compared_with:
            continue
        both = paired(base, mine)
        for metric, values in both.values.items():
            d = over_classes(*values, both.classes)
            figures = (d.estimate, d.low, d.high, d.p)
            found.append(
                Compared(row, part, list(changes), metric, experiment.compared_with, *figures, [*both.runs[::-1]])
            )
    return found


def keep(experiment: Experiment, found: Sequence[Measurement], compared: Sequence[Compared] = ()) -> Path:
    """Writes measurements beside the experiment, in place of those of the same row, part, seed and changes."""

    def place(one: Measurement | Compared) -> tuple[Any, ...]:
        return one.row, one.part, one.seed if isinstance(one, Measurement) else one.metric, tuple(one.changes)

    with _alone(experiment.record):
        before = load(experiment.name)  # another process may have recorded meanwhile
        all_of_them = {place(one): one for one in before.measured}
        for one in found:  # what was recorded before keeps its commit, date and hardware
            if place(one) not in all_of_them or all_of_them[place(one)].metrics != one.metrics:
                all_of_them[place(one)] = one
        differences = {place(one): one for one in before.compared}
        for difference in compared:
            known = differences.get(place(difference))
            if known is None or min(known.runs) <= min(difference.runs):  # never less than there was
                differences[place(difference)] = difference
        content = {
            "measured": [asdict(one) for one in all_of_them.values()],
            "compared": [asdict(one) for one in differences.values()],
        }
        replace_file(experiment.record, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return experiment.record


@contextmanager
def _alone(record: Path) -> Iterator[None]:
    """No other process writes records of this paper meanwhile."""
    descriptor = os.open(record.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _record(experiment: Experiment, changes: Sequence[str], out: Path) -> None:
    """What is finished, and a picture of it where that is of a comparison."""
    found = measure(experiment, changes, out)
    if not found:
        print(f"Nothing of {experiment.name} is finished: nothing was recorded.")
        return
    print(f"Recorded: {keep(experiment, found)}")
    if experiment.compared_with:
        from dml.reporting.experiments import comparison

        keep(experiment, [], compare_rows(experiment, changes, out))
        if (picture := comparison(load(experiment.name))) is not None:
            path = experiment.record.with_suffix(".png")
            with beside(path) as new:
                picture.savefig(new, format="png")
            print(f"Drawn: {path}")


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
    from dml.smoke import smoke

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
        from dml.reporting.experiments import write_page

        print(f"Report: {write_page(experiments, options.out)}")
    elif options.table:
        from dml.reporting.experiments import markdown

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
