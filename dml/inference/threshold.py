"""The choice of a threshold: the smallest similarity at which two images are taken to be of one class."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dml.configuration.defaults import EMBEDDED_AT_ONCE
from dml.configuration.ranges import Size, check_value
from dml.errors import UserError
from dml.evaluation.calibration import Calibration
from dml.evaluation.pairs import Operating, Pairs
from dml.evaluation.splits import EvaluatedPart
from dml.figures.pairs import roc_and_calibration
from dml.figures.plot import Plot
from dml.files import write_atomically
from dml.inference.embedding import Trained
from dml.inference.tested import Tested
from dml.runs.reading import reading, require

FILE, PICTURE = "threshold.json", "threshold"

Rate = Annotated[float, Field(gt=0, lt=1)]

SHOWN = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # FMRs of the table; those that the pairs cannot resolve are left out


def choose(
    run: Path,
    fmr: float,
    *,
    checkpoint: str | None = None,
    batch_size: int = EMBEDDED_AT_ONCE,
    device: str = "auto",
) -> dict[str, Any]:
    """Runs the command: chooses a threshold, tests it, prints a table, and writes `threshold.json` and
    `figures/threshold.png` into the run's folder.

    The threshold is chosen, and similarities are calibrated, on validation classes if the run's protocol has some. Else
    the test images serve for that too, which flatters the results; the command says so, and `threshold.json` has it.

    Args:
        fmr: false match rate at which the threshold is chosen.
        run, checkpoint, device: see `dml.inference.embedding.Trained.of`.
        batch_size: images that are embedded at a time.

    Returns:
        The content of `threshold.json`.

    Raises:
        UserError: there is no such run, `fmr` is not between 0 and 1 or smaller than the pairs can resolve, the data is
            not there any more, images cannot be read, or the run's folder cannot be written.
    """
    check_value("--fmr", fmr, Rate)
    check_value("--batch-size", batch_size, Size)
    trained = Trained.of(run, checkpoint, device)
    if not os.access(run, os.W_OK | os.X_OK):
        raise UserError(f"{run} cannot be written: copy the run to a folder that can be written.")
    images = Tested.of(trained)
    part: EvaluatedPart = images.split.monitor
    test = _pairs(trained, images, "test", batch_size)
    on = test if part == "test" else _pairs(trained, images, part, batch_size)
    if fmr < on.resolves():
        raise UserError(
            f"--fmr {fmr:g}: the {on.different:,} pairs of two {part} classes resolve no FMR below "
            f"{_rounded_up(on.resolves())}; ask for that or more, or test on more images."
        )
    resolved = [one for one in SHOWN if one >= test.resolves()]
    if on is test:  # in one pass
        chosen, *points = test.operating([fmr, *resolved])
    else:
        (chosen,), points = on.operating([fmr]), test.operating(resolved)
    threshold = chosen.threshold
    matches, calibration = test.at(threshold), Calibration.of(on)
    reliability = calibration.on(test)
    content: dict[str, Any] = {
        "fmr": fmr,
        "threshold": threshold,
        "chosen_on": part,
        "weights": trained.digest(),
        "checkpoint": trained.checkpoint.name,
        "step": trained.step,
        "test": {
            "fmr": matches.fmr,
            "fnmr": matches.fnmr,
            "intervals": matches.intervals(),
            "pairs_of_one_class": test.same,
            "pairs_of_two_classes": test.different,
            "classes": matches.classes,
        },
        "operating_points": [asdict(point) for point in points],
        "calibration": asdict(calibration) | {"chosen_on": part, "cllr": reliability.cllr, "error": reliability.error},
    }
    curves = {one: of.curve()[1:] for one, of in {part: on, "test": test}.items()}
    bands = reliability.predicted, reliability.observed, reliability.share
    figure = roc_and_calibration(
        {one: (x[::-1], y[::-1]) for one, (x, y) in curves.items()}, (matches.fmr, matches.fnmr), bands, test.resolves()
    )
    try:
        (run / "figures").mkdir(exist_ok=True)
        Plot(PICTURE, "How a threshold parts the pairs", figure).save(run / "figures" / f"{PICTURE}.png")
        write_atomically(run / FILE, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"{run} cannot be written ({error.strerror}): copy the run to a folder that can be written."
        ) from error
    _print(content, points)
    print(f"Threshold: {run / FILE}")
    return content


def _rounded_up(rate: float) -> str:
    """Writes a rate with two digits, not below it, so that it can be asked for."""
    scale = 10 ** (1 - math.floor(math.log10(rate)))
    return f"{math.ceil(rate * scale) / scale:.2g}"


def read_threshold(run: Path, trained: Trained) -> float:
    """Reads the threshold that `choose` wrote for a run.

    Raises:
        UserError: there is no `threshold.json`, it is damaged, or it was chosen for other weights.
    """
    path, remedy = run / FILE, f"choose one with python -m dml.threshold {run} --fmr 1e-3"
    with reading(path, remedy):
        found = json.loads(path.read_text())
        require(isinstance(found, dict) and isinstance(found.get("threshold"), float), "it holds no threshold")
        require(bool(np.isfinite(found["threshold"])), "its threshold is not finite")
    if found.get("weights") != trained.digest():
        raise UserError(f"{path} was chosen for other weights than those of {trained.checkpoint}: {remedy}.")
    return float(found["threshold"])


def _pairs(trained: Trained, images: Tested, part: EvaluatedPart, batch_size: int) -> Pairs:
    rows = images.rows(part)
    assert rows is not None
    labels = images.records.labels
    if part == "test":  # distractors are no class: two of them are not two images of one
        rows = rows[np.isin(labels[rows], labels[images.split.query])]
    try:
        points = images.embed(trained, rows, batch_size).to(trained.method.device)
        return Pairs(points, labels[rows])
    except UserError as error:
        raise UserError(f"{part} images of {images.records.name}: {error}") from error


def _print(content: dict[str, Any], points: list[Operating]) -> None:
    test, part = content["test"], content["chosen_on"]
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"{test['pairs_of_one_class']:,} pairs of one class, {test['pairs_of_two_classes']:,} of two",
        caption="thresholds of this table are chosen on the test" if part == "validation" else None,
    )
    for title in ("FMR asked for", "threshold", "FMR", "FNMR"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in points:
        table.add_row(f"{point.asked:g}", f"{point.threshold:.4f}", f"{point.fmr:.3g}", f"{point.fnmr:.4f}")
    Console().print(table)
    flattered = "" if part == "validation" else " (the protocol has no validation classes: this flatters it)"
    (f_low, f_high), (n_low, n_high) = test["intervals"]["fmr"], test["intervals"]["fnmr"]
    print(
        f"Threshold {content['threshold']:.4f}, chosen at FMR {content['fmr']:g} on {part} classes{flattered}.\n"
        f"On the test: FMR {test['fmr']:.3g} [{f_low:.3g}, {f_high:.3g}], FNMR {test['fnmr']:.4f} "
        f"[{n_low:.4f}, {n_high:.4f}]; 95 % over test classes."
    )
