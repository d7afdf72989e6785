"""The folder of a run: its files, and whether a run with a given configuration may continue in it."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import elsewhere
from dml.configuration.identity import flat
from dml.distributed import is_first
from dml.errors import UserError, no_room
from dml.files import (
    LAST,
    NETWORK,
    PREVIOUS,
    alone,
    load_checkpoint,
    read_yaml,
    refers,
    sound,
    torn,
    write_atomically,
)
from dml.runs.reading import read_metrics_json

LENGTH = "trainer.max_steps"
OUTPUT = "output.log"  # what a run printed, if whoever started it keeps that in its folder
FORMAT = 3  # version of the state that callbacks keep in a checkpoint

log = logging.getLogger("dml")


class RunFolder:
    """A run's folder: `config.yaml overrides.yaml provenance.json metrics.jsonl metrics.csv metrics.json queries.npz
    checkpoints/ figures/ report.html run.log`; `checkpoints/` has `last.ckpt`, `previous.ckpt` and the best ones.

    If there are several processes, only the first one writes here, while it holds the lock; the others add to run.log
    why they failed. If there are checkpoints, the configuration in the last one decides which run this is; else
    `config.yaml` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.last = path / "checkpoints" / LAST
        self.previous = path / "checkpoints" / PREVIOUS
        self._new_name: tuple[DictConfig, Sequence[str]] | None = None  # of a run that is being lengthened

    @classmethod
    def of(cls, config: DictConfig, overrides: Sequence[str] = ()) -> Self:
        """Returns the folder that a configuration names. All `paths` of the configuration become strings, as typed.

        Raises:
            UserError: one of the paths is empty, a list, or something else that names no folder.
        """
        typed = dict(option.split("=", 1) for option in overrides if option.startswith("paths.") and "=" in option)
        for name, value in config.paths.items():
            if value is None or value == "" or not isinstance(value, str | int | float):
                raise UserError(f"paths.{name}={'null' if value is None else value} is no folder: name one.")
            if not isinstance(value, str):  # a folder may be called 2026
                config.paths[name] = typed.get(f"paths.{name}", str(value))
        return cls(Path(config.paths.output_dir))

    def check(self, config: DictConfig) -> None:
        """Checks whether a run with this configuration may use the folder. It writes nothing.

        Raises:
            UserError: the folder belongs to another run, holds other files or results without checkpoints, or cannot
                be written.
        """
        try:
            self._check_place()
            if not self.path.exists() or self._untouched():
                return
            saved = self._saved()
            begun = self.begun() or any(self.path.glob("*/config.yaml"))
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read or written ({error.strerror}): choose another {elsewhere()}."
            ) from error
        if saved is None:
            if not is_first():
                return  # the first process may be about to write it
            raise UserError(
                f"{self.path} is not empty and holds no run (it lacks a config.yaml of one): name another folder "
                f"{elsewhere()}."
            )
        if not begun and (kept := [name for name in ("metrics.json", NETWORK) if (self.path / name).exists()]):
            raise UserError(
                f"{self.path} holds {kept[0]} of a run, but no checkpoint from which it could go on, and {kept[0]} "
                f"would be lost: name another folder {elsewhere()}."
            )
        if begun:  # before the first checkpoint, options may still be corrected
            self._check_same(flat(saved, saved.runtime), flat(config, saved.runtime))

    def _check_place(self) -> None:
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"{nearest} is no folder that can be written: choose another folder {elsewhere()}.")

    def _untouched(self) -> bool:
        """Returns whether the folder is new: it has only hidden files, output of the starter, or an empty log."""
        names = {path.name for path in self.path.iterdir() if not path.name.startswith(".")} - {OUTPUT}
        return not names or (names == {"run.log"} and not (self.path / "run.log").stat().st_size)

    def _saved(self) -> DictConfig | None:
        """Returns the configuration of the run in this folder: that of its last checkpoint, or else of its file."""
        path = self.checkpoint()
        return self.config() if path is None else OmegaConf.create(load_checkpoint(path)["config"])

    def _check_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raises UserError if two configurations differ, unless the training shall only become longer."""
        names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if LENGTH in names and _is_more(now.get(LENGTH), before.get(LENGTH)):
            lengths = (before[LENGTH], now[LENGTH])
            follow = [n for n in names if n != LENGTH and (before.get(n), now.get(n)) == lengths]
            if not set(names) - {LENGTH, *follow}:
                if follow:
                    raise UserError(
                        f"{self.path} holds a run of {lengths[0]} steps, which cannot be lengthened, since options "
                        f"depend on its length ({', '.join(follow)}): name another folder {elsewhere()}."
                    )
                self._check_end(*lengths)
                return
        if not names:
            return
        different = [f"{n} was {before.get(n, 'not there')}, is {now.get(n, 'not there')}" for n in names]
        remedy = "repeat its options to resume it"
        if not any(name in before and name in now for name in names):  # no value differs, but some options are missing
            remedy += ", with the version of dml that began it (provenance.json has its commit) if you added no option"
        raise UserError(
            f"{self.path} holds a run with another configuration ({'; '.join(different[:5])}"
            f"{' and more' if len(different) > 5 else ''}): {remedy}, or name another folder {elsewhere()}."
        )

    def _check_end(self, before: int, now: int) -> None:
        """Raises UserError if `protocol.patience` ended the run, since a longer training would end there too."""
        ended = self._end()
        if ended is not None and ended != before:
            raise UserError(
                f"{self.path} holds a run that protocol.patience ended at step {ended} of {before}, where it would end "
                f"with {now} steps too: repeat its options, or name another folder {elsewhere()}."
            )

    def _end(self) -> int | None:
        """Returns the step of the last checkpoint if the training ended there, else None."""
        path = self.checkpoint()
        saved = {} if path is None else load_checkpoint(path)
        return int(saved.get("global_step", 0)) if saved.get("finished") else None

    def open(self, config: DictConfig, overrides: Sequence[str]) -> None:
        """Prepares the folder for one training: makes its parts, and removes what a killed training left. Only the
        first process, which has locked the folder, does so. Raises UserError as `name`.

        A run that is lengthened keeps its configuration as long as it has the results of the shorter one."""
        if is_first():
            if self.lengthening(config):
                self._new_name = config, overrides
            else:
                self.forget_results()  # of a run that was killed while it became longer
                self.name(config, overrides)
            with self._writing():
                for part in ("checkpoints", "figures"):
                    (self.path / part).mkdir(exist_ok=True)
            if not self.begun():
                for given_up in self.last.parent.glob("best_on_*.ckpt"):
                    given_up.unlink()
            self._mend()

    def forget_results(self) -> None:
        """Removes the results, which a training that continues does not have yet. Then it may be called longer."""
        for name in ("metrics.json", "queries.npz", "embeddings.npz", "report.html"):
            (self.path / name).unlink(missing_ok=True)
        if self._new_name is not None:
            self.name(*self._new_name)
            self._new_name = None

    def _mend(self) -> None:
        """Removes checkpoints that a kill left half-written, and renames a last one that cannot be read."""
        for left in torn(self.last.parent, ".ckpt"):
            left.unlink()
        if self.last.exists() and self.checkpoint() != self.last:
            aside = self.last.with_name("damaged.ckpt")
            log.warning("%s is damaged (now %s): the run continues from the one before it.", self.last, aside.name)
            os.replace(self.last, aside)  # else the next save would overwrite the previous checkpoint with it

    def name(self, config: DictConfig, overrides: Sequence[str]) -> None:
        """Makes the folder and writes the configuration into it.

        Raises:
            UserError: the folder cannot be made or written.
        """
        with self._writing():
            # These come first, so that the folder is recognised as that of a run even if a kill comes now.
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_file, OmegaConf.to_yaml(config, resolve=True))
            write_atomically(self.path / "overrides.yaml", OmegaConf.to_yaml(list(overrides)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "make room, or " if no_room(error) else ""
            raise UserError(
                f"{self.path} cannot be made or written ({error.strerror}): {remedy}choose another folder "
                f"{elsewhere()}."
            ) from error

    def config(self) -> DictConfig | None:
        """Reads `config.yaml`. Returns None if there is none, or if it is not that of a run.

        Raises:
            UserError: the file has a form that no run writes.
        """
        if not self.config_file.is_file():
            return None
        found = read_yaml(self.config_file)
        if not isinstance(found, dict) or not isinstance(found.get("runtime"), dict) or "method" not in found:
            return None
        if refers(found):
            raise UserError(f"{self.config_file} holds references (${{...}}), which no run writes: it is not read.")
        return OmegaConf.create(found)

    def overrides(self) -> list[str]:
        """Returns the options that were typed for the run. Raises UserError if no run writes such a file."""
        file = self.path / "overrides.yaml"
        found = read_yaml(file) if file.exists() else []
        return [str(one) for one in found] if isinstance(found, list) else []

    def best(self, part: str) -> Path:
        """Returns the path of the checkpoint that was best on `test` or `validation`."""
        return self.path / "checkpoints" / f"best_on_{part}.ckpt"

    def begun(self) -> bool:
        """Returns whether a checkpoint was written."""
        return self.last.exists() or self.previous.exists()

    def checkpoint(self) -> Path | None:
        """Returns the checkpoint from which the training continues: the last one, or the one before if the last cannot
        be read. None if there is none yet.

        Raises:
            UserError: there are checkpoints, but none can be read.
        """
        if not self.begun():
            return None
        reasons = []
        for path in (self.last, self.previous):
            try:
                if path.exists():
                    load_checkpoint(path)
                    if sound(path):
                        return path
                    reasons.append(f"{path.name} is cut short or changed")
            except UserError as error:
                reasons.append(f"{path.name}: {error.__cause__ or error}")
        raise UserError(
            f"No checkpoint in {self.last.parent} is whole ({'; '.join(reasons)}): put back a copy of one, or name "
            f"another folder {elsewhere()} to train from the start."
        )

    def finished(self, config: DictConfig) -> bool:
        """Returns whether the run that `config` describes (`check` has accepted it) has finished: its last checkpoint
        is that of the end, which is written after the report.

        Raises:
            UserError: no checkpoint can be read, the checkpoint to continue from was written by another version, or
                `metrics.json` of a finished run is gone.
        """
        path = self.checkpoint()
        if path is None:
            return False
        saved = load_checkpoint(path)
        if not saved["finished"] or _is_more(config.trainer.max_steps, saved["config"]["trainer"].get("max_steps")):
            if saved.get("format") != FORMAT:
                raise UserError(
                    f"{path} was written by another version of dml, and only that version can continue it: train anew "
                    f"in another folder, {elsewhere()}."
                )
            return False
        try:
            self.metrics()
        except UserError as error:
            raise UserError(
                f"{self.path} has lost its metrics.json ({error}): delete checkpoints/{path.name}, and the end of the "
                "training is repeated from the checkpoint before it, if there is one."
            ) from error
        return True

    def lengthening(self, config: DictConfig) -> dict[str, Any]:
        """Returns from which step on the run is lengthened, and its old and new number of steps; empty if it is not."""
        path = self.checkpoint()
        saved = {} if path is None else load_checkpoint(path)
        before = saved["config"]["trainer"].get("max_steps") if saved else None
        if not _is_more(config.trainer.max_steps, before):
            return {}
        return {"from_step": saved.get("global_step"), "max_steps": [before, config.trainer.max_steps]}

    def metrics(self) -> dict[str, float]:
        """Reads the figures of a finished run. Raises UserError if `metrics.json` is missing or damaged."""
        return read_metrics_json(self.path / "metrics.json")

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Writes `metrics.json`."""
        write_atomically(self.path / "metrics.json", json.dumps(metrics, indent=1) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and locks it against other runs. The first process holds the lock for all processes of its
        run; a kill ends it.

        Raises:
            UserError: another process trains in this folder, or it cannot be made.
        """
        with ExitStack() as held:
            with self._writing():
                self.path.mkdir(parents=True, exist_ok=True)
                if is_first():
                    held.enter_context(alone(self.path / ".lock", self._taken))
            yield

    def _taken(self) -> None:
        raise UserError(
            f"{self.path} is being trained by another process: wait for it, or name another folder {elsewhere()}."
        )


def _is_more(now: Any, before: Any) -> bool:
    return isinstance(now, int) and isinstance(before, int) and now > before
