"""`python -m dml.aggregate FOLDER...`: MAP@R and other metrics over the trainings of MLRC's folds.

The model of each training is tested alone (separated), and the embeddings of one model of each fold are put side by
side (concatenated).
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SUMMARY
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.aggregate", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of runs or sweeps")
    parser.add_argument("-o", "--out", type=Path, default=SUMMARY, metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args()
    from dml.analysis.mlrc import write_aggregate

    write_aggregate(options.folders, options.out)


if __name__ == "__main__":
    main()
