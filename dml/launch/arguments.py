"""Command-line arguments of the commands that do not use Hydra."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from dml.configuration.defaults import CHECKPOINT, CHECKPOINTS, EMBEDDED_AT_ONCE
from dml.errors import UserError
from dml.hub import is_address, parted


class Arguments(argparse.ArgumentParser):
    """A parser that reports mistakes as UserError and prints the description with its line breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises UserError with the parser's message."""
        raise UserError(f"{message}; {self.prog} --help lists all options.")


def place(word: str) -> str | Path:
    """Parses an argument that is a path or the address of a model."""
    return word if is_address(word) else Path(word)


def beside(place: str | Path, name: str) -> Path:
    """Returns the default path of a command's output: `name` in the run's folder. For an address it is `name` in a
    folder with the model's name, below the current one."""
    return (Path(parted(place)[0].rpartition("/")[2]) if isinstance(place, str) else place) / name


def embedding_options(parser: argparse.ArgumentParser, skip: bool = True) -> None:
    """Adds the options of commands that embed images: `--checkpoint`, `--batch-size`, `--device`, and with `skip` also
    `--skip`."""
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, help=CHECKPOINT)
    parser.add_argument(
        "--batch-size", type=int, default=EMBEDDED_AT_ONCE, help="images at a time (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: %(default)s")
    if skip:
        parser.add_argument("--skip", action="store_true", help="leave out images that cannot be read")
