"""Whether searches and trainings of experiments can be carried out here: their options, their data, a GPU."""

import sys
from collections.abc import Sequence

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from dml.configuration.command_line import hydra_sentence
from dml.configuration.composition import composed
from dml.configuration.options import check
from dml.data.dataset import open_dataset
from dml.errors import UserError
from dml.papers.experiment import Search, Training
from dml.papers.tuning import example


def check_options(wanted: Sequence[Search | Training]) -> None:
    """Checks whether the options of searches and trainings compose and are allowed; scripts have none.

    Of those that choose the same components, which take the same options, one is checked: composing takes a third of a
    second, and there are hundreds of rows.

    Raises:
        UserError: an option does not fit a row.
    """
    distinct: dict[frozenset[str], tuple[str, Sequence[str]]] = {}
    for one in wanted:
        if isinstance(one, Search) or not one.script:
            options = example(one) if isinstance(one, Search) else one.overrides
            chosen = frozenset(o for o in options if o.startswith(("+", "~")) or "." not in o.partition("=")[0])
            distinct.setdefault(chosen, (f"{one.experiment}, {one.row}", options))
    for place, options in tqdm(distinct.values(), desc="checking", leave=False, disable=None):
        checked(place, options)


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


def possible(trainings: Sequence[Training], elsewhere: bool = False) -> list[Training]:
    """Returns the trainings that lack nothing, and prints what the others lack, see `lacking`. UserError if none is
    left."""
    missing = lacking([one for one in trainings if not one.script], elsewhere)
    for sentence, (first, *more) in missing.items():
        others = f" and {len(more)} more" if more else ""
        print(f"Cannot be trained ({first.experiment}, {first.row}, {first.part}{others}): {sentence}", file=sys.stderr)
    gone = {one.overrides for some in missing.values() for one in some}
    possible = [one for one in trainings if one.overrides not in gone]
    if not possible:
        raise UserError("nothing of this can be trained here, see above: --dry-run prints the commands.")
    return possible


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
