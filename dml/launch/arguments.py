"""Options of the commands that are no configuration of Hydra's."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from dml.configuration.defaults import CHECKPOINTS, EMBEDDED_AT_ONCE
from dml.errors import UserError
from dml.hub import is_address, parted


class Arguments(argparse.ArgumentParser):
    """A parser that says what is wrong in one sentence; paragraphs of the description stay as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; {self.prog} --help says what there is.")


def place(word: str) -> str | Path:
    """The type of an argument that is a folder, or the address of a model."""
    return word if is_address(word) else Path(word)


def beside(place: str | Path, name: str) -> Path:
    """Where a command puts what it makes of a run if nothing is said: into the run's folder; of an address into one
    here that has the model's name."""
    return (Path(parted(place)[0].rpartition("/")[2]) if isinstance(place, str) else place) / name


def embedding_options(parser: argparse.ArgumentParser, skip: bool = True) -> None:
    """Which weights embed images, where, and how many at a time: `--checkpoint`, `--device`, `--batch-size`; with
    `skip` also `--skip`."""
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="last", help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=int, default=EMBEDDED_AT_ONCE, help="images at a time (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: %(default)s")
    if skip:
        parser.add_argument("--skip", action="store_true", help="leave out images that cannot be read")
