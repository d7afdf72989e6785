"""`python -m dml.threshold RUN --fmr 1e-3`: the similarity from which two images are taken to be of one class.

FMR is the share of the pairs of different classes that match, FNMR the share of the pairs of one class that do not. The
threshold is chosen on validation classes if the run's protocol has some, else on the test images. It is tested exactly,
on all pairs of test images. RUN gets threshold.json, which python -m dml.search --threshold uses to say "no match", and
figures/threshold.png with the ROC curve and the calibration.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.launch.arguments import Arguments, embedding_options


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.threshold", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--fmr", type=float, required=True, help="false match rate, for example 1e-3")
    embedding_options(parser, skip=False)
    options = parser.parse_args()
    from dml.inference.threshold import choose

    choose(
        options.run,
        options.fmr,
        checkpoint=options.checkpoint,
        batch_size=options.batch_size,
        device=options.device,
    )


if __name__ == "__main__":
    main()
