"""Every option of a configuration with values that it does not mean."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dml.configuration.composition import CONF
from dml.configuration.composition import composed as compose
from dml.errors import UserError
from dml.training.run import run
from tests.conftest import TINY

WRONG: dict[str, Any] = {
    "wrong type": "abc",
    "word for a truth value": "no",
    "truth value": True,
    "negative": -1,
    "0": 0,
    "fraction": 2.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**9,
    "huge fraction": 1e300,
    "empty": "",
    "list": [],
    "null": None,
}
# What decides where a run is, or has no wrong value, is tried elsewhere.
LEFT_OUT = ("paths.", "download", "runtime", "hydra", "logger", "dataset.root", "dataset.name", "trainer.max_steps")

# A value in its range that is too much for this training or this machine.
DIVERGED = ("The loss term", "There is too little memory")


# One of the trainings of a protocol that has several.
ONE = {"protocol=mlrc": ["protocol.fold=0", "protocol.repeat=0"], "protocol=random_class_split": ["protocol.split=0"]}


def composed(*overrides: str) -> DictConfig:
    given = [*TINY, "trainer.max_steps=2", "protocol.every=2", *overrides]
    for override in overrides:
        given += ONE.get(override, [])
    return compose(*given)


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all options, references among them."""
    for name in config:
        option = f"{prefix}{name}"
        node = config._get_node(name)
        if isinstance(node, DictConfig) and node._is_none() is False and not node._is_interpolation():
            yield from leaves(node, f"{option}.")
        elif not option.startswith(LEFT_OUT):
            yield option


def choices() -> list[str]:
    """Of the groups whose components a training on rendered characters can have; and what every configuration has."""
    groups = ("head", "loss", "method", "miner", "protocol", "sampler", "trainer", "transform")
    files = [file for group in groups for file in sorted((CONF / group).glob("*.yaml"))]
    absent = ("market1501", "ddp", "none")  # cameras and several devices are not at hand here; none has no options
    return [
        "",
        "dataset=glyphs",
        "backbone=small",
        *(f"{file.parent.name}={file.stem}" for file in files if file.stem not in absent),
    ]


def options_of(choice: str) -> list[str]:
    """The options of a choice; of none, those of every configuration that belong to no group."""
    group = choice.partition("=")[0]
    found = leaves(composed(*([choice] if choice else [])))
    return [o for o in found if (o.startswith(f"{group}.") if choice else "." not in o)]


def tried(composition: DictConfig, option: str, value: Any, folder: Path) -> str:
    """What a run does: `refused`, `trained`, or what went wrong, with the sentence or exception."""
    config = composition.copy()
    OmegaConf.set_struct(config, False)
    config.paths.update(output_dir=str(folder), cache_dir=str(folder.parent / "cache"))
    OmegaConf.update(config, option, value, force_add=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(config, [])
    except UserError as mistake:
        sentence = str(mistake)
        if "\n" in sentence:
            return f"several lines: {sentence}"
        words = {option, option.rpartition(".")[2], option.removesuffix("._target_")}
        told = any(word in sentence for word in words) or sentence.startswith(DIVERGED)
        return "refused" if told else f"names no option: {sentence}"
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "trained"


def all_of(overrides: list[str], options: list[str], folder: Path) -> tuple[Counter[str], list[str]]:
    """Counts of refused, trained and other, and a line for each of the others."""
    counts: Counter[str] = Counter()
    others = []
    composition = composed(*overrides)
    for option in options:
        for name, value in WRONG.items():
            if value is None and option in ("protocol.fold", "protocol.repeat", "protocol.split"):
                continue  # all of them, which is several trainings
            outcome = tried(composition, option, value, folder / f"run{sum(counts.values())}")
            counts[outcome if outcome in ("refused", "trained") else "other"] += 1
            if outcome not in ("refused", "trained"):
                others.append(f"{' '.join(overrides)} {option}={value!r} ({name}): {outcome}")
    return counts, others
