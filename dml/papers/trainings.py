"""The trainings that rows of experiments need: their commands, folders and duration."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from dml.configuration.composition import composed, folder_option
from dml.errors import UserError
from dml.launch.at_once import Job
from dml.launch.job import typed
from dml.papers.catalogue import FOLDER
from dml.papers.experiment import Training
from dml.runs.folder import OUTPUT
from dml.runs.reading import is_logged, read_metrics_json, reading, require


def commands(trainings: Iterable[Training], out: Path, launcher: str = "basic") -> list[tuple[list[str], list[Path]]]:
    """Returns the commands to start, each with the folders of its runs.

    A configuration is one command, a sweep over its seeds; a script is one command for each seed.
    """
    by_key: dict[str, list[Training]] = {}
    for training in each_once(trainings):
        by_key.setdefault(training.key, []).append(training)
    launched = [] if launcher == "basic" else [f"hydra/launcher={launcher}"]
    result = []
    for key, mine in by_key.items():
        if mine[0].script:
            result += [(_script(one, out), [folder_of(one, out)]) for one in mine]
            continue
        seeds = ",".join(str(one.seed) for one in mine)
        sweep = ["-m", "dml.run", "-m", *mine[0].overrides, *launched, f"seed=choice({seeds})"]
        command = [sys.executable, *sweep, folder_option("sweep_dir", out / key)]
        result.append((command, [folder_of(one, out) for one in mine]))
    return result


def each_once(trainings: Iterable[Training]) -> list[Training]:
    """Drops trainings that an earlier row has already asked for."""
    found: dict[tuple[str, int], Training] = {}
    for one in trainings:
        found.setdefault((one.key, one.seed), one)
    return list(found.values())


def job_of(training: Training, out: Path) -> Job:
    """Returns the job that runs a training, or a script, beside others."""
    folder = folder_of(training, out)
    own = [*training.overrides, f"seed={training.seed}"]
    command = _script(training, out) if training.script else typed(own, folder)
    several = any(o.startswith(("trainer=", "trainer.devices=")) for o in training.overrides)
    several = several and not training.script and composed(*training.overrides).trainer.devices != 1
    name = f"{training.experiment}, {training.row}, {training.part}, seed {training.seed}"
    return Job(name, command, folder / OUTPUT, several)


def _script(training: Training, out: Path) -> list[str]:
    path, *options = (option.replace("{seed}", str(training.seed)) for option in training.overrides)
    return [sys.executable, str(FOLDER.parent / path), *options, "--out", str(folder_of(training, out))]


def folder_of(training: Training, out: Path) -> Path:
    """Returns the folder of a training, whether it is finished or not."""
    return out / training.key / f"seed={training.seed}"


def finished(training: Training, out: Path) -> Path | None:
    """Returns the folder of a training if it is finished, else None. With damaged figures, or with those of a script
    from before it had the row, it is not finished."""
    folder = folder_of(training, out)
    try:
        return folder if figures(training, folder) else None
    except UserError:
        return None


def figures(training: Training, folder: Path) -> dict[str, float]:
    """Reads the figures of a finished training; of a script those of the training's row, none if it lacks the row.

    Raises:
        UserError: `metrics.json` is missing or damaged.
    """
    file = folder / "metrics.json"
    if not training.script:
        return read_metrics_json(file)
    with reading(file, "run the script again"):
        found = json.loads(file.read_text())
        require(isinstance(found, dict), "it holds no rows by name")
        of_row: dict[str, float] = found.get(training.row, {})
        require(isinstance(of_row, dict) and all(map(is_logged, of_row.values())), f"{training.row} has no figures")
    return of_row
