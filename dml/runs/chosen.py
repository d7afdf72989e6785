"""Which checkpoint of a run its figures are of."""

from collections.abc import Mapping


def monitor(metrics: Mapping[str, float]) -> str:
    """Returns on which part of the split the best checkpoint was chosen, `test` or `validation`."""
    return "validation" if "best_on_validation/step" in metrics else "test"


def result(metrics: Mapping[str, float]) -> str:
    """Returns the name of the checkpoint to which a run's figures belong.

    If that is not the last checkpoint, `metrics.json` has the last one's figures too, under `last/`.
    """
    chosen = any(name.startswith("last/") for name in metrics)
    return f"best_on_{monitor(metrics)}" if chosen else "last"
