"""The folder of a run: what lies in it, and whether a configuration may go on in it."""

import fcntl
import json
import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from dml.command import EXECUTION, started_from_here
from dml.errors import UserError
from dml.files import LAST, PREVIOUS, replace_file, sound
from dml.provenance import add_start, hardware

log = logging.getLogger("dml")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of a run, on the CPU, read as it is used.

    Raises:
        UserError: it is none, or damaged.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not {"state_dict", "config", "finished"} <= checkpoint.keys():
            raise KeyError("not a run's")
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is no checkpoint of a run, or damaged: delete the folder {path.parent} to train from the start."
        ) from error
    content: dict[str, Any] = checkpoint
    return content


class RunFolder:
    """`config.yaml overrides.yaml provenance.json metrics.jsonl metrics.csv metrics.json queries.npz checkpoints/
    figures/ report.html run.log`; in `checkpoints/` the last two, `last.ckpt` and `previous.ckpt`, and the best."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.last = path / "checkpoints" / LAST
        self.previous = path / "checkpoints" / PREVIOUS

    def check(self, config: DictConfig) -> None:
        """Writes nothing.

        Raises:
            UserError: the folder is of another run or cannot be written.
        """
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{nearest} is no folder that can be written: choose another with paths.output_dir=FOLDER.")
        if not self.path.exists() or all(path.name.startswith(".") for path in self.path.iterdir()):
            return  # empty but for what a kill left of a first file
        saved = self.config()
        if saved is None:
            raise UserError(
                f"{self.path} is not empty and holds no run (it has no config.yaml of one): name another folder with "
                "paths.output_dir=FOLDER."
            )
        if not self.begun() and not list(self.path.glob("*/config.yaml")):
            return  # nothing was trained yet: a first attempt may be corrected
        before, now = flat(saved, saved.runtime), flat(config, saved.runtime)
        different = [
            f"{name} was {before.get(name, 'not there')}, is {now.get(name, 'not there')}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if different:
            raise UserError(
                f"{self.path} holds a run of another configuration ({'; '.join(different[:5])}"
                f"{' and more' if len(different) > 5 else ''}): repeat its options to resume it, or name another "
                "folder with paths.output_dir=FOLDER."
            )

    def open(self, config: DictConfig, overrides: Sequence[str]) -> None:
        """Makes the folder of one training. Raises as `name`."""
        self.name(config, overrides)
        if not self.begun():
            results = (self.path / name for name in ("metrics.json", "queries.npz"))
            for given_up in (*results, *self.last.parent.glob("best_on_*.ckpt")):
                given_up.unlink(missing_ok=True)
        for part in ("checkpoints", "figures"):
            (self.path / part).mkdir(exist_ok=True)

    def name(self, config: DictConfig, overrides: Sequence[str]) -> None:
        """Makes the folder and writes the configuration into it.

        Raises:
            UserError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be made ({error.strerror}): choose another with paths.output_dir=FOLDER."
            ) from error
        # First of all, so that the folder of a run killed here is known as one.
        try:
            replace_file(self.config_file, OmegaConf.to_yaml(config, resolve=True))
            replace_file(self.path / "overrides.yaml", OmegaConf.to_yaml(list(overrides)))
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}): make room, or choose another with "
                "paths.output_dir=FOLDER."
            ) from error

    def config(self) -> DictConfig | None:
        """The configuration of the run; None where the folder has none or something else's."""
        try:
            config = OmegaConf.load(self.config_file)
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            return None
        return config if isinstance(config, DictConfig) and "runtime" in config and "method" in config else None

    def best(self, part: str) -> Path:
        """The checkpoint that was the best on `test` or `validation`."""
        return self.path / "checkpoints" / f"best_on_{part}.ckpt"

    def begun(self) -> bool:
        """Whether a checkpoint was written."""
        return self.last.exists() or self.previous.exists()

    def checkpoint(self) -> Path | None:
        """Where to go on from, if anywhere: the last checkpoint, or the one before where that one is damaged.

        Raises:
            UserError: there are checkpoints and none is whole.
        """
        if not self.begun():
            return None
        for path in (self.last, self.previous):
            if sound(path):
                return path
        raise UserError(f"No checkpoint in {self.last.parent} is whole: delete that folder to train from the start.")

    def finished(self) -> bool:
        """Whether the last checkpoint is the one at the end; the report is written before it.

        Raises:
            UserError: a checkpoint that is none, or a report that is gone.
        """
        path = self.checkpoint()
        if path is None:
            return False
        done: bool = load_checkpoint(path)["finished"]
        if done and not (self.path / "metrics.json").exists():
            raise UserError(
                f"{self.path} has lost its metrics.json: delete {self.last.parent} to train from the start."
            )
        return done

    def note_start(self, config: DictConfig, overrides: Sequence[str], devices: int = 1) -> None:
        """Adds where the figures come from to `provenance.json`; by the first rank, of a folder that it has locked."""
        if not getattr(rank_zero_only, "rank", 0):
            told = [option for option in overrides if not option.startswith("paths.")]
            machine = hardware(str(config.trainer.accelerator), devices)
            add_start(self.path, ["python", "-m", "dml.run", *told], machine)

    def metrics(self) -> dict[str, float]:
        return json.loads((self.path / "metrics.json").read_text())

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        replace_file(self.path / "metrics.json", json.dumps(metrics, indent=1) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises UserError where another process trains in this folder; a killed one holds nothing."""
        if getattr(rank_zero_only, "rank", 0) != 0:  # rank 0 holds it for all
            yield
            return
        with (self.path / "run.log").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being trained by another process: wait for it, or name another folder with "
                    "paths.output_dir=FOLDER."
                ) from None
            except OSError as error:  # a file system without locks
                log.warning("%s cannot be locked (%s): start no second run there.", self.path, error.strerror)
            for torn in self.last.parent.glob(".*"):  # what a kill left of a checkpoint
                torn.unlink()
            if self.last.exists() and not sound(self.last):
                log.warning("%s is damaged: the run goes on from the one before it.", self.last)
                self.last.unlink()  # else it would take the place of the one before
            yield

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Log records go to `run.log` too."""
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        loggers = [logging.getLogger(name) for name in ("dml", "pytorch_lightning", "py.warnings")]
        loggers[0].setLevel(logging.INFO)
        logging.captureWarnings(True)
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            handler.close()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """The ranks that Lightning starts compose anew: a time stamp of their own would be another folder."""
        with started_from_here(DML_OUTPUT_DIR=str(self.path)):
            yield


def flat(config: DictConfig, runtime: Any) -> dict[str, Any]:
    """Dotted names and values of all options; `runtime`, known once the data is, is taken from elsewhere."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for name, value in node.items():
                yield from walk(value, f"{prefix}.{name}" if prefix else str(name))
        else:
            yield prefix, node

    filled = config.copy()
    OmegaConf.set_struct(filled, False)
    filled.runtime = runtime
    container = OmegaConf.to_container(filled, resolve=True)
    assert isinstance(container, dict)
    flat = {name: value for name, value in walk(container, "") if not name.startswith(("runtime.", *EXECUTION))}
    data_dir = str(filled.paths.data_dir)  # data that moved are the same data
    return {
        name: value.replace(data_dir, "DATA", 1) if isinstance(value, str) and value.startswith(data_dir) else value
        for name, value in flat.items()
    }
