"""`python -m dml.aggregate FOLDER...`: what the trainings of MLRC's folds come to together.

Embeddings of one training stand alone (separated), or those of one training a fold stand side by side (concatenated).
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.configuration.defaults import SUMMARY
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.aggregate", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs or sweeps")
    parser.add_argument("-o", "--out", type=Path, default=SUMMARY, metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args()
    from dml.analysis.mlrc import write_aggregate

    write_aggregate(options.folders, options.out)


if __name__ == "__main__":
    main()
