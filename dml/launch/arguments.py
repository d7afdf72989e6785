"""Options of the commands that are no configuration of Hydra's."""

import argparse
from typing import Any, NoReturn

from dml.configuration.defaults import CHECKPOINTS, EMBEDDED_AT_ONCE
from dml.errors import UserError


class Arguments(argparse.ArgumentParser):
    """A parser that says what is wrong in one sentence; paragraphs of the description stay as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; {self.prog} --help says what there is.")


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
