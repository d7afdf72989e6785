"""The trainings that rows of experiments need: their commands, folders and duration."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from dml.configuration.command_line import hydra_sentence
from dml.configuration.composition import composed, folder_option
from dml.configuration.options import check
from dml.configuration.trainings import trainings_of
from dml.data.dataset import open_dataset
from dml.errors import UserError
from dml.launch.at_once import Job
from dml.launch.job import typed
from dml.papers.catalogue import FOLDER
from dml.papers.experiment import Training
from dml.runs.folder import OUTPUT
from dml.runs.reading import is_logged, read_metrics_json, reading, require
from dml.training.build import build_method


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


def checked(place: str, overrides: Sequence[str]) -> DictConfig:
    """Composes options, and checks them.

    Args:
        place: experiment and row, named in the message.

    Raises:
        UserError: the options do not compose, or one has a value that is not allowed.
    """
    try:
        config = composed(*overrides)
        check(config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        said = str(error) if isinstance(error, UserError) else hydra_sentence(error)
        raise UserError(f"{place}: {said}") from error
    return config


def lacking(trainings: Sequence[Training], elsewhere: bool = False) -> dict[str, list[Training]]:
    """Finds the trainings whose data set cannot be opened, or that need a GPU where there is none.

    Args:
        elsewhere: whether they run on other machines, which may have a GPU.

    Returns:
        What is missing, as a sentence -> the trainings that lack it, one of each configuration.

    Raises:
        UserError: the options of a row do not compose, or one has a value that is not allowed.
    """
    found: dict[str, list[Training]] = {}
    opened: dict[str, str] = {}
    for training in {one.overrides: one for one in trainings}.values():
        config = checked(f"{training.experiment}, {training.row}", training.overrides)
        settings = str(config.dataset)
        if settings not in opened:
            try:
                open_dataset(config)
                opened[settings] = ""
            except UserError as mistake:
                opened[settings] = str(mistake)
        missing = opened[settings]
        if config.trainer.accelerator == "gpu" and not (elsewhere or torch.cuda.is_available()):
            missing = missing or "trainer.accelerator=gpu needs a GPU, and this computer has none that torch can use."
        if missing:
            found.setdefault(missing, []).append(training)
    return found


def seconds_of(trainings: Sequence[Training]) -> float:
    """Estimates how many seconds the steps of all trainings take here, one after another.

    It times forward and backward passes of each distinct model on random images. Loading, the loss and evaluation are
    left out.

    Raises:
        UserError: an option has a value that is not allowed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed: dict[str, float] = {}
    total = 0.0
    trainings = list(trainings)
    seeds = Counter(training.key for training in each_once(trainings))
    for training in tqdm({one.key: one for one in trainings}.values(), desc="estimating", leave=False):
        config = checked(f"{training.experiment}, {training.row}", training.overrides)
        config.backbone.weights = "none"
        config.runtime.train_classes = 100
        size = json.dumps([str(config[part]) for part in ("backbone", "head", "method", "image_size")])
        if size not in timed:
            method = build_method(config).to(device)
            images = torch.rand(8, 3, config.image_size, config.image_size, device=device)
            for _ in range(2):  # the second time counts: the first includes making buffers
                start = time.perf_counter()
                method.embed(images).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                timed[size] = (time.perf_counter() - start) / len(images)
        several = max(1, len(trainings_of(config))) * seeds[training.key]
        total += timed[size] * config.sampler.batch_size * config.trainer.max_steps * several
    return total
