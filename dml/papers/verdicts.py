"""Whether a pattern that a paper reports shows in what was measured here: a sentence for each row that has one."""

from dml.evaluation.metric import metric
from dml.papers.experiment import Experiment
from dml.papers.measured import Compared

ABOVE, BELOW = "above", "below"
SHOWS, OTHER, OPEN = "shows", "is the other way round", "is open"


def verdicts(experiment: Experiment) -> list[str]:
    """Returns a sentence for each measured comparison whose direction a paper prints.

    The verdict goes by the 95 % interval of the difference over test classes and seeds. The pattern shows if the whole
    interval lies on the paper's side of zero, is the other way round if it lies on the other side, and is open
    otherwise. If nothing tells how much seeds change, the sentence says so.
    """
    return [_sentence(one, expected) for one, expected in patterns(experiment)]


def patterns(experiment: Experiment) -> list[tuple[Compared, str]]:
    """Returns the measured comparisons whose direction a paper prints, each with `above` or `below`: those of a part
    together, rows in their order."""
    parts, rows = list(experiment.parts), list(experiment.rows)
    return [
        (one, expected)
        for one in sorted(
            experiment.compared, key=lambda one: (one.changes, parts.index(one.part), rows.index(one.row))
        )
        if (expected := experiment.rows[one.row].pattern.get(one.metric)) is not None
    ]


def verdict(found: Compared, expected: str) -> str:
    """Returns "shows", "is the other way round" or "is open".

    Args:
        expected: `above` or `below`: where the paper has the row, seen from the one that it is compared with.
    """
    low, high = (found.low, found.high) if expected == ABOVE else (-found.high, -found.low)
    if low > 0:
        return SHOWS
    return OTHER if high < 0 else OPEN


def interval(found: Compared) -> str:
    """Writes a difference in points, with its interval."""
    return f"{100 * found.estimate:+.2f} ({100 * found.low:+.2f} to {100 * found.high:+.2f})"


def _sentence(found: Compared, expected: str) -> str:
    setting = f" with {' '.join(found.changes)}" if found.changes else ""
    where = f"{found.row}, {found.part}{setting}: the paper has it {expected} {found.against} in"
    measured = f"{metric(found.metric).title}; here it lies {interval(found)} points from it"
    said = verdict(found, expected)
    unsure = "" if found.seeds or said == OPEN else ", as far as one seed tells"
    return f"{where} {measured}. The pattern {said}{unsure}."
